//! How a lock that is waited for passes from one to the next, within a process and between them.

mod handoff;
mod multi_key;
mod push;
mod several_keys;
mod wait_queue;
