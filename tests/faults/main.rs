//! Lost replies, frozen processes, silent servers, what a server refuses, and stores that break a rule.

mod broken_stores;
mod chaos;
mod fencing;
mod links;
mod lost_replies;
mod renewal;
mod server_errors;
mod unclaimed;
mod undo;
