//! Three members: the leader dies, and others are cut off or frozen.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lock_runtime::backend::{AcquireRequest, Backend, LeaseStatus, Owner, ReleaseRequest};
use lock_runtime::testing::open_backend;
use lock_runtime::{ErrorKind, Key, LockPool};
use lock_tests::prelude::*;
use lock_tests::{EtcdServer, EtcdTrio, eventually_async};

use crate::dead_leaders::{goes_on, opens_in_time};

/// The member of the connection is frozen: another one serves, and the lock is kept. Also if it is the leader.
#[tokio::test]
async fn a_lock_outlives_a_frozen_member() {
    let cluster = EtcdTrio::shared().await;
    let pool = pool(&cluster, "/outlives").await;
    // Longer than an election takes, also on a busy machine.
    let guard = pool.lock("order:1").ttl(ms(20_000)).acquire().await.unwrap();
    for member in &cluster.members {
        member.pause();
        eventually_async(DEADLINE, "the others serve", async || {
            match pool.lock("order:2").wait(ms(1_000)).acquire().await {
                Ok(guard) => guard.release().await.is_ok(),
                Err(_) => false,
            }
        })
        .await;
        eventually_async(DEADLINE, "the lock is kept", async || guard.verify().await.is_ok()).await;
        member.resume();
        eventually_async(DEADLINE, "it is back", async || member.serves()).await;
    }
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

/// Each pool begins at a member of its own.
#[tokio::test]
async fn pools_open_beside_a_frozen_member_and_during_an_election() {
    let cluster = EtcdTrio::shared().await;
    let leader = cluster.leader().expect("a leader");
    leader.pause();
    opens_in_time(&cluster.url_of("/opens")).await;
    leader.resume();
    eventually_async(DEADLINE, "it is back", async || leader.serves()).await;
}

/// The member of the connection forwards signs of life to the leader, which is frozen. It has no answer for them for longer than the
/// lease, although another leader is elected and requests are answered.
#[tokio::test]
async fn a_short_lock_outlives_a_frozen_leader() {
    // An election is over long before a ttl of four seconds is.
    let quick = EtcdServer::builder().setting("election-timeout", 500);
    let cluster = EtcdTrio::start_with(&quick.setting("heartbeat-interval", 50));
    let leader = leader(&cluster).await;
    let follower = cluster.members.iter().find(|member| member.port() != leader.port()).unwrap();
    // Neither silence nor the age of a request ends the connection in time.
    let builder = LockPool::builder(follower.url_of("/short")).request_timeout(ms(3_000));
    let pool = builder.ttl(ms(20_000)).wait(DEADLINE).connect().await.unwrap();
    let guard = pool.lock("order:1").ttl(ms(4_000)).acquire().await.unwrap();
    let cycles = Arc::new(AtomicUsize::new(0));
    let others = tokio::spawn({
        let (pool, cycles) = (pool.clone(), cycles.clone());
        async move {
            loop {
                if let Ok(guard) = pool.lock("order:2").acquire().await {
                    let _ = guard.release().await;
                    cycles.fetch_add(1, Ordering::SeqCst);
                }
                tokio::time::sleep(ms(20)).await;
            }
        }
    });
    leader.pause();
    let lost = tokio::time::timeout(ms(10_000), guard.lost()).await;
    assert!(lost.is_err(), "{lost:?}");
    goes_on(&cycles).await;
    guard.release().await.unwrap();
    others.abort();
    leader.resume();
}

/// The leader has lost both followers and does not know it yet.
#[tokio::test]
async fn a_leader_without_a_majority_confirms_nothing() {
    let cluster = EtcdTrio::shared().await;
    let leader = leader(&cluster).await;
    let followers = || cluster.members.iter().filter(|member| member.port() != leader.port());
    let store = open_backend(&leader.url_of("/deposed")).await.unwrap();
    let keys: Arc<[Key]> = Arc::new([Key::from("order:1")]);
    let mut request = AcquireRequest::new(keys, Owner::random().unwrap(), ms(20_000));
    let acquire = async |request: &AcquireRequest| {
        store.acquire(std::slice::from_ref(request)).await.remove(0)
    };
    acquire(&request).await.unwrap();
    let lease = [request.lease()];
    followers().for_each(EtcdServer::pause);
    let renewed = store.renew(&lease).await.remove(0);
    assert!(renewed.is_err(), "{renewed:?}");
    let held = store.is_held(&lease[0]).await;
    assert!(held.is_err(), "{held:?}");
    request.attempt = 1;
    let granted = acquire(&request).await;
    assert!(granted.is_err(), "{granted:?}");
    followers().for_each(EtcdServer::resume);
    eventually_async(DEADLINE, "it is confirmed again", async || {
        matches!(store.renew(&lease).await.remove(0), Ok(LeaseStatus::Held))
    })
    .await;
    store.release(&[ReleaseRequest::new(request.lease())]).await.remove(0).unwrap();
}

/// Its only member in the URL has no majority: the error says so, and another member is connected if there is one.
#[tokio::test]
async fn a_member_without_a_leader_is_left() {
    let cluster = EtcdTrio::start();
    let pool = pool(&cluster, "/left").await;
    // Longer than the cluster is without a majority, also on a busy machine.
    let guard = pool.lock("held").ttl(ms(120_000)).acquire().await.unwrap();
    // Two members are gone and come back one by one. The one that is alone serves nothing meanwhile.
    cluster.members[0].kill();
    cluster.members[1].kill();
    let alone = &cluster.members[2];
    eventually_async(DEADLINE, "it has no leader", async || !alone.serves()).await;
    let error = pool.lock("order:1").wait(ms(500)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    cluster.members[0].relaunch();
    eventually_async(DEADLINE, "two of three serve", async || {
        match pool.lock("order:1").wait(ms(1_000)).acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
    eventually_async(DEADLINE, "the lock is kept", async || guard.verify().await.is_ok()).await;
    guard.release().await.unwrap();
}

async fn leader(cluster: &EtcdTrio) -> &EtcdServer {
    eventually_async(DEADLINE, "there is a leader", async || cluster.leader().is_some()).await;
    cluster.leader().unwrap()
}

async fn pool(cluster: &EtcdTrio, root: &str) -> LockPool {
    let builder = LockPool::builder(cluster.url_of(root)).ttl(ms(20_000)).wait(ms(2_000));
    builder.connect().await.unwrap()
}
