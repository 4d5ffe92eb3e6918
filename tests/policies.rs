//! What the arguments of the attribute do when the program runs.
