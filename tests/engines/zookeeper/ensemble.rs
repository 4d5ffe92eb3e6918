//! Three servers: the leader dies, and a follower is cut off or frozen.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::Duration;

use lock_runtime::backend::{
    AcquireRequest, Backend, FailureKind, LeaseStatus, Owner, ReleaseRequest,
};
use lock_runtime::testing::open_backend;
use lock_runtime::{Key, LockPool};
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::{FaultProxy, ZooKeeperEnsemble, ZooKeeperServer, eventually_async, zookeeper};

use crate::dead_leaders::opens_in_time;

/// Each server is frozen in its turn, also that of the session: the session goes on at another one.
#[tokio::test]
async fn a_session_outlives_its_server() {
    let ensemble = ZooKeeperEnsemble::shared().await;
    let pool = pool(&ensemble, "/outlives").await;
    // Longer than an election takes, also on a busy machine.
    let guard = pool.lock("order:1").ttl(ms(20_000)).acquire().await.unwrap();
    for server in &ensemble.servers {
        server.pause();
        eventually_async(DEADLINE, "the others serve", async || {
            match pool.lock("order:2").wait(ms(1_000)).acquire().await {
                Ok(guard) => guard.release().await.is_ok(),
                Err(_) => false,
            }
        })
        .await;
        eventually_async(DEADLINE, "the lock is kept", async || guard.verify().await.is_ok()).await;
        server.resume();
        eventually_async(DEADLINE, "all serve under one leader", async || {
            let modes: Vec<_> = ensemble.servers.iter().map(ZooKeeperServer::mode).collect();
            let leads = |mode: &&Option<String>| mode.as_deref() == Some("leader");
            modes.iter().all(Option::is_some) && modes.iter().filter(leads).count() == 1
        })
        .await;
    }
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

/// The kernel accepts its connections, so each attempt there ends with a time limit. It is shorter than a third of the session.
#[tokio::test]
async fn a_session_does_not_wait_long_for_a_silent_server() {
    let ensemble = ZooKeeperEnsemble::shared().await;
    let proxies: Vec<_> =
        ensemble.servers.iter().map(|server| FaultProxy::to_port(server.port())).collect();
    let ports: Vec<_> = proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
    let url = format!("zookeeper://{}/silent-servers", ports.join(","));
    let builder = LockPool::builder(url).connect_timeout(2 * DEADLINE).ttl(ms(57_000));
    let pool = builder.connect().await.unwrap();
    let guard = pool.lock("order:1").acquire().await.unwrap();
    // Of all but one, and the session is at any of them.
    for proxy in &proxies[1..] {
        proxy.hold(Direction::ToServer);
    }
    proxies.iter().for_each(FaultProxy::cut);
    eventually_async(DEADLINE, "the session is at the other server", async || {
        guard.verify().await.is_ok()
    })
    .await;
    guard.release().await.unwrap();
}

/// Each class of ttls has a session of its own, which the first lock of the class waits for.
#[tokio::test]
async fn the_first_lock_of_a_ttl_does_not_wait_for_a_frozen_server() {
    let ensemble = ZooKeeperEnsemble::shared().await;
    let frozen = ensemble.follower().expect("a follower");
    frozen.pause();
    let builder = LockPool::builder(ensemble.url_of("/classes")).request_timeout(ms(2_000));
    // The others may be without a leader for as long as an election takes, also on a busy machine.
    let pool = builder.connect_timeout(ms(40_000)).connect().await.unwrap();
    for seconds in [1, 2, 3, 5, 7, 9, 12, 17, 27] {
        let ttl = Duration::from_secs(seconds);
        let guard = pool.lock("order:1").ttl(ttl).wait(Duration::ZERO).acquire().await;
        guard.unwrap_or_else(|error| panic!("{ttl:?}: {error}")).release().await.unwrap();
    }
    frozen.resume();
    eventually_async(DEADLINE, "it is back", async || frozen.mode().is_some()).await;
}

/// Each pool begins at a server of its own.
#[tokio::test]
async fn pools_open_beside_a_frozen_server_and_during_an_election() {
    let ensemble = ZooKeeperEnsemble::shared().await;
    let leader = ensemble.leader().expect("a leader");
    leader.pause();
    opens_in_time(&ensemble.url_of("/opens")).await;
    leader.resume();
    eventually_async(DEADLINE, "it is back", async || leader.mode().is_some()).await;
}

/// The leader has lost both followers and does not know it yet.
#[tokio::test]
async fn a_leader_without_a_majority_confirms_nothing() {
    let ensemble = ZooKeeperEnsemble::shared().await;
    let leader = ensemble.leader().expect("a leader");
    let followers = || ensemble.servers.iter().filter(|server| server.port() != leader.port());
    let store = open_backend(&leader.url_of("/deposed")).await.unwrap();
    let keys: Arc<[Key]> = Arc::new([Key::from("order:1")]);
    let mut request = AcquireRequest::new(keys, Owner::random().unwrap(), ms(20_000));
    let acquire = async |request: &AcquireRequest| {
        store.acquire(std::slice::from_ref(request)).await.remove(0)
    };
    acquire(&request).await.unwrap();
    let lease = [request.lease()];
    let [existing, missing] = [leader.client(), leader.client()];
    assert!(leader.client().answers_a_check("/deposed", ms(5_000)), "with a majority");
    followers().for_each(ZooKeeperServer::pause);
    let renewed = store.renew(&lease).await.remove(0);
    assert!(renewed.is_err(), "{renewed:?}");
    let held = store.is_held(&lease[0]).await;
    assert!(held.is_err(), "{held:?}");
    request.attempt = 1;
    let granted = acquire(&request).await;
    assert!(granted.is_err(), "{granted:?}");
    // A check that fails is decided by a majority too.
    for (client, path) in [(existing, "/deposed"), (missing, "/missing")] {
        assert!(!client.answers_a_check(path, ms(300)), "{path}");
    }
    followers().for_each(ZooKeeperServer::resume);
    eventually_async(DEADLINE, "it is confirmed again", async || {
        matches!(store.renew(&lease).await.remove(0), Ok(LeaseStatus::Held))
    })
    .await;
    store.release(&[ReleaseRequest::new(request.lease())]).await.remove(0).unwrap();
}

/// A follower answers pings on its own. A leader that wakes up may take a request of a session and then expire the session, since it
/// has had no sign of life from it.
#[tokio::test]
async fn an_idle_session_does_not_outlast_the_silence_of_its_leader() {
    let config = ZooKeeperServer::builder().setting("syncLimit", 200);
    let ensemble = ZooKeeperEnsemble::start_with(&config);
    let follower = ensemble.follower().expect("a follower");
    let proxy = FaultProxy::to_port(follower.port());
    let store = open_backend(&zookeeper::url_at(proxy.port(), "/silent")).await.unwrap();
    let keys: Arc<[Key]> = Arc::new([Key::from("order:1")]);
    let mut request = AcquireRequest::new(keys, Owner::random().unwrap(), ms(20_000));
    let acquire = async |request: &AcquireRequest| {
        store.acquire(std::slice::from_ref(request)).await.remove(0)
    };
    acquire(&request).await.unwrap();
    store.release(&[ReleaseRequest::new(request.lease())]).await.remove(0).unwrap();
    let connections = proxy.connections();
    let leader = ensemble.leader().expect("a leader");
    leader.pause();
    // No request is sent meanwhile.
    eventually_async(DEADLINE, "the connection is given up", async || {
        proxy.connections() > connections
    })
    .await;
    assert_eq!(follower.mode().as_deref(), Some("follower"), "it has not noticed");
    request.owner = Owner::random().unwrap();
    let refused = acquire(&request).await.unwrap_err();
    assert_eq!(refused.kind(), FailureKind::NotApplied, "{refused}");
    leader.resume();
    eventually_async(DEADLINE, "it serves again", async || acquire(&request).await.is_ok()).await;
    store.release(&[ReleaseRequest::new(request.lease())]).await.remove(0).unwrap();
}

async fn pool(ensemble: &ZooKeeperEnsemble, root: &str) -> LockPool {
    let builder = LockPool::builder(ensemble.url_of(root)).ttl(ms(20_000)).wait(ms(2_000));
    builder.connect().await.unwrap()
}
