//! `postgres://`

mod conformance;
mod errors;
mod examples;
mod faults;
mod pooler;
mod wait_queue;
