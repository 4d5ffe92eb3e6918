//! Locks in a Redis Cluster: each at the server of its slot, while slots move and masters die.

#![allow(clippy::disallowed_methods)]

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, FailureKind, LeaseStatus, Owner,
};
use lock_runtime::testing::open_backend;
use lock_runtime::{ErrorKind, Fence, Key, LockError, LockPool, Wait, distributed_lock};
use lock_tests::history::{History, Recorder, now_ns};
use lock_tests::monitor::Ran;
use lock_tests::prelude::*;
use lock_tests::{Latency, Monitor, RedisCluster, RedisServer, eventually_async};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{sleep, timeout};

/// No test waits as long, so that no ttl hides a lock that was not handed off.
const TTL: Duration = ms(20_000);
const DEADLINE: Duration = ms(10_000);
/// The suffix of keys that are no locks.
const FILLER: &str = ":filler";

async fn two_pools(cluster: &RedisCluster) -> [LockPool; 2] {
    // In a call to several servers one may answer later than the others by an eighth of the timeout.
    let builder = || LockPool::builder(cluster.url()).ttl(TTL).request_timeout(ms(8_000));
    let connect = || builder().wait(Wait::Forever).connect();
    [connect().await.unwrap(), connect().await.unwrap()]
}

/// The number of error replies with this code, of all servers.
fn answered(cluster: &RedisCluster, code: &str) -> u64 {
    let running = cluster.nodes().iter().filter(|node| node.is_running());
    running.map(|node| node.errors(code)).sum()
}

/// Waits until there are neither locks nor wait queues, long before a wait queue expires by itself.
async fn until_nothing_is_left(cluster: &RedisCluster) {
    let may_stay = |key: &str| key.ends_with("}lock_runtime:fence") || key.ends_with(FILLER);
    eventually_async(ms(6_000), "nothing is left in the store", async || {
        cluster
            .masters()
            .iter()
            .all(|node| node.cli(&["KEYS", "*"]).lines().all(|key| key.is_empty() || may_stay(key)))
    })
    .await;
}

mod served {
    use super::*;

