//! Several processes on a few hot keys, under faults.
