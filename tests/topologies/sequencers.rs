//! A receiver asks the store whether the grant behind a request still stands.

use lock_runtime::{ErrorKind, LockPool, Sequencer};
use lock_tests::{Quorum, RedisCluster, RedisServer, Watched, sequencers};

#[tokio::test]
async fn memory() {
    sequencers::stand_for_one_hold("memory://sequencers").await;
}

#[tokio::test]
async fn redis() {
    let server = RedisServer::start();
    sequencers::stand_for_one_hold(&server.url()).await;
}

#[tokio::test]
async fn redis_cluster() {
    let cluster = RedisCluster::start();
    // One slot for all keys.
    let pools = LockPool::builder(cluster.url()).key_prefix("{a}:");
    let pool = pools.connect().await.unwrap();
    let guard = pool.lock_all(["order:1", "order:2"]).acquire().await.unwrap();
    let sequencer = guard.sequencer().unwrap();
    pool.check(&sequencer).await.unwrap();
    guard.release().await.unwrap();
    assert!(pool.check(&sequencer).await.unwrap_err().is_lost());
}

#[tokio::test]
async fn redis_sentinel() {
    let watched = Watched::start().without_failover();
    sequencers::stand_for_one_hold(&watched.url()).await;
}

#[tokio::test]
async fn redlock() {
    let quorum = Quorum::start(3);
    sequencers::stand_for_one_hold(&quorum.url()).await;
}

#[tokio::test]
async fn a_receiver_with_another_prefix_or_store_refuses() {
    let connect =
        |prefix: &str| LockPool::builder("memory://prefixes").key_prefix(prefix).connect();
    let (pool, same, other) = (connect("a:"), connect("a:"), connect("b:"));
    let (pool, same, other) = (pool.await.unwrap(), same.await.unwrap(), other.await.unwrap());
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let sequencer = guard.sequencer().unwrap();
    same.check(&sequencer).await.unwrap();
    let error = other.check(&sequencer).await.unwrap_err();
    assert!(error.is_lost() && error.to_string().contains("prefix"), "{error}");
    assert_eq!(error.key().map(|key| key.as_str()), Some("order:1"));
    assert!(!error.to_string().contains("order:1"), "{error}");
}

#[tokio::test]
async fn a_grant_without_a_fence_and_an_ended_hold_have_none() {
    let pool = LockPool::connect("memory://").await.unwrap();
    let guard = pool.lock("order:1").fencing(false).acquire().await.unwrap();
    let error = guard.sequencer().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains(".fencing(false)"), "{error}");
    guard.release().await.unwrap();
    let hold = pool.lock("order:1").ttl(std::time::Duration::from_millis(10)).renew(false);
    let guard = hold.acquire().await.unwrap();
    guard.lost().await;
    assert!(guard.sequencer().unwrap_err().is_lost());
}

#[tokio::test]
async fn a_key_of_the_store_itself_is_refused() {
    let pool = LockPool::connect("memory://").await.unwrap();
    let text = format!("v1;1;{};lock_runtime:fence", "0".repeat(32));
    let error = pool.check(&text.parse::<Sequencer>().unwrap()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey);
}

#[test]
fn serde_has_the_text() {
    let text = format!("v1;34;{};order:42", "a".repeat(32));
    let sequencer: Sequencer = text.parse().unwrap();
    let json = serde_json::to_string(&sequencer).unwrap();
    assert_eq!(json, format!("{text:?}"));
    assert_eq!(serde_json::from_str::<Sequencer>(&json).unwrap(), sequencer);
    let refused = serde_json::from_str::<Sequencer>("\"order:42\"").unwrap_err().to_string();
    assert!(refused.contains("guard.sequencer()"), "{refused}");
}
