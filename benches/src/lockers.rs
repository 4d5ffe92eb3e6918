//! One interface for all libraries: run a body under the lock of a key.

use std::sync::Arc;
use std::time::Duration;

use distributed_lock_core::{DistributedLock, LockHandle, LockProvider};
use lock_runtime::{LockError, LockPool, Wait, distributed_lock};
use redis::aio::MultiplexedConnection;
use redis::{Script, Value};
use redis_lock::LockAcrossOptions;
use tokio::sync::Mutex;

use crate::shedlock::ShedLock;

const TTL: Duration = Duration::from_secs(30);

/// The polling interval for libraries without waiting of their own.
const POLL: Duration = Duration::from_millis(10);

/// One connected library.
#[derive(Clone)]
pub(crate) enum Locker {
    Bare(Arc<Bare>),
    Ours(LockPool),
    OursFenced(LockPool),
    OursInBackground(LockPool),
    /// By request, without the attribute, with the options of the pool.
    OursByRequest(LockPool),
    Rslock(rslock::LockManager),
    RedisLock([Arc<Mutex<redis_0_27::aio::MultiplexedConnection>>; 1]),
    DistributedLock(Arc<distributed_lock_redis::RedisLockProvider>),
    Deadpool(deadpool_redis::Pool),
    ShedLock(Arc<ShedLock>),
}

pub(crate) const BOUND: &str = "bare redis-rs";
pub(crate) const OURS: &str = "#[distributed_lock]";
pub(crate) const OURS_FENCED: &str = "#[distributed_lock], fenced";
pub(crate) const OURS_IN_BACKGROUND: &str = "#[distributed_lock], background";
/// On PostgreSQL and MariaDB.
pub(crate) const SHEDLOCK: &str = "ShedLock's SQL";
pub(crate) const PEERS: [&str; 4] = ["rslock", "redis-lock", "distributed-lock", "deadpool-redis"];

#[distributed_lock(key = "bench:<key>", ttl = "30s", wait = "forever", pool = pool)]
async fn section<B: FnOnce()>(pool: &LockPool, key: &str, body: B) -> Result<(), LockError> {
    body();
    Ok(())
}

#[distributed_lock(key = "bench:<key>", ttl = "30s", wait = "forever", pool = pool, guard = lock)]
async fn fenced<B: FnOnce()>(pool: &LockPool, key: &str, body: B) -> Result<(), LockError> {
    assert!(lock.fence().is_some());
    body();
    Ok(())
}

#[distributed_lock(
    key = "bench:<key>", ttl = "30s", wait = "forever", pool = pool, release = "background"
)]
async fn in_background<B: FnOnce()>(pool: &LockPool, key: &str, body: B) -> Result<(), LockError> {
    body();
    Ok(())
}

impl Locker {
    pub(crate) async fn connect(name: &str, url: &str) -> Self {
        match name {
            BOUND => Self::Bare(Arc::new(Bare::connect(url).await)),
            OURS => Self::Ours(LockPool::connect(url).await.expect("the server is reachable")),
            OURS_FENCED => {
                Self::OursFenced(LockPool::connect(url).await.expect("the server is reachable"))
            }
            OURS_IN_BACKGROUND => Self::OursInBackground(
                LockPool::connect(url).await.expect("the server is reachable"),
            ),
            "rslock" => Self::Rslock(rslock::LockManager::new(vec![url])),
            "redis-lock" => {
                let client = redis_0_27::Client::open(url).expect("the URL is right");
                let connection = client.get_multiplexed_async_connection().await;
                Self::RedisLock([Arc::new(Mutex::new(
                    connection.expect("the server is reachable"),
                ))])
            }
            "distributed-lock" => {
                let provider = distributed_lock_redis::RedisLockProvider::builder()
                    .url(url)
                    .expiry(TTL)
                    .build()
                    .await;
                Self::DistributedLock(Arc::new(provider.expect("the server is reachable")))
            }
            "deadpool-redis" => {
                let config = deadpool_redis::Config::from_url(url);
                let pool = config.create_pool(Some(deadpool_redis::Runtime::Tokio1));
                Self::Deadpool(pool.expect("the URL is right"))
            }
            SHEDLOCK => Self::ShedLock(Arc::new(ShedLock::connect(url).await)),
            other => unreachable!("there is no locker {other}"),
        }
    }

