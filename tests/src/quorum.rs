//! Several servers that vote.

use std::time::Duration;

use lock_runtime::{LockPool, LockRequest};

use crate::eventually::eventually_async;
use crate::server::{Config, RedisServer};

/// Independent servers, the nodes of a `redlock://` quorum.
#[derive(Debug)]
pub struct Quorum(Vec<RedisServer>);

impl Quorum {
    /// `count` servers without persistence.
    #[track_caller]
    pub fn start(count: usize) -> Self {
        Self::of(count, &RedisServer::builder())
    }

    /// `count` servers of one configuration.
    #[track_caller]
    pub fn of(count: usize, config: &Config) -> Self {
        Self((0..count).map(|_| config.clone().start()).collect())
    }

    /// Of servers that are not all alike.
    pub fn of_nodes(nodes: Vec<RedisServer>) -> Self {
        Self(nodes)
    }

    /// The nodes.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.0
    }

    /// `redlock://`, each node with its own URL.
    pub fn url(&self) -> String {
        Self::url_of(self.0.iter().map(RedisServer::url))
    }

    /// `redlock://` of these nodes, of which some may be behind proxies.
    pub fn url_of(urls: impl Iterator<Item = String>) -> String {
        let urls: Vec<_> = urls.collect();
        format!("redlock://{}", urls.join(","))
    }

    /// Which nodes have `key`.
    pub fn holders(&self, key: &str) -> Vec<usize> {
        let has = |node: &RedisServer| node.is_running() && node.cli(&["EXISTS", key]) == "1";
        (0..self.0.len()).filter(|at| has(&self.0[*at])).collect()
    }
}

impl std::ops::Index<usize> for Quorum {
    type Output = RedisServer;

    fn index(&self, at: usize) -> &RedisServer {
        &self.0[at]
    }
}

/// Whether a quorum reports that another owner has the lock. On a busy machine a node may be late: then the result is
/// false, and the caller tries again.
///
/// # Panics
///
/// When the lock is granted, or anything but a node fails.
pub async fn says_busy(request: LockRequest) -> bool {
    match request.try_acquire().await {
        Ok(granted) => {
            assert!(granted.is_none(), "a second holder");
            true
        }
        Err(error) => {
            assert!(error.is_backend(), "{error}");
            false
        }
    }
}

/// Waits until all nodes of the quorum of `pool` answer. A node that was silent has a new connection first.
///
/// # Panics
///
/// When `deadline` has passed.
pub async fn until_all_nodes_answer(pool: &LockPool, deadline: Duration) {
    eventually_async(deadline, "all nodes answer", async || {
        // The quorum works without a node that does not answer, and names it.
        pool.health().await.is_ok_and(|health| {
            !health.warnings.iter().any(|warning| warning.to_string().contains("still stands"))
        })
    })
    .await;
}