    #[tokio::test]
    async fn one_server_of_the_url_that_lives_is_enough() {
        let cluster = RedisCluster::start();
        let dead: Vec<_> = (0..2).map(|_| RedisServer::start()).collect();
        let [one, other] = [dead[0].port(), dead[1].port()];
        drop(dead);
        for node in cluster.nodes() {
            let url = format!(
                "redis+cluster://127.0.0.1:{one},127.0.0.1:{other},127.0.0.1:{}",
                node.port()
            );
            let pool = patient(url, TTL).await;
            pool.health().await.unwrap();
            for n in 0..10 {
                cycle(&pool, &format!("k{n}")).await;
            }
        }
        let url = format!("redis+cluster://:s3cret@127.0.0.1:{one},127.0.0.1:{other}");
        let error = LockPool::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend);
        let text = format!("{error} {error:?}");
        assert!(text.contains("not reachable") && !text.contains("s3cret"), "{text}");
    }

    #[tokio::test]
    async fn the_wrong_scheme_is_an_error_that_names_the_right_one() {
        let single = RedisServer::start();
        let url = single.url().replace("redis://", "redis+cluster://");
        let error = LockPool::connect(&url).await.unwrap_err().to_string();
        assert!(error.contains("`redis://`"), "{error}");

        let cluster = RedisCluster::start();
        let masters = cluster.masters();
        let elsewhere = cluster.key_at("k", masters[1]);
        let pool = LockPool::connect(&masters[0].url()).await.unwrap();
        let error = pool.lock(elsewhere).acquire().await.unwrap_err().to_string();
        assert!(error.contains("`redis+cluster://`"), "{error}");
        let says_so = async |pool: &LockPool| {
            let warnings = pool.health().await.unwrap().warnings;
            warnings.iter().any(|warning| warning.to_string().contains("`redis+cluster://`"))
        };
        assert!(says_so(&pool).await, "the warning comes before the first error");
        assert!(!says_so(&LockPool::connect(&cluster.url()).await.unwrap()).await);
    }

    #[tokio::test]
    async fn locks_in_all_slots_exclude_and_are_the_plain_keys() {
        const KEYS: usize = 300;
        let cluster = RedisCluster::start();
        let [ours, theirs] = two_pools(&cluster).await;
        let keys: Vec<_> = (0..KEYS).map(|n| format!("order:{n}")).collect();
        // Together, so that one call goes to all servers.
        let all = async |pool: &LockPool| {
            let mut tasks = JoinSet::new();
            for key in &keys {
                let acquiring = pool.lock(key.as_str()).try_acquire();
                tasks.spawn(async move { acquiring.await.unwrap() });
            }
            tasks.join_all().await.into_iter().flatten().collect::<Vec<_>>()
        };
        let guards = all(&ours).await;
        assert_eq!(guards.len(), KEYS);
        assert_eq!(all(&theirs).await.len(), 0);
        let mut per_master = Vec::new();
        for node in cluster.masters() {
            let stored: HashSet<_> = node.cli(&["KEYS", "*"]).lines().map(str::to_owned).collect();
            per_master.push(keys.iter().filter(|key| stored.contains(*key)).count());
        }
        assert_eq!(per_master.iter().sum::<usize>(), KEYS);
        assert!(per_master.iter().all(|count| *count > KEYS / 6), "{per_master:?}");
        for guard in &guards {
            guard.verify().await.unwrap();
        }
        for guard in guards {
            guard.release().await.unwrap();
        }
        assert_eq!(all(&theirs).await.len(), KEYS);
        until_nothing_is_left(&cluster).await;
        // The map was right all the time.
        assert_eq!(answered(&cluster, "MOVED"), 0);
        assert_eq!(answered(&cluster, "CROSSSLOT"), 0);
    }

    #[tokio::test]
    async fn many_leases_are_renewed_wherever_they_are() {
        const KEYS: usize = 200;
        let cluster = RedisCluster::start();
        let pool = patient(cluster.url(), TTL).await;
        let mut guards = Vec::new();
        for n in 0..KEYS {
            // Every second one shares its slot with others.
            let key = if n % 2 == 0 { format!("order:{n}") } else { format!("{{stock}}:{n}") };
            guards.push(pool.lock(key).renew(ms(500)).acquire().await.unwrap());
        }
        until_renewed(&guards).await;
        for guard in guards {
            guard.release().await.unwrap();
        }
        assert_eq!(answered(&cluster, "CROSSSLOT"), 0);
    }

    #[distributed_lock(keys = ["order:{<id>}", "stock:{<id>}"], pool = pool, guard = guard)]
    async fn settle(pool: &LockPool, id: u64) -> Result<Vec<String>, LockError> {
        Ok(guard.keys().iter().map(|key| key.as_str().to_owned()).collect())
    }

    #[tokio::test]
    async fn keys_of_one_slot_are_locked_together_and_others_are_refused() {
        let cluster = RedisCluster::start();
        let [ours, theirs] = two_pools(&cluster).await;
        let pair = ours.lock_all(["order:{7}", "stock:{7}"]).acquire().await.unwrap();
        assert!(pair.fence().is_some());
        for key in ["order:{7}", "stock:{7}"] {
            assert!(theirs.lock(key).try_acquire().await.unwrap().is_none());
        }
        let waiting = theirs.lock_all(["stock:{7}", "bill:{7}"]).acquire();
        let waiting = tokio::spawn(waiting);
        eventually_async(DEADLINE, "it is queued", async || {
            theirs.inspect("stock:{7}").await.is_ok_and(|found| found.waiting == Some(1))
        })
        .await;
        pair.release().await.unwrap();
        let pair = timeout(DEADLINE, waiting).await.unwrap().unwrap().unwrap();
        pair.release().await.unwrap();

        assert_eq!(settle(&ours, 7).await.unwrap(), ["order:{7}", "stock:{7}"]);

        let error = ours.lock_all(["order:7", "stock:7"]).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend);
        let text = error.to_string();
        for part in ["order:7", "stock:7", "different slots", "`order:{<id>}`"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        until_nothing_is_left(&cluster).await;
    }

    #[tokio::test]
    async fn a_closed_pool_listens_nowhere() {
        let cluster = RedisCluster::start();
        let pool = patient(cluster.url(), TTL).await;
        cycle(&pool, "k").await;
        let listening = || {
            let channels = |node: &RedisServer| node.query(&["PUBSUB", "CHANNELS", "lock_*"]);
            cluster.masters().iter().filter(|node| !channels(node).items().is_empty()).count()
        };
        assert_eq!(listening(), 3);
        pool.shutdown(ms(100)).await;
        eventually_async(DEADLINE, "all connections are closed", async || listening() == 0).await;
        let error = pool.lock("k").acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PoolClosed);
    }
}

mod hand_off {
    use super::*;

