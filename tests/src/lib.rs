//! The test harness of the lock crates: real servers, faults on the wire, worker processes, and a checker of lock
//! histories.
//!
//! | module | content |
//! |---|---|
//! | [`prelude`] | helpers that most test modules use |
//! | [`server`] | a private `redis-server` that can be paused, killed and restarted |
//! | [`cluster`] | a private Redis Cluster; masters can be killed and slots moved |
//! | [`sentinel`] | a master, its replicas and the sentinels that watch them |
//! | [`etcd`] | private etcd members, and requests to inspect them |
//! | [`mysql`] | a private MariaDB or MySQL server |
//! | [`postgres`] | a private PostgreSQL server |
//! | [`zookeeper`], [`zookeeper_client`] | private ZooKeeper servers, and a client to inspect them |
//! | [`mod@engine`] | these four stores behind one interface |
//! | [`quorum`] | several independent servers that vote |
//! | [`versions`] | the installed servers of other versions |
//! | [`tls`], [`tunnel`] | a private certificate authority; TLS in front of a server that has none |
//! | [`skew`] | a server with a clock that steps or runs fast |
//! | [`proxy`] | a connection to a server that loses, holds and delays selected messages |
//! | [`sql`] | PostgreSQL and MariaDB behind one interface, for transactions of a program |
//! | [`statements`] | a connection to MySQL that stops between two statements of a script |
//! | [`monitor`] | every command that the server ran, in order |
//! | [`process`] | worker processes that can be paused and killed |
//! | [`mod@own_process`] | a test in a process of its own |
//! | [`folder`] | temporary folders that end with the program |
//! | [`foreign`] | programs and libraries of other languages |
//! | [`http`] | one HTTP request over a connection of its own |
//! | [`browser`] | a headless Chromium |
//! | [`prometheus`] | a private Prometheus |
//! | [`sequencers`] | what a sequencer has to be on every store |
//! | [`lock_delays`] | what a `lock_delay` does on every store |
//! | [`exits`] | ways out of a body, and what frees the lock then |
//! | [`dropped_acquires`] | acquires that are dropped at each of their polls |
//! | [`late_writes`] | a holder that is stopped, and writes after its ttl |
//! | [`transfers`] | processes that lock overlapping sets of keys |
//! | [`worker_tasks`] | tasks of a worker process that go on until its standard input ends |
//! | [`crowd`] | processes that contend for a few locks under faults |
//! | [`history`] | recorded grants and losses, checked for exclusion and fence order |
//! | [`mod@eventually`] | waiting for a condition |
//! | [`poll`] | dropping a future at each of its poll points |
//! | [`inspected`] | what a store tells of the holder of a key |
//! | [`forced`] | a lock that is taken from its holder |
//! | [`listed`] | the locks that a store lists |
//! | [`mod@lockctl`] | the program of that name |
//! | [`latency`] | delays that stay below a limit on a busy machine too |
//! | [`expected_error`] | what the text of an error must contain |
//! | [`logs`] | all traced events, as text |
//! | [`mod@cargo`] | cargo as a child process |
//! | [`mod@examples`] | the programs of `examples/` |
//! | [`runtimes`] | runtimes that a test may end |
//! | [`sizes`] | sizes of wrapped futures |
//!
//! A wait names its condition and its deadline, and panics with both. No wait is a fixed sleep.

// The harness measures the product from outside, so it reads clocks and waits on its own.
#![allow(clippy::disallowed_methods)]

pub mod browser;
pub mod cargo;
pub mod cluster;
pub mod crowd;
pub mod dropped_acquires;
pub mod engine;
pub mod etcd;
pub mod eventually;
pub mod examples;
pub mod exits;
pub mod expected_error;
pub mod folder;
pub mod forced;
pub mod foreign;
pub mod history;
pub mod http;
pub mod inspected;
pub mod late_writes;
pub mod latency;
pub mod listed;
pub mod lock_delays;
pub mod lockctl;
pub mod logs;
pub mod monitor;
pub mod mysql;
pub mod own_process;
pub mod poll;
pub mod postgres;
pub mod prelude;
pub mod process;
pub mod prometheus;
pub mod proxy;
pub mod quorum;
pub mod resp;
pub mod runtimes;
pub mod sentinel;
pub mod sequencers;
pub mod server;
pub mod sizes;
pub mod skew;
pub mod sql;
pub mod statements;
mod templates;
pub mod tls;
pub mod transfers;
pub mod tunnel;
pub mod versions;
pub mod worker_tasks;
pub mod zookeeper;
pub mod zookeeper_client;

pub use cargo::cargo;
pub use cluster::RedisCluster;
pub use engine::{Engine, EngineKind};
pub use etcd::{EtcdServer, EtcdTrio};
pub use eventually::{eventually, eventually_async, eventually_some};
pub use examples::example;
pub use latency::Latency;
pub use monitor::Monitor;
pub use mysql::MysqlServer;
pub use own_process::in_own_process;
pub use postgres::PostgresServer;
pub use process::Worker;
pub use prometheus::PrometheusServer;
pub use proxy::FaultProxy;
pub use quorum::Quorum;
pub use sentinel::Watched;
pub use server::RedisServer;
pub use skew::Skew;
pub use sql::{SqlServer, SqlSession};
pub use zookeeper::{ZooKeeperEnsemble, ZooKeeperServer};
