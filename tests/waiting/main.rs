//! How a contended lock passes from holder to waiter, within a process and between processes.

mod handoff;
mod linger;
mod multi_key;
mod push;
mod several_keys;
mod wait_queue;
