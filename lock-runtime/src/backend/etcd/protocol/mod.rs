//! Messages of etcd's API, version 3, as far as the store uses them.

pub(crate) mod cluster;
pub(crate) mod key_value;
pub(crate) mod lease;
pub(crate) mod protobuf;
pub(crate) mod transaction;
pub(crate) mod watch;
