//! The test bench of the lock crates: real servers, faults on the wire, worker processes, and a
//! checker for what they report.
//!
//! | module | gives a test |
//! |---|---|
//! | [`quorum`] | several of them that vote |
//! | [`server`] | a private `redis-server` that can be paused, killed and restarted |
//! | [`cluster`] | a private Redis Cluster whose masters can be killed and whose slots can be moved |
//! | [`sentinel`] | a master, its replicas and the sentinels that watch them |
//! | [`versions`] | the servers of other versions that are installed |
//! | [`tls`], [`tunnel`] | a private authority; TLS in front of a server that has none |
//! | [`skew`] | one whose clock is stepped, or runs fast |
//! | [`proxy`] | a wire to it that loses, holds and delays what the test names |
//! | [`monitor`] | every command the server ran, in its order |
//! | [`process`] | worker processes that can be paused and killed |
//! | [`history`] | who held what and when, and whether that was safe |
//! | [`mod@eventually`], [`poll`] | waiting for conditions; dropping futures at every poll point |
//! | [`prompt`] | spans that are short on a busy machine too |
//! | [`mod@alone`] | a process of its own |
//! | [`mod@examples`] | the programs of `examples/` |
//! | [`runtimes`] | runtimes that a test may end |
//! | [`sizes`] | how large wrapped futures are |
//! | [`told`] | what an error has to tell |
//! | [`logs`] | everything that was traced, as text |
//!
//! Nothing here sleeps and hopes: a wait names its condition and its deadline, and panics with both.

// The bench measures the product from outside, so it reads clocks and waits on its own.
#![allow(clippy::disallowed_methods)]

pub mod alone;
pub mod cluster;
pub mod eventually;
pub mod examples;
pub mod history;
pub mod logs;
pub mod monitor;
pub mod poll;
pub mod process;
pub mod prompt;
pub mod proxy;
pub mod quorum;
pub mod resp;
pub mod runtimes;
pub mod sentinel;
pub mod server;
pub mod sizes;
pub mod skew;
pub mod tls;
pub mod told;
pub mod tunnel;
pub mod versions;

pub use alone::alone;
pub use cluster::RedisCluster;
pub use eventually::{eventually, eventually_async, eventually_some};
pub use examples::example;
pub use monitor::Monitor;
pub use process::Worker;
pub use prompt::Prompt;
pub use proxy::FaultProxy;
pub use quorum::Quorum;
pub use sentinel::Watched;
pub use server::RedisServer;
pub use skew::Skew;
