//! The leader of three servers dies while locks are held and contended.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use lock_runtime::LockPool;
use lock_tests::prelude::*;
use lock_tests::{EtcdServer, EtcdTrio, ZooKeeperEnsemble, ZooKeeperServer, eventually_async};
use tokio::task::JoinSet;

mod etcd {
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_death_of_the_leader_grants_nothing_twice() {
        super::of_etcd(&*lock_tests::EtcdTrio::shared().await, 2).await;
    }
}

mod zookeeper {
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_death_of_the_leader_grants_nothing_twice() {
        super::of_zookeeper(&*lock_tests::ZooKeeperEnsemble::shared().await, 2).await;
    }
}

/// Kills the leader so many times.
pub(crate) async fn of_etcd(cluster: &EtcdTrio, times: usize) {
    let leader = || cluster.leader();
    die(&cluster.url_of("/death"), times, leader, EtcdServer::kill, EtcdServer::restart).await;
}

/// Kills the leader so many times.
pub(crate) async fn of_zookeeper(ensemble: &ZooKeeperEnsemble, times: usize) {
    let (kill, restart) = (ZooKeeperServer::kill, ZooKeeperServer::restart);
    die(&ensemble.url_of("/death"), times, || ensemble.leader(), kill, restart).await;
}

/// Opens several pools at once while a server is frozen. Only one that waits for the frozen server needs the whole of
/// `connect_timeout`.
pub(crate) async fn opens_in_time(url: &str) {
    let mut opening = JoinSet::new();
    for _ in 0..8 {
        let builder = LockPool::builder(url).connect_timeout(2 * DEADLINE);
        opening.spawn(async move { within(DEADLINE, "a pool", builder.connect()).await });
    }
    for pool in opening.join_all().await {
        pool.unwrap().shutdown(DEADLINE).await;
    }
}

/// Under load: no key is granted twice, fences grow, and grants go on soon after there is a leader again.
async fn die<'a, S: 'a>(
    url: &str,
    times: usize,
    leader: impl Fn() -> Option<&'a S>,
    kill: fn(&S),
    restart: fn(&S),
) {
    const KEYS: usize = 4;
    let held = pool(url).await.lock("held").acquire().await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let inside: Arc<[AtomicUsize; KEYS]> = Arc::default();
    let fences: Arc<[AtomicUsize; KEYS]> = Arc::default();
    let cycles = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for n in 0..12 {
        let (pool, over) = (pool(url).await, over.clone());
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
        eventually_async(DEADLINE, "there is a leader", async || leader().is_some()).await;
        let killed = leader().expect("a leader");
        kill(killed);
        eventually_async(DEADLINE, "there is another leader", async || leader().is_some()).await;
        let began = Instant::now();
        goes_on(&cycles).await;
        let took = began.elapsed();
        println!("a grant {took:?} after the election");
        assert!(took < ms(5_000) + NOISE, "{took:?}");
        restart(killed);
    }
    over.store(true, Ordering::SeqCst);
    while let Some(ended) = within(DEADLINE, "all tasks", tasks.join_next()).await {
        ended.unwrap();
    }
    assert!(held.is_held());
    held.release().await.unwrap();
}

async fn pool(url: &str) -> LockPool {
    LockPool::builder(url).ttl(ms(20_000)).wait(ms(2_000)).connect().await.unwrap()
}

/// Waits until twenty more cycles are over.
pub(crate) async fn goes_on(cycles: &AtomicUsize) {
    let before = cycles.load(Ordering::SeqCst);
    eventually_async(DEADLINE, "grants go on", async || {
        cycles.load(Ordering::SeqCst) >= before + 20
    })
    .await;
}
