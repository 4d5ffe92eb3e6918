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
//! redis+sentinel:// service ─────┤  ├─ resolver, sentinel: which server that is
//! redis+cluster://  cluster ─────┘  ├─ replicas    whether they have what was granted
//!                    └─ slots       └─ node    one connection, kept up ── stream, tls: its bytes
//! redlock://        quorum               ├─ login   its greeting
//!                    └─ node, cluster    └─ ears    what the server says without being asked ── shard
//! without scripts   plain     the same locks by plain commands
//!                    └─ desk    read, compare, write on a connection of its own ── spare
//! ```
//!
//! `names` has the keys, `script` the Lua files, `reply` the servers' errors, `check` what could make a server
//! lose locks.

mod channel;
mod cluster;
mod conn;
mod diagnostics;
mod discovery;
mod hash_slot;
mod keyspace;
mod net;
mod protocol;
mod quorum;
mod server_error;
mod slot_map;
mod url;

use std::sync::Arc;

use self::cluster::Cluster;
use self::discovery::sentinel::Sentinels;
use self::discovery::sentinel_url::Service;
use self::keyspace::Keyspace;
use self::net::transport::Dialer;
use self::protocol::scripted::Scripted;
use self::protocol::scripted_server::ConnectError;
use self::protocol::scriptless::{Reason, Scriptless};
use self::quorum::Quorum;
use self::url::{Endpoint, Scripts};
use crate::backend::{BackendConfig, DynBackend};
use crate::base::error::LockError;

/// Opens the store at `url`, whose scheme is one of this folder's.
pub(crate) async fn open(
    url: &str,
    config: BackendConfig<'_>,
) -> Result<Arc<dyn DynBackend>, LockError> {
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
    if scheme == "redlock" {
        return Ok(Arc::new(Quorum::connect(url, config).await?));
    }
    if scheme.ends_with("+cluster") {
        return Ok(Arc::new(Cluster::connect(url, config).await?));
    }
    let names = Keyspace::of_server(config.key_prefix);
    if Service::is_named_by(url) {
        let service = Service::parse(url)?;
        let config = config.with_connect_timeout(service.master.connect_timeout);
        let sentinels = Sentinels::new(service, config).await?;
        let opened = Scripted::connect(sentinels, names, config).await?;
        return Ok(Arc::new(opened.map_err(|error| LockError::backend(error.into_error()))?));
    }
    let dialer = Dialer::new(Endpoint::parse(url)?.of_pool(config)?).await?;
    let config = config.with_connect_timeout(dialer.endpoint().connect_timeout);
    let scripts = dialer.endpoint().scripts;
    let reason = if scripts == Scripts::Off {
        Reason::Disabled
    } else {
        match Scripted::connect(dialer.clone(), names.clone(), config).await? {
            Ok(scripted) => return Ok(Arc::new(scripted)),
            Err(ConnectError::NoScripts(refusal)) if scripts != Scripts::On => {
                Reason::Refused(refusal)
            }
            Err(error) => return Err(LockError::backend(error.into_error())),
        }
    };
    dialer.endpoint().reject_replicas("Redis without scripts")?;
    Ok(Arc::new(Scriptless::connect(dialer, &names, config, reason).await?))
}
