//! What etcd and ZooKeeper have in common: both delete on their own what a process has left.

pub(crate) mod addresses;
pub(crate) mod cluster_url;
pub(crate) mod first_server;
pub(crate) mod lifetime_classes;
pub(crate) mod owners;
pub(crate) mod positions;
