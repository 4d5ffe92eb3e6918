//! What the connections of a pool share.

use std::sync::Arc;

use tokio::sync::Notify;

use crate::backend::mysql::session::MysqlConnector;
use crate::backend::mysql::watch_list::WatchList;
use crate::backend::queue_events::QueueEvents;
use crate::base::clock::Clock;
use crate::base::mutex::{Mutex, MutexGuard};

/// Shared by the two connections of a pool.
pub(crate) struct MysqlPoolState {
    pub(crate) connector: MysqlConnector,
    pub(crate) events: Arc<QueueEvents>,
    pub(crate) clock: Clock,
    /// The named lock of the connection for upkeep, or nothing.
    channel: Mutex<String>,
    watch_list: Mutex<WatchList>,
    /// Notified when there is more to look at.
    pub(crate) watched: Notify,
}

impl MysqlPoolState {
    pub(crate) fn new(connector: MysqlConnector, events: Arc<QueueEvents>, clock: Clock) -> Self {
        Self {
            connector,
            events,
            clock,
            channel: Mutex::default(),
            watch_list: Mutex::default(),
            watched: Notify::new(),
        }
    }

    pub(crate) fn channel(&self) -> MutexGuard<'_, String> {
        self.channel.lock()
    }

    pub(crate) fn watch_list(&self) -> MutexGuard<'_, WatchList> {
        self.watch_list.lock()
    }
}
