//! The backend for Redis and Valkey, 6.2 or newer: one server, sentinels, a cluster, or a quorum of any of these.
//!
//! A lock is a string key that contains its holder's token and expires. `SET NX PX` acquires it and a
//! compare-and-delete releases it. This is the format of redsync, node-redlock, redis-py, rslock and Spring, so a key
//! can be shared with services in other languages. Processes of this library hand a contended lock over in the order
//! of its wait queue, see [`wait_queue`](self::protocol::wait_queue).
//!
//! Each folder uses only the folders below it:
//!
//! ```text
//! quorum     redlock://: majorities of independent nodes
//! cluster    redis+cluster://: sends each request to the server of its slot
//! protocol   how a lock is kept: scripts with a wait queue, or plain commands
//! conn       a connection that is re-established, a dedicated one for WATCH, and pushes
//! discovery  the address of the server: fixed, or from sentinels
//! net        byte streams, TLS, the I/O task, and the handshake
//! ```
//!
//! At the bottom are values: `url` (endpoints), `keyspace` (names of keys), `hash_slot` and `slot_map`, and
//! `channel` (messages). `server_error` has the meaning of error answers, and `diagnostics` the settings by which a
//! server could lose locks.

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
use self::url::{Endpoint, ScriptMode};
use crate::backend::{BackendConfig, DynBackend};
use crate::base::error::LockError;

/// Opens the store at `url`, which has one of the Redis schemes.
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
    let reason = if scripts == ScriptMode::Off {
        Reason::Disabled
    } else {
        match Scripted::connect(dialer.clone(), names.clone(), config).await? {
            Ok(scripted) => return Ok(Arc::new(scripted)),
            Err(ConnectError::NoScripts(refusal)) if scripts != ScriptMode::On => {
                Reason::Refused(refusal)
            }
            Err(error) => return Err(LockError::backend(error.into_error())),
        }
    };
    dialer.endpoint().reject_replicas("Redis without scripts")?;
    Ok(Arc::new(Scriptless::connect(dialer, &names, config, reason).await?))
}
