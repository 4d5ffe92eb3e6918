//! Lost replies, frozen processes, silent servers, refusals of servers, stores that break a rule, and panics in foreign
//! code.

mod broken_stores;
mod caller_runtimes;
mod chaos;
mod fence_transactions;
mod fencing;
mod links;
mod lock_delay;
mod lost_replies;
mod min_hold;
mod outage;
mod panics;
mod renewal;
mod server_errors;
mod shared_scripts;
mod unclaimed;
mod undo;
