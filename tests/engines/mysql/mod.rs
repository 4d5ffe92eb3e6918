//! `mysql://`

mod conformance;
mod errors;
mod faults;
mod inspect;
mod interleavings;
mod newer;
mod wait_queue;
