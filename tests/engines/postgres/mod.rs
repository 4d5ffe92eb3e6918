//! `postgres://`

mod conformance;
mod wait_queue;
