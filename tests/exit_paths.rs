//! Every way out of a body, and of a guard, frees the lock.