    /// Each message arrives over three connections, and only one of them counts.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_pools_take_turns_for_three_commands_a_section() {
        const EACH: usize = 150;
        const KEY: &str = "k";
        let cluster = RedisCluster::start();
        let pools = two_pools(&cluster).await;
        let owner = cluster.owner(cluster.slot(KEY));
        let monitor = Monitor::start(owner);
        let changes = alternate(pools, KEY, EACH).await;
        let sections = 2 * EACH;
        let ours = |ran: &Ran| ["SET", "EVAL", "EVALSHA"].contains(&ran.name().as_str());
        let lines: Vec<_> = by_clients(monitor.settled()).into_iter().filter(ours).collect();
        let commands = lines.len();
        let by_text = lines.iter().filter(|ran| ran.name() == "EVAL").count();
        println!("{commands} commands, {by_text} by text, {changes} changes, {sections} sections");
        // Without a queue there are a few. A task that is not scheduled leaves the turns to the other one.
        assert!(changes > sections / 4, "{changes} changes in {sections} sections");
        // Some requests may have to send a script by its text. More are passed-on grants.
        assert!(by_text <= 6, "{by_text} scripts by their text");
        assert!(commands < sections * 7 / 2, "{commands} commands for {sections} sections");
        until_nothing_is_left(&cluster).await;
    }

    #[tokio::test]
    async fn a_release_notifies_the_waiter_at_every_master() {
        let cluster = RedisCluster::start();
        let [ours, theirs] = two_pools(&cluster).await;
        for node in cluster.masters() {
            let key = cluster.key_at("k", node);
            // A polling waiter sends a request every 300 ms.
            let mut took = Latency::below(ms(60), 5);
            while took.wants_more() {
                let guard = ours.lock(key.as_str()).acquire().await.unwrap();
                let acquiring = theirs.lock(key.as_str()).acquire();
                let next = tokio::spawn(async move {
                    let guard = acquiring.await.unwrap();
                    (Instant::now(), guard)
                });
                eventually_async(DEADLINE, "it is queued", async || {
                    let keys = node.cli(&["KEYS", &format!("*}}{key}:lock_runtime:line")]);
                    !keys.is_empty()
                })
                .await;
                let freed = Instant::now();
                guard.release().await.unwrap();
                let (got, guard) = timeout(DEADLINE, next).await.unwrap().unwrap();
                took.push(got - freed);
                guard.release().await.unwrap();
            }
            println!("from release to entry: {took}");
        }
        until_nothing_is_left(&cluster).await;
    }

    /// The copy of a message that another server forwards arrives after its receiver has released.
    #[tokio::test]
    async fn a_late_copy_of_a_message_frees_nothing() {
        let cluster = RedisCluster::start();
        let [ours, theirs] = two_pools(&cluster).await;
        let masters = cluster.masters();
        let (home, other) = (masters[0], masters[1]);
        let [key, last] = [cluster.key_at("k", home), cluster.key_at("last", other)];
        let guard = ours.lock(key.as_str()).acquire().await.unwrap();
        let waiting = theirs.lock(key.as_str()).min_hold(ms(8_000)).acquire();
        let waiting = tokio::spawn(waiting);
        eventually_async(DEADLINE, "it is queued", async || {
            !home.cli(&["KEYS", &format!("*}}{key}:lock_runtime:line")]).is_empty()
        })
        .await;
        // Shorter than the expiry that the others expect.
        other.pause();
        guard.release().await.unwrap();
        let guard = timeout(DEADLINE, waiting).await.unwrap().unwrap().unwrap();
        guard.release().await.unwrap();
        assert_eq!(home.cli(&["EXISTS", &key]), "1", "min_hold keeps the key");
        let monitor = Monitor::start(home);
        other.resume();
        // A connection that receives this has received the copy.
        eventually_async(DEADLINE, "the other one serves again", async || {
            theirs.health().await.is_ok()
        })
        .await;
        cycle(&theirs, &last).await;
        sleep(ms(100)).await;
        let asked: Vec<_> = by_clients(monitor.settled())
            .into_iter()
            .filter(|ran| ran.args.contains(&key) && ran.name().starts_with("EVAL"))
            .collect();
        assert_eq!(asked, [], "the lock was released");
        assert_eq!(home.cli(&["EXISTS", &key]), "1");
    }

    /// The first request is answered, but its answer waits for another server when the message arrives.
    #[tokio::test]
    async fn a_waiter_granted_during_its_own_request_keeps_its_token() {
        let cluster = RedisCluster::start();
        let ours = patient(cluster.url(), TTL).await;
        // On this thread, so that simultaneous requests are sent together. A batch waits 0.3 s for other servers.
        let theirs = LockPool::builder(cluster.url()).ttl(TTL).wait(Wait::Forever);
        let theirs =
            theirs.request_timeout(ms(2_400)).on_current_runtime().connect().await.unwrap();
        let masters = cluster.masters();
        let (home, other) = (masters[0], masters[1]);
        let [key, elsewhere] = [cluster.key_at("k", home), cluster.key_at("k", other)];
        let in_line = async || {
            eventually_async(DEADLINE, "it is queued", async || {
                !home.cli(&["KEYS", &format!("*}}{key}:lock_runtime:line")]).is_empty()
            })
            .await;
        };
        // Started first: the first request of a key goes to the wait queue only for a second after a wait.
        let monitor = Monitor::start(home);
        let guard = ours.lock(key.as_str()).acquire().await.unwrap();
        let waiting = tokio::spawn(theirs.lock(key.as_str()).acquire());
        in_line().await;
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();

        let guard = ours.lock(key.as_str()).acquire().await.unwrap();
        other.pause();
        let both = [theirs.lock(key.as_str()).acquire(), theirs.lock(elsewhere).acquire()];
        let [first, second] = both;
        let waiting = tokio::spawn(first);
        let stuck = tokio::spawn(second);
        in_line().await;
        guard.release().await.unwrap();
        let guard = timeout(DEADLINE, waiting).await.unwrap().unwrap().unwrap();
        other.resume();
        let about_it = |ran: &Ran| ran.name().starts_with("EVAL") && ran.args.contains(&key);
        let ran: Vec<_> = by_clients(monitor.settled()).into_iter().filter(about_it).collect();
        let claimed = |ran: &Ran| {
            ran.args.iter().position(|arg| arg == "claim").map(|at| ran.args[at + 1].clone())
        };
        let token = ran
            .iter()
            .rev()
            .find_map(claimed)
            .expect("the lock was requested through the wait queue");
        let by_token: Vec<_> = ran.iter().filter(|ran| ran.args.contains(&token)).collect();
        assert!(by_token.iter().filter(|ran| claimed(ran).is_some()).count() > 1, "{ran:#?}");
        let released = by_token.iter().filter(|ran| ran.args.iter().any(|arg| arg == "release"));
        assert_eq!(released.count(), 0, "a token that was granted the lock was released: {ran:#?}");
        guard.release().await.unwrap();
        timeout(DEADLINE, stuck).await.unwrap().unwrap().unwrap().release().await.unwrap();
    }

    /// A request that reaches the server after its pool has abandoned it.
    #[tokio::test]
    async fn a_grant_to_an_abandoned_position_is_passed_on() {
        const KEY: &str = "k";
        let cluster = RedisCluster::start();
        let [ours, theirs] = two_pools(&cluster).await;
        let home = cluster.owner(cluster.slot(KEY));
        // The grant of a ttl like this is a second.
        let mut took = Latency::below(NOISE, 1);
        while took.wants_more() {
            let guard = ours.lock(KEY).acquire().await.unwrap();
            let ghost = "0".repeat(32) + &home.cli(&["GET", KEY])[32..];
            let waiting = tokio::spawn(theirs.lock(KEY).acquire());
            let mut line = String::new();
            eventually_async(DEADLINE, "it is queued", async || {
                line = home.cli(&["KEYS", "*:lock_runtime:line"]);
                !line.is_empty()
            })
            .await;
            home.cli(&["ZADD", &line, "1", &ghost]);
            let freed = Instant::now();
            guard.release().await.unwrap();
            let guard = timeout(DEADLINE, waiting).await.unwrap().unwrap().unwrap();
            took.push(freed.elapsed());
            guard.release().await.unwrap();
            until_nothing_is_left(&cluster).await;
        }
        println!("behind a forgotten place: {took}");
    }
}

