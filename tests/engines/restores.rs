//! Servers that are restored from a copy of their data.

#![allow(clippy::disallowed_methods)]

use std::path::Path;
use std::time::Duration;

use lock_runtime::LockPool;
use lock_tests::folder::{copy_folder, new_folder};
use lock_tests::prelude::*;
use lock_tests::{EtcdServer, ZooKeeperServer, eventually_async};
use tempfile::TempDir;

/// Longer than a session, so that the servers are away until it is over.
const AWAY: Duration = ms(5_000);

/// A copy of a folder.
struct Copied(TempDir);

impl Copied {
    fn of(data: &Path) -> Self {
        let copied = new_folder();
        copy_folder(data, &copied.path().join("data"));
        Self(copied)
    }

    fn restore(&self, data: &Path) {
        std::fs::remove_dir_all(data).unwrap();
        copy_folder(&self.0.path().join("data"), data);
    }
}

async fn connect(url: &str, ttl: Duration) -> LockPool {
    LockPool::builder(url).ttl(ttl).wait(DEADLINE).connect().await.unwrap()
}

/// The copy has the key of a lock that was released since then, under a lease or in a session that goes on.
async fn is_free_again(pool: &LockPool, url: &str) {
    let other = connect(url, ms(5_000)).await;
    for pool in [pool, &other] {
        let free = async || matches!(pool.lock("order:1").try_acquire().await, Ok(Some(_)));
        eventually_async(DEADLINE, "the lock is free", free).await;
    }
}

mod etcd {
    use super::*;

    #[tokio::test]
    async fn a_lock_that_was_released_since_the_copy_is_free() {
        let server = EtcdServer::start();
        let pool = connect(&server.url(), ms(10_000)).await;
        let held = pool.lock("order:1").acquire().await.unwrap();
        let mut copied = None;
        server.restart_after(|data| copied = Some(Copied::of(data)));
        held.release().await.unwrap();
        cycle(&pool, "order:2").await;
        server.restart_after(|data| copied.unwrap().restore(data));
        is_free_again(&pool, &server.url()).await;
    }
}

mod zookeeper {
    use super::*;

    #[tokio::test]
    async fn a_lock_that_was_released_since_the_copy_is_free() {
        let server = ZooKeeperServer::start();
        let pool = connect(&server.url(), ms(1_000)).await;
        let held = pool.lock("order:1").acquire().await.unwrap();
        let mut copied = None;
        server.restart_after(|data| copied = Some(Copied::of(data)));
        drop(held.release().await);
        cycle(&pool, "order:2").await;
        server.restart_after(|data| {
            copied.unwrap().restore(data);
            std::thread::sleep(AWAY);
        });
        is_free_again(&pool, &server.url()).await;
    }
}
