//! `mysql://`

mod conformance;
mod errors;
mod faults;
mod wait_queue;
