//! Redis and Valkey, 6.2 or newer, in the ways that people deploy them.
//!
//! A lock is a plain string key that holds its owner's token and expires: `SET NX PX` to take it, a
//! compare-and-delete to free it. This is the format of redsync, node-redlock, redis-py, rslock
//! and Spring, so that a key can be shared with services in other languages. Our own processes hand a
//! lock that is waited for to each other by its [`line`].
//!
//! From the URL to the wire:
//!
//! ```text
//! redis://                      server    the locks of one server
//! redis+sentinel:// service ─────┘  └─ resolver, sentinel: which server that is
//!                                 └─ node    one connection, kept up ── stream, tls: its bytes
//!                                      └─ ears    what the server says without being asked
//!                               └─ replicas    whether they have what was granted
//! ```
//!
//! `names` has the keys, `script` the Lua files, `reply` the servers' errors, `check` what could make a server
//! lose locks.

mod check;
mod ears;
mod endpoint;
mod line;
mod names;
mod node;
mod replicas;
mod reply;
mod resolver;
mod script;
mod sentinel;
mod server;
mod service;
mod stream;
#[cfg(feature = "rediss")]
mod tls;

use std::sync::Arc;
use std::time::Duration;

use self::endpoint::Endpoint;
use self::names::Names;
use self::sentinel::Sentinels;
use self::server::Server;
use self::service::Service;
use self::stream::Dialer;
use super::Store;
use crate::clock::Clock;
use crate::error::LockError;

/// What a pool says to its store, whichever it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting<'a> {
    /// In front of every key.
    pub(super) prefix: &'a str,
    pub(super) clock: Clock,
    /// How long one request may take.
    pub(super) patience: Duration,
}

/// Opens the store at `url`, whose scheme is one of this folder's.
pub(super) async fn open(url: &str, setting: Setting<'_>) -> Result<Arc<dyn Store>, LockError> {
    let names = Names::of_server(setting.prefix);
    if Service::is_named_by(url) {
        let sentinels = Sentinels::new(Service::parse(url)?, setting).await?;
        return Ok(Arc::new(Server::connect(sentinels, names, setting).await?));
    }
    let dialer = Dialer::new(Endpoint::parse(url)?).await?;
    Ok(Arc::new(Server::connect(dialer, names, setting).await?))
}
