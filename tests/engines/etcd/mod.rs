//! `etcd://`

mod access;
mod cluster;
mod conformance;
mod errors;
mod examples;
mod faults;
mod inspect;
mod interleavings;
mod interop;
mod leases;
mod newer;
mod wait_queue;
