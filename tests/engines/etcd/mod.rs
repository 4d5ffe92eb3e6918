//! `etcd://`

mod cluster;
mod conformance;
mod errors;
mod examples;
mod faults;
mod inspect;
mod interleavings;
mod interop;
mod leases;
mod wait_queue;