mod moved {
    use super::*;

    #[tokio::test]
    async fn a_lock_is_where_its_slot_is_at_every_step_of_a_move() {
        const KEY: &str = "{7}:a";
        let cluster = RedisCluster::start();
        let [ours, theirs] = two_pools(&cluster).await;
        let slot = cluster.slot(KEY);
        let from = cluster.owner(slot);
        let to = cluster.masters().into_iter().find(|node| node.port() != from.port()).unwrap();
        let is_busy = async |pool: &LockPool, key: &str| {
            pool.lock(key).fencing(false).try_acquire().await.unwrap().is_none()
        };
        let plain = async |pool: &LockPool, key: &str| {
            pool.lock(key).fencing(false).acquire().await.unwrap()
        };

        let stays = plain(&ours, KEY).await;
        let fenced = cycle(&ours, "{7}:fenced").await;
        let step = cluster.begin_move(slot, to);
        // Still there.
        assert!(is_busy(&theirs, KEY).await);
        stays.verify().await.unwrap();
        // New keys are on the other side.
        let new = plain(&ours, "{7}:new").await;
        assert!(from.cli(&["KEYS", "{7}:new"]).is_empty());
        assert_eq!(to.cli(&["KEYS", "{7}:new"]), "{7}:new");
        assert!(is_busy(&theirs, "{7}:new").await);
        new.verify().await.unwrap();
        assert!(answered(&cluster, "ASK") > 0);
        // The lock moves while it is held.
        step.migrate(KEY);
        assert!(is_busy(&theirs, KEY).await);
        stays.verify().await.unwrap();
        stays.release().await.unwrap();
        let next = plain(&theirs, KEY).await;
        assert!(is_busy(&ours, KEY).await);
        // The keys of one request are on both sides: the request waits for the end of the move.
        let acquiring = ours.lock("{7}:fenced").acquire();
        let waiting = tokio::spawn(acquiring);
        eventually_async(DEADLINE, "a request was refused", async || {
            answered(&cluster, "TRYAGAIN") > 1
        })
        .await;
        assert!(!waiting.is_finished());

        step.finish();
        let guard = timeout(DEADLINE, waiting).await.unwrap().unwrap().unwrap();
        assert!(guard.fence() > fenced, "{:?} after {fenced:?}", guard.fence());
        assert!(is_busy(&theirs, "{7}:fenced").await);
        guard.release().await.unwrap();
        next.verify().await.unwrap();
        next.release().await.unwrap();
        new.release().await.unwrap();
        let before = answered(&cluster, "MOVED");
        for n in 0..5 {
            cycle(&ours, &format!("{{7}}:{n}")).await;
        }
        assert_eq!(answered(&cluster, "MOVED"), before, "the move was learned");
        until_nothing_is_left(&cluster).await;
    }

