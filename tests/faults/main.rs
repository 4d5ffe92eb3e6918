//! Lost replies, frozen processes, silent servers, what a server refuses, stores that break a rule, and panics in the
//! code of others.

mod broken_stores;
mod chaos;
mod fencing;
mod links;
mod lost_replies;
mod min_hold;
mod panics;
mod renewal;
mod server_errors;
mod unclaimed;
mod undo;
