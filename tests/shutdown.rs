//! What a shutdown does with those who hold, wait and come later.