    /// Runs `body` under the lock of `key`, without a time limit.
    pub(crate) async fn section(&self, key: &str, body: impl FnOnce() + Send + 'static) {
        match self {
            Self::Bare(bare) => bare.section(key, body).await,
            Self::Ours(pool) => section(pool, key, body).await.expect("a wait forever ends well"),
            Self::OursFenced(pool) => {
                fenced(pool, key, body).await.expect("a wait forever ends well");
            }
            Self::OursInBackground(pool) => {
                in_background(pool, key, body).await.expect("a wait forever ends well");
            }
            Self::OursByRequest(pool) => {
                let request = pool.lock(key).wait(Wait::Forever).fencing(false);
                request.run(async { body() }).await.expect("a wait forever ends well");
            }
            Self::Rslock(manager) => {
                let lock = manager.acquire_no_guard(key.as_bytes(), TTL).await;
                let lock = lock.expect("a wait forever ends well");
                body();
                manager.unlock(&lock).await;
            }
            Self::RedisLock(connections) => {
                let options = LockAcrossOptions {
                    ttl: TTL,
                    duration: Duration::from_secs(3600),
                    ..LockAcrossOptions::default()
                };
                let outcome =
                    redis_lock::lock_across(connections, key, async move { body() }, options).await;
                assert!(outcome.is_ok(), "a wait forever ends well");
            }
            Self::DistributedLock(provider) => {
                let lock = provider.create_lock(key);
                let handle = loop {
                    if let Ok(Some(handle)) = lock.try_acquire().await {
                        break handle;
                    }
                    tokio::time::sleep(POLL).await;
                };
                body();
                let _ = handle.release().await;
            }
            Self::Deadpool(pool) => deadpool(pool, key, body).await,
            Self::ShedLock(shedlock) => {
                while !shedlock.lock(key, TTL).await {
                    tokio::time::sleep(POLL).await;
                }
                body();
                shedlock.unlock(key).await;
            }
        }
    }
}

/// `SET NX PX`, and a script that compares and deletes, on one multiplexed connection.
pub(crate) struct Bare {
    connection: MultiplexedConnection,
    hash: String,
}

const FREE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

fn token() -> String {
    format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..))
}

fn set(key: &str, token: &str) -> redis::Cmd {
    let mut set = redis::cmd("SET");
    set.arg(key).arg(token).arg("NX").arg("PX").arg(TTL.as_millis() as u64);
    set
}

impl Bare {
    pub(crate) async fn connect(url: &str) -> Self {
        let client = redis::Client::open(url).expect("the URL is right");
        let connection = client.get_multiplexed_async_connection().await;
        let mut connection = connection.expect("the server takes connections");
        let script = Script::new(FREE);
        script.load_async(&mut connection).await.expect("the server takes scripts");
        Self { connection, hash: script.get_hash().to_owned() }
    }

    /// Polls as often as the server answers.
    async fn section(&self, key: &str, body: impl FnOnce()) {
        let mut connection = self.connection.clone();
        let token = token();
        let set = set(key, &token);
        loop {
            let taken: Value = set.query_async(&mut connection).await.expect("the server answers");
            if taken == Value::Okay {
                break;
            }
        }
        body();
        let mut free = redis::cmd("EVALSHA");
        free.arg(&self.hash).arg(1).arg(key).arg(&token);
        let _: u64 = free.query_async(&mut connection).await.expect("the server answers");
    }

    /// A plain delete, as an operator or another library would send it.
    pub(crate) async fn delete(&self, key: &str) {
        let mut connection = self.connection.clone();
        let _: u64 = redis::cmd("DEL")
            .arg(key)
            .query_async(&mut connection)
            .await
            .expect("the server answers");
    }

    /// Takes a key under a token of an unknown format.
    pub(crate) async fn take(&self, key: &str) {
        let mut connection = self.connection.clone();
        let taken: Value =
            set(key, "other").query_async(&mut connection).await.expect("the server answers");
        assert_eq!(taken, Value::Okay, "the key is free");
    }
}

/// A hand-written lock over a connection pool.
async fn deadpool(pool: &deadpool_redis::Pool, key: &str, body: impl FnOnce()) {
    let token = token();
    let set = set(key, &token);
    loop {
        let mut connection = pool.get().await.expect("the server takes connections");
        let taken: Value = set.query_async(&mut connection).await.expect("the server answers");
        drop(connection);
        if taken == Value::Okay {
            break;
        }
        tokio::time::sleep(POLL * 5).await;
    }
    body();
    let mut connection = pool.get().await.expect("the server takes connections");
    let free = Script::new(FREE);
    let _: u64 =
        free.key(key).arg(&token).invoke_async(&mut connection).await.expect("the server answers");
}
