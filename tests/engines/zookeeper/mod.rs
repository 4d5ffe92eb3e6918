//! `zookeeper://`

mod conformance;
mod ensemble;
mod errors;
mod faults;
mod interop;
mod sessions;
mod wait_queue;
