//! What a caller is told when the store cannot or will not.
