//! Rights that change while locks are held.

use lock_runtime::{ErrorKind, LockPool};
use lock_tests::expected_error::CANARY;
use lock_tests::prelude::*;
use lock_tests::{EtcdServer, eventually_async, versions};

/// A member where `worker` has the rights on all locks that begin with one of `prefixes`.
fn with_rights(program: Option<&str>, prefixes: &[&str]) -> Option<EtcdServer> {
    let mut builder = EtcdServer::builder().setting("bcrypt-cost", 4);
    if let Some(program) = program {
        builder = builder.program(versions::of_store(program)?.join("etcd"));
    }
    let server = builder.start();
    let ranges: Vec<_> = prefixes.iter().chain(&["%"]).map(|prefix| range(prefix)).collect();
    server.enable_logins(CANARY, &ranges);
    Some(server)
}

fn range(prefix: &str) -> (String, String) {
    (format!("/locks/{prefix}"), format!("/locks/{prefix}~"))
}

fn revoke(server: &EtcdServer, prefix: &str) {
    let (from, to) = range(prefix);
    server.etcdctl(&["--user=root:root", "role", "revoke-permission", "locks", &from, &to]);
}

fn count(server: &EtcdServer, prefix: &str) -> usize {
    let (from, to) = range(prefix);
    let keys = server.etcdctl(&["--user=root:root", "get", "--keys-only", &from, &to]);
    keys.lines().filter(|line| !line.is_empty()).count()
}

async fn pool(server: &EtcdServer, ttl: u64) -> LockPool {
    let url = format!("etcd://worker:{CANARY}@127.0.0.1:{}/locks", server.port());
    LockPool::builder(url).ttl(ms(ttl)).wait(ms(2_000)).connect().await.unwrap()
}

/// The pool keeps its leases alive, also for other locks.
#[tokio::test]
async fn a_lock_that_may_no_longer_be_deleted_ends_with_its_lease() {
    let server = with_rights(None, &["a:", "b:"]).unwrap();
    let pool = pool(&server, 3_000).await;
    let (held, refused) = (lock(&pool, "a:1").await, lock(&pool, "b:1").await);
    revoke(&server, "b:");
    let error = refused.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    assert_eq!(count(&server, "b:"), 1);
    // Both have one lease, which goes on while this lock is held.
    held.release().await.unwrap();
    eventually_async(DEADLINE, "the key is gone", async || count(&server, "b:") == 0).await;
    lock(&pool, "a:1").await.release().await.unwrap();
    pool.shutdown(ms(1_000)).await;
}

/// Before the versions with this check, a put is checked for its own key.
#[tokio::test]
async fn locks_go_on_beside_one_without_rights() {
    locks_go_on(None).await;
}

#[tokio::test]
async fn locks_go_on_beside_one_without_rights_on_etcd_3_6() {
    locks_go_on(Some("etcd-3.6")).await;
}

async fn locks_go_on(program: Option<&str>) {
    let Some(server) = with_rights(program, &["a:", "b:"]) else { return };
    let pool = pool(&server, 1_500).await;
    let (held, other) = (lock(&pool, "a:1").await, lock(&pool, "b:1").await);
    // These have another lease, which lasts longer than a restart takes.
    let long = async |key: &str| pool.lock(key).ttl(ms(20_000)).acquire().await.unwrap();
    let (long_held, long_other) = (long("a:long").await, long("b:long").await);
    revoke(&server, "b:");
    lock(&pool, "a:2").await.release().await.unwrap();
    lock(&pool, "a:3").await.release().await.unwrap();
    let error = pool.lock("b:2").acquire().await.unwrap_err();
    assert!(error.to_string().contains("permission denied"), "{error}");
    let lost = tokio::time::timeout(ms(4_000), held.lost()).await;
    assert!(lost.is_err(), "{lost:?}");
    assert!(held.is_held());
    held.release().await.unwrap();
    server.relaunch();
    let serves = async || pool.lock("a:2").try_acquire().await.is_ok();
    eventually_async(DEADLINE, "it serves again", serves).await;
    long_held.verify().await.unwrap();
    long_held.release().await.unwrap();
    drop((other, long_other));
}

/// Each put is checked against all keys of its lease.
#[tokio::test]
async fn a_pool_with_a_login_has_few_keys_in_each_lease() {
    let server = with_rights(None, &["a:"]).unwrap();
    let pool = pool(&server, 30_000).await;
    let mut held = Vec::new();
    for n in 0..600 {
        held.push(lock(&pool, &format!("a:{n}")).await);
    }
    let leases = server.etcdctl(&["--user=root:root", "lease", "list"]);
    let count = leases.lines().filter(|line| !line.contains("found")).count();
    assert!((3..=4).contains(&count), "{leases}");
    for guard in held {
        guard.release().await.unwrap();
    }
}

async fn lock(pool: &LockPool, key: &str) -> lock_runtime::LockGuard {
    pool.lock(key).acquire().await.unwrap()
}
