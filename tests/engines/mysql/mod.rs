//! `mysql://`

mod conformance;
mod errors;
mod faults;
mod interleavings;
mod wait_queue;
