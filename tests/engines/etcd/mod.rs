//! `etcd://`

mod conformance;
