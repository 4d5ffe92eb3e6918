//! An acquire that is dropped leaves nothing behind.
