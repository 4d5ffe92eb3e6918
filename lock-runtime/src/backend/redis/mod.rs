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
//! redis://     server    the locks of one server
//!                └─ node    one connection, kept up ── stream, tls: its bytes
//!                     └─ ears    what the server says without being asked
//! without      plain     the same locks by plain commands
//! scripts        └─ desk    read, compare, write on a connection of its own ── spare
//! ```
//!
//! `names` has the keys, `script` the Lua files, `reply` the servers' errors.

mod desk;
mod ears;
mod endpoint;
mod line;
mod names;
mod node;
mod plain;
mod reply;
mod script;
mod server;
mod spare;
mod stream;
#[cfg(feature = "rediss")]
mod tls;

use std::sync::Arc;
use std::time::Duration;

use self::endpoint::{Endpoint, Scripts};
use self::names::Names;
use self::plain::{Cause, Plain};
use self::server::Server;
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
    let dialer = Dialer::new(Endpoint::parse(url)?).await?;
    let names = Names::of_server(setting.prefix);
    let scripts = dialer.endpoint().scripts;
    let cause = if scripts == Scripts::Off {
        Cause::Wish
    } else {
        match Server::connect(dialer.clone(), names.clone(), setting).await? {
            Ok(server) => return Ok(Arc::new(server)),
            Err(refusal) if scripts == Scripts::On => return Err(LockError::backend(refusal)),
            Err(refusal) => Cause::Refusal(refusal),
        }
    };
    Ok(Arc::new(Plain::connect(dialer, &names, setting, cause).await?))
}
