//! The program `lockctl`, on real servers.

mod doctor;
mod release;
mod show;
mod terminal;
