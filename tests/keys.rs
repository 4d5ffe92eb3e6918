//! Different arguments never give the same key.
