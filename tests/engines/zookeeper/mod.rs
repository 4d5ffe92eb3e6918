//! `zookeeper://`

mod conformance;