    /// Leases that are renewed by one script are at two servers for a while.
    #[tokio::test]
    async fn leases_are_renewed_while_their_slot_is_divided() {
        const KEYS: usize = 12;
        let cluster = RedisCluster::start();
        let pool = patient(cluster.url(), TTL).await;
        let keys: Vec<_> = (0..KEYS).map(|n| format!("{{7}}:{n}")).collect();
        let mut guards = Vec::new();
        for key in &keys {
            let request = pool.lock(key.as_str()).fencing(false).renew(ms(500));
            guards.push(request.acquire().await.unwrap());
        }
        let slot = cluster.slot(&keys[0]);
        let from = cluster.owner(slot);
        let to = cluster.masters().into_iter().find(|node| node.port() != from.port()).unwrap();
        let step = cluster.begin_move(slot, to);
        keys.iter().step_by(2).for_each(|key| step.migrate(key));
        until_renewed(&guards).await;
        step.finish();
        for guard in guards {
            guard.release().await.unwrap();
        }
        until_nothing_is_left(&cluster).await;
    }

    #[tokio::test]
    async fn several_keys_are_renewed_and_released_while_their_slot_is_divided() {
        let cluster = RedisCluster::start();
        let pool = LockPool::builder(cluster.url()).ttl(TTL).request_timeout(ms(4_000));
        let pool = pool.connect().await.unwrap();
        let name = |moved: usize, n: usize| format!("{{7}}:{moved}:{n}");
        let mut guards = Vec::new();
        for moved in 0..4 {
            let keys = [name(moved, 0), name(moved, 1)];
            let request = pool.lock_all(keys).fencing(false).renew(ms(500));
            guards.push(request.acquire().await.unwrap());
        }
        let held = guards.pop();
        let slot = cluster.slot("{7}");
        let from = cluster.owner(slot);
        let to = cluster.masters().into_iter().find(|node| node.port() != from.port()).unwrap();
        let step = cluster.begin_move(slot, to);
        // None, one or both of the keys of a lease have moved.
        for moved in 0..3 {
            (0..moved).for_each(|n| step.migrate(&name(moved, n)));
        }
        until_renewed(&guards).await;
        for guard in guards {
            guard.verify().await.unwrap();
            guard.release().await.unwrap();
        }
        for node in [from, to] {
            let left = node.cli(&["KEYS", "{7}:[0-2]:?"]);
            assert_eq!(left, "", "all are released before the move is over");
        }
        step.migrate(&name(3, 0));
        let report = pool.shutdown(ms(500)).await;
        assert_eq!((report.released, report.abandoned), (1, 0), "{report:?}");
        drop(held);
        step.finish();
        until_nothing_is_left(&cluster).await;
    }

    /// The queue and the lock are in one command, and one of the two may have moved.
    #[tokio::test]
    async fn a_contended_lock_is_released_and_acquired_while_its_slot_is_divided() {
        const WAITERS: usize = 3;
        for moves_lock in [false, true] {
            let cluster = RedisCluster::start();
            let [ours, theirs] = two_pools(&cluster).await;
            let key = "{7}:lock";
            let slot = cluster.slot(key);
            let from = cluster.owner(slot);
            let to = cluster.masters().into_iter().find(|node| node.port() != from.port()).unwrap();
            let guard = ours.lock(key).fencing(false).acquire().await.unwrap();
            let mut waiters = JoinSet::new();
            for _ in 0..WAITERS {
                let waiter = theirs.lock(key).fencing(false).wait(Wait::Forever).acquire();
                waiters.spawn(async move {
                    let guard = waiter.await.unwrap();
                    guard.release().await.unwrap();
                });
            }
            eventually_async(DEADLINE, "one is queued", async || {
                !from.cli(&["KEYS", "*:line"]).is_empty()
            })
            .await;
            let step = cluster.begin_move(slot, to);
            if moves_lock {
                step.migrate(key);
            }
            guard.release().await.unwrap();
            within(DEADLINE, "all have had it before the move is over", waiters.join_all()).await;
            let again = ours.lock(key).fencing(false).try_acquire().await.unwrap();
            again.expect("it is free").release().await.unwrap();
            step.finish();
            // Positions of owners that had the lock without the queue are passed over.
            alternate([ours, theirs], key, 5).await;
            until_nothing_is_left(&cluster).await;
        }
    }

