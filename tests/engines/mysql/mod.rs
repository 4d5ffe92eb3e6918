//! `mysql://`

mod conformance;
mod errors;
mod faults;
mod inspect;
mod interleavings;
mod wait_queue;
