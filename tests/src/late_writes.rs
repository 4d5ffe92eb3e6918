//! A holder that is stopped, and writes after its ttl.

use std::time::Duration;

use lock_runtime::{LockError, LockGuard, LockPool};
use tokio::task::JoinHandle;

use crate::prelude::*;
use crate::{Worker, eventually_async};

/// The ttl of the stopped holder.
pub const TTL: Duration = ms(1_500);
/// Its `lock_delay`: longer than a busy machine stops it for.
pub const DELAY: Duration = ms(45_000);

/// How often a holder is stopped: `LOCK_STOPS`, by default twice.
#[must_use]
pub fn rounds() -> usize {
    std::env::var("LOCK_STOPS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(2)
}

/// A process that holds a lock and is stopped, and a task of another pool that waits for the lock.
#[derive(Debug)]
pub struct StoppedHolder {
    /// The process, of the program `late-writer`.
    pub holder: Worker,
    /// The task.
    pub waiter: JoinHandle<Result<LockGuard, LockError>>,
}

impl StoppedHolder {
    /// Starts them, and stops the process.
    ///
    /// # Panics
    ///
    /// When the process does not get the lock.
    pub async fn start(program: &str, url: &str, key: &str, delay: Duration) -> Self {
        let spans = [TTL, delay].map(|span| span.as_millis().to_string());
        let holder = Worker::start(program, &[url, key, &spans[0], &spans[1]]);
        eventually_async(DEADLINE, "the process holds the lock", async || {
            holder.stdout().iter().any(|line| line == "holding")
        })
        .await;
        let (pool, key) = (LockPool::connect(url).await.unwrap(), key.to_owned());
        let waiting = async move { pool.lock(key).wait(ms(120_000)).acquire().await };
        let waiter = tokio::spawn(waiting);
        holder.pause();
        Self { holder, waiter }
    }

    /// Goes on, and waits for the write.
    ///
    /// # Panics
    ///
    /// When it does not write.
    pub async fn resume(&self) {
        self.holder.resume();
        eventually_async(DEADLINE, "the process writes", async || self.has_written()).await;
    }

    /// Whether it has written.
    pub fn has_written(&self) -> bool {
        self.holder.stdout().iter().any(|line| line == "wrote")
    }

    /// Ends both of them.
    ///
    /// # Panics
    ///
    /// When the process does not end.
    pub async fn end(self) {
        self.holder.send_line("");
        let exited = tokio::task::spawn_blocking(move || self.holder.wait_for_exit(DEADLINE));
        exited.await.unwrap();
        self.waiter.abort();
    }
}
