//! A lease is kept alive while it is held, and given up in time when it cannot be.
