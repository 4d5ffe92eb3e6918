//! Lost replies, frozen processes, silent servers, and what a server refuses.

mod chaos;
mod fencing;
mod links;
mod lost_replies;
mod renewal;
mod server_errors;