    #[tokio::test]
    async fn a_waiter_is_served_where_the_slot_has_moved() {
        const KEY: &str = "k";
        let cluster = RedisCluster::start();
        let [ours, theirs] = two_pools(&cluster).await;
        let guard = ours.lock(KEY).acquire().await.unwrap();
        let acquiring = theirs.lock(KEY).acquire();
        let waiting = tokio::spawn(acquiring);
        let slot = cluster.slot(KEY);
        let from = cluster.owner(slot);
        eventually_async(DEADLINE, "it is queued", async || {
            !from.cli(&["KEYS", "*:line"]).is_empty()
        })
        .await;
        let to = cluster.masters().into_iter().find(|node| node.port() != from.port()).unwrap();
        cluster.begin_move(slot, to).finish();
        assert!(!waiting.is_finished());
        let before = guard.fence();
        guard.release().await.unwrap();
        let guard = timeout(DEADLINE, waiting).await.unwrap().unwrap().unwrap();
        assert!(guard.fence() > before);
        guard.release().await.unwrap();
        until_nothing_is_left(&cluster).await;
    }

    /// A server that joined after the pools had connected.
    #[tokio::test]
    async fn a_new_server_is_found_and_its_waiters_are_notified() {
        let mut cluster = RedisCluster::start();
        let [ours, theirs] = two_pools(&cluster).await;
        cluster.join();
        let new = &cluster.nodes()[6];
        let slot = cluster.slot("{7}");
        let step = cluster.begin_move(slot, new);
        // Redirected by the old owner at first, and then sent directly to the new one.
        let guard = ours.lock("{7}:a").fencing(false).acquire().await.unwrap();
        assert_eq!(new.cli(&["KEYS", "{7}:a"]), "{7}:a");
        guard.release().await.unwrap();
        step.finish();
        for round in 0..5 {
            let guard = ours.lock("{7}:b").acquire().await.unwrap();
            let waiting = theirs.lock("{7}:b").acquire();
            let waiting = tokio::spawn(waiting);
            eventually_async(DEADLINE, "it is queued", async || {
                !new.cli(&["KEYS", "*:lock_runtime:line"]).is_empty()
            })
            .await;
            let monitor = Monitor::start(new);
            guard.release().await.unwrap();
            let guard = timeout(DEADLINE, waiting).await.unwrap().unwrap().unwrap();
            let is_call = |name: String| matches!(&*name, "PUBLISH" | "SPUBLISH");
            let calls = monitor.settled().iter().filter(|ran| is_call(ran.name())).count();
            assert!(calls > 0, "no waiter was notified in round {round}");
            guard.release().await.unwrap();
        }
        until_nothing_is_left(&cluster).await;
    }

    /// The map is refreshed while the first connection to the new owner of a slot is opened.
    #[tokio::test]
    async fn a_request_to_a_new_server_waits_for_its_connection() {
        let mut cluster = RedisCluster::start();
        let [ours, theirs] = two_pools(&cluster).await;
        cluster.join();
        let new = &cluster.nodes()[6];
        let slot = cluster.slot("{7}");
        // The counter of fences stays with the old owner: a request with a fence has keys at both.
        let fenced = ours.lock("{7}:a").acquire().await.unwrap();
        let old = cluster.owner(slot);
        let step = cluster.begin_move(slot, new);
        new.pause();
        let redirected = theirs.lock("{7}:b").fencing(false).acquire();
        let redirected = tokio::spawn(redirected);
        let asked = async || old.errors("ASK") > 0;
        eventually_async(DEADLINE, "it is redirected", asked).await;
        let others = &cluster.nodes()[..6];
        let maps = || others.iter().map(|node| node.calls("cluster|slots")).sum::<u64>();
        let (before, divided) = (maps(), tokio::spawn(theirs.lock("{7}:c").acquire()));
        eventually_async(DEADLINE, "the map is refreshed", async || maps() > before + 3).await;
        assert!(!redirected.is_finished(), "{:?}", redirected.await);
        new.resume();
        let guard = timeout(DEADLINE, redirected).await.unwrap().unwrap().unwrap();
        guard.release().await.unwrap();
        step.finish();
        for guard in [fenced, timeout(DEADLINE, divided).await.unwrap().unwrap().unwrap()] {
            guard.release().await.unwrap();
        }
        until_nothing_is_left(&cluster).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn hundreds_of_slots_move_under_load_without_an_error_or_two_holders() {
        const SLOTS: u16 = 250;
        let cluster = RedisCluster::start();
        let masters = cluster.masters();
        let (from, to) = (cluster.owner(0), masters[masters.len() - 1]);
        assert_ne!(from.port(), to.port());
        // No server dies, so the ttl is for stalls of the machine alone.
        let load = Load::start(&cluster, ms(5_000), |slot| slot < SLOTS).await;
        // A slot with more keys takes longer to move.
        for key in &load.keys {
            for n in 0..300 {
                from.cli(&["SET", &format!("{{{key}}}:{n}{FILLER}"), "x"]);
            }
        }
        load.until_busy().await;
        block_in_place(|| cluster.reshard(SLOTS, from, to));
        assert_eq!(cluster.owner(0).port(), to.port());
        load.until_busy().await;
        let Outcome { history, errors, .. } = load.end().await;
        let [moved, asked, again] =
            ["MOVED", "ASK", "TRYAGAIN"].map(|code| answered(&cluster, code));
        println!("{} grants, {moved} MOVED, {asked} ASK, {again} TRYAGAIN", history.grants().len());
        assert_eq!(errors, Vec::<String>::new());
        history.assert_safe();
        assert!(moved > 0 && asked + again > 0, "the move met no request");
        until_nothing_is_left(&cluster).await;
    }
}

mod killed {
    use super::*;

