//! Three servers: the leader dies, and a follower is cut off or frozen.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use lock_runtime::backend::{AcquireRequest, Backend, LeaseStatus, Owner, ReleaseRequest};
use lock_runtime::testing::open_backend;
use lock_runtime::{Key, LockPool};
use lock_tests::prelude::*;
use lock_tests::{ZooKeeperEnsemble, ZooKeeperServer, eventually_async};
use tokio::task::JoinSet;

/// Under load: no key is granted twice, fences grow, and grants go on soon after there is a leader again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_death_of_the_leader_grants_nothing_twice() {
    let ensemble = ZooKeeperEnsemble::shared().await;
    leaders_die(&ensemble, 2).await;
}

/// Kills the leader so many times.
pub(super) async fn leaders_die(ensemble: &ZooKeeperEnsemble, times: usize) {
    const KEYS: usize = 4;
    let held = pool(ensemble, "/death").await.lock("held").acquire().await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let inside: Arc<[AtomicUsize; KEYS]> = Arc::default();
    let fences: Arc<[AtomicUsize; KEYS]> = Arc::default();
    let cycles = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for n in 0..12 {
        let (pool, over) = (pool(ensemble, "/death").await, over.clone());
        let (inside, fences, cycles) = (inside.clone(), fences.clone(), cycles.clone());
        tasks.spawn(async move {
            while !over.load(Ordering::SeqCst) {
                let key = n % KEYS;
                let Ok(guard) = pool.lock(format!("order:{key}")).acquire().await else { continue };
                // No process is frozen here, so a holder that is believed is the only one.
                assert_eq!(inside[key].fetch_add(1, Ordering::SeqCst), 0, "two holders");
                let fence = usize::try_from(guard.fence().unwrap().get()).unwrap();
                let last = fences[key].swap(fence, Ordering::SeqCst);
                assert!(fence > last, "{fence} after {last}");
                tokio::time::sleep(ms(2)).await;
                inside[key].fetch_sub(1, Ordering::SeqCst);
                if guard.release().await.is_ok() {
                    cycles.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
    }
    for _ in 0..times {
        goes_on(&cycles).await;
        let leader = ensemble.leader().expect("a leader");
        leader.kill();
        eventually_async(DEADLINE, "there is another leader", async || ensemble.leader().is_some())
            .await;
        let began = Instant::now();
        goes_on(&cycles).await;
        let took = began.elapsed();
        println!("a grant {took:?} after the election");
        assert!(took < ms(5_000) + NOISE, "{took:?}");
        leader.restart();
    }
    over.store(true, Ordering::SeqCst);
    while let Some(ended) = within(DEADLINE, "all tasks", tasks.join_next()).await {
        ended.unwrap();
    }
    assert!(held.is_held());
    held.release().await.unwrap();
}

/// The server of the session is frozen: the session goes on at another one.
#[tokio::test]
async fn a_session_outlives_its_server() {
    let ensemble = ZooKeeperEnsemble::shared().await;
    let pool = pool(&ensemble, "/outlives").await;
    // Longer than an election takes, also on a busy machine.
    let guard = pool.lock("order:1").ttl(ms(20_000)).acquire().await.unwrap();
    let follower = ensemble.follower().expect("a follower");
    let others = ensemble.servers.iter().filter(|server| server.port() != follower.port());
    let leader = ensemble.leader().expect("a leader");
    for server in [follower, leader] {
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
        eventually_async(DEADLINE, "it is back", async || server.mode().is_some()).await;
    }
    assert!(others.count() == 2 && guard.is_held());
    guard.release().await.unwrap();
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

async fn pool(ensemble: &ZooKeeperEnsemble, root: &str) -> LockPool {
    let builder = LockPool::builder(ensemble.url_of(root)).ttl(ms(20_000)).wait(ms(2_000));
    builder.connect().await.unwrap()
}

/// Waits until twenty more cycles are over.
async fn goes_on(cycles: &AtomicUsize) {
    let before = cycles.load(Ordering::SeqCst);
    eventually_async(DEADLINE, "grants go on", async || {
        cycles.load(Ordering::SeqCst) >= before + 20
    })
    .await;
}
