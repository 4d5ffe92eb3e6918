//! Every kind of store: one server, sentinels, clusters, replicas, proxies, other versions and other libraries.

mod cluster;
mod conformance;
mod forced;
mod health;
mod inspect;
mod interop;
mod listed;
mod lock_changes;
mod logins;
mod proxies;
mod replicas;
mod scriptless;
mod sentinel;
mod sequencers;
mod server_versions;
mod shard_messages;
mod slot_checks;
