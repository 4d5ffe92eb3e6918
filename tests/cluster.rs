//! Locks in a Redis Cluster.
#[test]
fn x() {}
