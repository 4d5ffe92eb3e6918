//! The program `lockctl`, on real servers.

mod doctor;
mod list;
mod release;
mod show;
mod stores;
mod terminal;
