//! The client protocol of ZooKeeper, without I/O: what a frame says, and how its answer is read.
//!
//! A frame is its length and records of `jute`: big-endian integers, and texts and buffers after their length. A server answers
//! the requests of a connection in their order. Pings and notifications of watches come between the answers.

pub(crate) mod answer;
pub(crate) mod handshake;
pub(crate) mod jute;
pub(crate) mod operation;
pub(crate) mod server_code;
