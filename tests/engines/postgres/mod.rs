//! `postgres://`

mod conformance;
mod errors;
mod examples;
mod faults;
mod inspect;
mod newer;
mod pooler;
mod wait_queue;
