//! The test bench of the lock crates: real servers, faults on the wire, worker processes, and a
//! checker for what they report.
//!
//! | module | gives a test |
//! |---|---|
//! | [`quorum`] | several of them that vote |
//! | [`server`] | a private `redis-server` that can be paused, killed and restarted |
//! | [`proxy`] | a wire to it that loses, holds and delays what the test names |
//! | [`monitor`] | every command the server ran, in its order |
//! | [`process`] | worker processes that can be paused and killed |
//! | [`history`] | who held what and when, and whether that was safe |
//! | [`mod@eventually`], [`poll`] | waiting for conditions; dropping futures at every poll point |
//! | [`mod@examples`] | the programs of `examples/` |
//! | [`sizes`] | how large wrapped futures are |
//! | [`told`] | what an error has to tell |
//! | [`logs`] | everything that was traced, as text |
//!
//! Nothing here sleeps and hopes: a wait names its condition and its deadline, and panics with both.

// The bench measures the product from outside, so it reads clocks and waits on its own.
#![allow(clippy::disallowed_methods)]

pub mod eventually;
pub mod examples;
pub mod history;
pub mod logs;
pub mod monitor;
pub mod poll;
pub mod process;
pub mod proxy;
pub mod quorum;
pub mod resp;
pub mod server;
pub mod sizes;
pub mod tls;
pub mod told;

pub use eventually::{eventually, eventually_async, eventually_some};
pub use examples::example;
pub use monitor::Monitor;
pub use process::Worker;
pub use proxy::FaultProxy;
pub use quorum::Quorum;
pub use server::RedisServer;
