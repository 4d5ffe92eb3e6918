//! `postgres://`

mod conformance;
mod errors;
mod faults;
mod pooler;
mod wait_queue;
