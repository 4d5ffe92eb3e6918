//! The interface of a pool and of the attribute: arguments, errors, cancellation, every way out of a body, shutdown.

mod callers;
mod cancellation;
mod errors;
mod exit_paths;
mod fork;
mod granting_store;
mod guide_testing;
mod keys;
mod lost;
mod nested;
mod own_pools;
mod policies;
mod progress;
mod regressions;
mod serving;
mod shutdown;
mod snapshot;
mod store_timing;
mod web;
mod web_bodies;
