//! Stores other than Redis. Each has a module, and a variable that leaves it out, see `tests/run.sh`.

mod chaos;
mod choose_store;
mod clock_steps;
mod etcd;
mod fence_gate;
mod moved_store;
mod mysql;
mod old_tables;
mod pin;
mod postgres;
mod zookeeper;
