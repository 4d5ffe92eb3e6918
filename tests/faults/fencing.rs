//! Fences grow whatever fails in the store.

use std::time::Duration;

use lock_runtime::{Fence, LockError, LockPool, distributed_lock};
use lock_tests::RedisServer;

const COUNTER: &str = "lock_runtime:fence";

#[distributed_lock(key = "order:<id>", pool = pool, guard = guard)]
async fn settle(pool: &LockPool, id: u64) -> Result<Option<Fence>, LockError> {
    Ok(guard.fence())
}

/// Takes fences and refuses one that is not above the last of its key.
#[derive(Default)]
struct Resource {
    last: Option<Fence>,
    writes: usize,
}

impl Resource {
    #[track_caller]
    fn write(&mut self, fence: Option<Fence>, when: &str) {
        assert!(fence.is_some(), "no fence {when}");
        assert!(fence > self.last, "{fence:?} after {:?} {when}", self.last);
        self.last = fence;
        self.writes += 1;
    }

    /// Two grants from each of the pools, by a guard and by the attribute.
    async fn write_through(&mut self, pools: &[LockPool], when: &str) {
        for pool in pools {
            let guard = pool.lock("order:7").acquire().await.unwrap();
            self.write(guard.fence(), when);
            guard.release().await.unwrap();
            self.write(settle(pool, 7).await.unwrap(), when);
        }
    }
}

async fn two_pools(url: &str) -> [LockPool; 2] {
    let connect = || LockPool::builder(url).wait(Duration::from_secs(10)).connect();
    [connect().await.unwrap(), connect().await.unwrap()]
}

fn counter(server: &RedisServer) -> Option<u64> {
    server.cli(&["GET", COUNTER]).parse().ok()
}

#[tokio::test]
async fn a_fence_grows_over_twenty_deaths_of_a_server_without_persistence() {
    let server = RedisServer::start();
    let pools = two_pools(&server.url()).await;
    let mut resource = Resource::default();
    for cycle in 0..20 {
        resource.write_through(&pools, &format!("in cycle {cycle}")).await;
        server.cli(&["FLUSHALL"]);
        assert_eq!(counter(&server), None, "the flush takes the counter along");
        resource.write_through(&pools, &format!("after the flush of cycle {cycle}")).await;
        server.restart();
        assert_eq!(counter(&server), None, "the restart takes the counter along");
    }
    resource.write_through(&pools, "at the end").await;
    assert_eq!(resource.writes, 41 * 4);
}

#[tokio::test]
async fn a_fence_grows_over_the_return_of_an_old_snapshot() {
    let server = RedisServer::start();
    let pools = two_pools(&server.url()).await;
    let mut resource = Resource::default();
    resource.write_through(&pools, "before the snapshot").await;
    assert_eq!(server.cli(&["SAVE"]), "OK");
    let snapshot = counter(&server).unwrap();
    resource.write_through(&pools, "after the snapshot").await;
    assert!(counter(&server).unwrap() > snapshot);
    server.restart();
    assert_eq!(counter(&server), Some(snapshot), "the counter went back");
    resource.write_through(&pools, "after the restart").await;
}

/// The counter carries the fence where the clock does not.
#[tokio::test]
async fn a_fence_grows_while_the_servers_clock_lags_behind_it() {
    let server = RedisServer::start();
    let pools = two_pools(&server.url()).await;
    let mut resource = Resource::default();
    resource.write_through(&pools, "by the clock").await;
    let ahead = resource.last.unwrap().get() + 3_600_000_000;
    server.cli(&["SET", COUNTER, &ahead.to_string()]);
    for n in 1..=5 {
        resource.write_through(&pools, "by the counter").await;
        assert_eq!(resource.last.unwrap().get(), ahead + 4 * n, "counted on");
    }
    // A foreign number is replaced by the clock.
    for broken in ["", "soon", "1e400", "-7", "18446744073709551615"] {
        server.cli(&["SET", COUNTER, broken]);
        let guard = pools[0].lock("other").acquire().await.unwrap();
        let fence = guard.fence().unwrap().get();
        assert!(fence > 1_000_000_000_000_000 && fence < ahead, "{fence} after {broken:?}");
        assert_eq!(counter(&server), Some(fence));
        guard.release().await.unwrap();
    }
}

/// All tasks of a process in the queue of one key, and all keys of a request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_grow_in_the_order_of_the_grants() {
    let server = RedisServer::start();
    let [ours, theirs] = two_pools(&server.url()).await;
    let fences = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..100 {
        let pool = if n % 2 == 0 { ours.clone() } else { theirs.clone() };
        let fences = fences.clone();
        tasks.spawn(async move {
            let keys = if n % 3 == 0 { vec!["a", "b"] } else { vec!["a"] };
            let locked = pool.lock_all(keys).wait(Duration::from_secs(30)).acquire().await;
            let guard = locked.unwrap();
            fences.lock().unwrap().push(guard.fence().unwrap());
            guard.release().await.unwrap();
        });
    }
    tasks.join_all().await;
    let fences = fences.lock().unwrap();
    assert_eq!(fences.len(), 100);
    assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
}

#[tokio::test]
async fn a_thousand_locks_leave_one_counter_behind() {
    let server = RedisServer::start();
    let [pool, _] = two_pools(&server.url()).await;
    for id in 0..1000 {
        settle(&pool, id).await.unwrap();
    }
    assert_eq!(server.cli(&["KEYS", "*"]), COUNTER);
}

#[tokio::test]
async fn a_fence_grows_over_reopenings_of_the_memory_store() {
    let mut resource = Resource::default();
    for cycle in 0..20 {
        // The store ends with the last pool of its name.
        let pools = two_pools("memory://fence-test").await;
        resource.write_through(&pools, &format!("in cycle {cycle}")).await;
    }
    assert_eq!(resource.writes, 20 * 4);
}

#[tokio::test]
async fn no_fence_is_minted_without_a_request_for_it() {
    let server = RedisServer::start();
    let [pool, _] = two_pools(&server.url()).await;
    let guard = pool.lock("order:7").fencing(false).acquire().await.unwrap();
    assert_eq!((guard.fence(), counter(&server)), (None, None));
    guard.release().await.unwrap();
}

#[test]
fn a_fence_is_a_number_for_sql_and_for_serde() {
    let fence: Fence = serde_json::from_str("1795388736000000").unwrap();
    assert_eq!(serde_json::to_string(&fence).unwrap(), "1795388736000000");
    assert_eq!((fence.get(), i64::from(fence)), (1_795_388_736_000_000, fence.as_i64()));

    assert_eq!(Fence::try_from(i64::MAX), Ok(Fence::MAX));
    Fence::try_from(-1_i64).unwrap_err();
    Fence::try_from(1_u64 << 63).unwrap_err();
    let refused = serde_json::from_str::<Fence>("9223372036854775808").unwrap_err();
    assert!(refused.to_string().contains("a number up to 2^63 - 1"), "{refused}");
}