    fn failovers() -> usize {
        let asked = std::env::var("LOCK_FAILOVERS").ok();
        asked.map_or(2, |text| text.parse().expect("a number"))
    }

    /// A grant in the last moment of a master may not reach its replica: Redis Cluster itself loses such a lock, and
    /// the fences distinguish the two holders.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_master_dies_and_its_locks_are_served_by_its_replica() {
        let cluster = RedisCluster::start();
        cluster.replace_masters_after(ms(1_000));
        let load = Load::start(&cluster, ms(1_500), |_| true).await;
        let pool = patient(cluster.url(), TTL).await;
        let mut fences = Vec::new();
        for round in 0..failovers() {
            load.until_busy().await;
            let master = cluster.masters()[round % 3];
            let key = cluster.key_at("only", master);
            fences.push((key.clone(), cycle(&pool, &key).await));
            // A release that does not reach the replica leaves the lock taken until the end of its ttl.
            block_in_place(|| cluster.until_replicated(master));
            block_in_place(|| cluster.kill(master));
            let serves = Instant::now();
            let fence = timeout(DEADLINE, cycle(&pool, &key)).await.unwrap();
            let took = serves.elapsed();
            println!("failover {round}: served {took:?} after the cluster serves again");
            assert!(took < ms(5_000), "{took:?}");
            for (_, before) in fences.iter().filter(|(it, _)| *it == key) {
                assert!(fence > *before, "{fence:?} after {before:?}");
            }
            fences.push((key, fence));
            load.until_busy().await;
            let is_healthy = async || pool.health().await.is_ok();
            eventually_async(DEADLINE, "all masters answer", is_healthy).await;
            block_in_place(|| {
                master.restart();
                cluster.until_whole();
            });
        }
        let Outcome { history, errors, per_key } = load.end().await;
        println!(
            "{} grants, {} errors, {} overlaps",
            history.grants().len(),
            errors.len(),
            history.overlaps().len()
        );
        assert_eq!(history.fence_faults().len(), 0);
        assert!(per_key.iter().all(|count| *count > 0), "{per_key:?}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_pool_says_that_a_master_is_down_until_it_is_replaced() {
        let cluster = RedisCluster::start();
        cluster.replace_masters_after(ms(2_000));
        let pool = patient(cluster.url(), TTL).await;
        pool.health().await.unwrap();
        let master = cluster.masters()[0];
        master.kill();
        let error = pool.health().await.unwrap_err();
        assert!(error.to_string().contains(&master.port().to_string()), "{error}");
        eventually_async(ms(20_000), "the replica has taken over", async || {
            pool.health().await.is_ok()
        })
        .await;
    }

