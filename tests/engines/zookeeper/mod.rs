//! `zookeeper://`

mod conformance;
mod ensemble;
mod errors;
mod faults;
mod inspect;
mod interleavings;
mod interop;
mod older;
mod sessions;
mod wait_queue;