    /// Requests sent together with its requests are answered all the same.
    #[tokio::test]
    async fn a_frozen_master_delays_no_lock_elsewhere() {
        let cluster = RedisCluster::start();
        let store = open_backend(&cluster.url()).await.unwrap();
        let masters = cluster.masters();
        let (frozen, lively) = (masters[0], masters[1]);
        let keys = [cluster.key_at("k", frozen), cluster.key_at("k", lively)];
        let claims = keys.each_ref().map(|key| {
            let keys = [Key::from(key)];
            let mut request = AcquireRequest::new(keys, Owner::random().unwrap(), TTL);
            request.fencing = true;
            request
        });
        let leases = claims.each_ref().map(AcquireRequest::lease);
        // The request timeout, behind which no answer counts. No call that waits for the frozen one ends before.
        let limit = ms(1_000);
        let (mut granting, mut renewing) = (Latency::below(limit, 1), Latency::below(limit, 1));
        while granting.wants_more() || renewing.wants_more() {
            frozen.pause();
            let began = Instant::now();
            let answers = within(DEADLINE, "the grants", store.acquire(&claims)).await;
            granting.push(began.elapsed());
            assert!(
                matches!(answers[0], Err(ref error) if error.kind() == FailureKind::MaybeApplied),
                "{answers:?}"
            );
            assert!(matches!(answers[1], Ok(AcquireOutcome::Acquired { .. })), "{answers:?}");
            let began = Instant::now();
            let answers = within(DEADLINE, "the renewals", store.renew(&leases)).await;
            renewing.push(began.elapsed());
            assert!(answers[0].is_err(), "{answers:?}");
            assert!(matches!(answers[1], Ok(LeaseStatus::Held)), "{answers:?}");
            frozen.resume();
            eventually_async(DEADLINE, "it serves again", async || {
                let answer = store.acquire(&claims[..1]).await.remove(0);
                matches!(answer, Ok(AcquireOutcome::Acquired { .. }))
            })
            .await;
        }
        println!("grants: {granting}; renewals: {renewing}");
    }
}

/// Tasks of two pools that take and free a few locks, and record the validity of their leases.
struct Load {
    keys: Vec<String>,
    dir: tempfile::TempDir,
    over: Arc<AtomicBool>,
    /// How often each of `keys` was locked.
    done: Arc<Vec<AtomicUsize>>,
    errors: Arc<Mutex<Vec<String>>>,
    tasks: JoinSet<()>,
}

struct Outcome {
    history: History,
    errors: Vec<String>,
    per_key: Vec<usize>,
}

impl Load {
    const KEYS: usize = 24;
    const TASKS: u64 = 16;

    /// With leases of `ttl`, on keys of slots that `fit`.
    async fn start(cluster: &RedisCluster, ttl: Duration, fit: impl Fn(u16) -> bool) -> Self {
        let keys: Vec<_> = (0..)
            .map(|n| format!("hot:{n}"))
            .filter(|key| fit(cluster.slot(key)))
            .take(Self::KEYS)
            .collect();
        let mut load = Self {
            done: Arc::new(keys.iter().map(|_| AtomicUsize::new(0)).collect()),
            keys,
            dir: tempfile::tempdir().unwrap(),
            over: Arc::default(),
            errors: Arc::default(),
            tasks: JoinSet::new(),
        };
        for name in ["p0", "p1"] {
            let pool = LockPool::builder(cluster.url()).ttl(ttl).wait(ms(30_000));
            let pool = pool.connect().await.unwrap();
            let recorder = Arc::new(Recorder::create(load.dir.path(), name).unwrap());
            for task in 0..Self::TASKS / 2 {
                let (pool, recorder) = (pool.clone(), recorder.clone());
                let (keys, done) = (load.keys.clone(), load.done.clone());
                let (over, errors) = (load.over.clone(), load.errors.clone());
                load.tasks.spawn(async move {
                    while !over.load(Ordering::SeqCst) {
                        let at = fastrand::usize(..keys.len());
                        let key = keys[at].as_str();
                        let asked = now_ns();
                        let guard = match pool.lock(key).acquire().await {
                            Ok(guard) => guard,
                            Err(error) => {
                                errors.lock().unwrap().push(format!("acquire of {key}: {error}"));
                                continue;
                            }
                        };
                        let fence = guard.fence().map(Fence::get);
                        let grant = recorder.granted(key, task, asked, || guard.valid_for(), fence);
                        done[at].fetch_add(1, Ordering::SeqCst);
                        sleep(ms(fastrand::u64(..20))).await;
                        recorder.renewed(grant, || guard.valid_for());
                        if !guard.is_held() {
                            recorder.lost(grant);
                        }
                        recorder.release(grant);
                        if let Err(error) = guard.release().await {
                            errors.lock().unwrap().push(format!("release of {key}: {error}"));
                        }
                    }
                });
            }
        }
        load
    }

    /// Waits until every key has been locked again.
    async fn until_busy(&self) {
        let count = |at: usize| self.done[at].load(Ordering::SeqCst);
        let before: Vec<_> = (0..self.done.len()).map(count).collect();
        eventually_async(ms(30_000), "every key is locked again", async || {
            before.iter().enumerate().all(|(at, before)| count(at) > *before)
        })
        .await;
    }

    async fn end(self) -> Outcome {
        self.over.store(true, Ordering::SeqCst);
        timeout(ms(60_000), self.tasks.join_all()).await.expect("all tasks end");
        Outcome {
            history: History::read(self.dir.path()).unwrap(),
            errors: std::mem::take(&mut *self.errors.lock().unwrap()),
            per_key: self.done.iter().map(|count| count.load(Ordering::SeqCst)).collect(),
        }
    }
}
