//! Requests for several keys among the tasks of one process: a key that a request cannot use yet is free for
//! others, and the request is served in bounded time.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lock_runtime::{ErrorKind, LockGuard, LockPool, Wait};
use lock_tests::RedisServer;
use lock_tests::prelude::*;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

/// The limit of every call that is served.
const DEADLINE: Duration = ms(60_000);

/// A pool in memory, then one on a server, which lives as long as the second value.
async fn pool(at: Store) -> (LockPool, Option<RedisServer>) {
    let server = (at == Store::Redis).then(RedisServer::start);
    let url = server.as_ref().map_or("memory://".to_owned(), RedisServer::url);
    (connect(&url).await, server)
}

async fn connect(url: &str) -> LockPool {
    LockPool::builder(url).wait(Wait::Forever).connect().await.unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Store {
    Memory,
    Redis,
}

const STORES: [Store; 2] = [Store::Memory, Store::Redis];

fn want(pool: &LockPool, keys: &[&str]) -> JoinHandle<LockGuard> {
    let acquiring = pool.lock_all(keys.iter().copied()).acquire();
    tokio::spawn(async move { acquiring.await.unwrap() })
}

/// Waits until `task` could reach its first wait.
async fn until_waiting<T>(task: &JoinHandle<T>) {
    sleep(ms(100)).await;
    assert!(!task.is_finished());
}

/// Longer than a request with a late answer.
#[tokio::test]
async fn a_key_of_a_long_hold_is_a_conflict() {
    for store in STORES {
        let (pool, _server) = pool(store).await;
        let guard = pool.lock_all(["a", "b"]).acquire().await.unwrap();
        sleep(ms(300)).await;
        for key in ["a", "b"] {
            assert!(pool.lock(key).try_acquire().await.unwrap().is_none(), "{store:?} {key}");
            let error = pool.lock(key).wait(ms(10)).acquire().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Conflict, "{store:?} {key}: {error}");
        }
        guard.release().await.unwrap();
    }
}

mod a_key_that_cannot_be_used_yet {
    use super::*;

    #[tokio::test]
    async fn is_free_for_other_tasks() {
        for store in STORES {
            let (pool, _server) = pool(store).await;
            let b = pool.lock("b").acquire().await.unwrap();
            let both = want(&pool, &["a", "b"]);
            until_waiting(&both).await;
            for _ in 0..20 {
                let a = pool.lock("a").wait(ms(2_000)).acquire().await;
                a.unwrap_or_else(|error| panic!("{store:?}: {error}")).release().await.unwrap();
            }
            b.release().await.unwrap();
            within(DEADLINE, "both keys", both).await.unwrap().release().await.unwrap();
        }
    }

    #[tokio::test]
    async fn is_free_for_the_holder_of_the_other_one() {
        for store in STORES {
            let (pool, _server) = pool(store).await;
            let b = pool.lock("b").acquire().await.unwrap();
            let both = want(&pool, &["a", "b"]);
            until_waiting(&both).await;
            let a =
                within(DEADLINE, "a, by the holder of b", pool.lock("a").acquire()).await.unwrap();
            a.release().await.unwrap();
            let nested = pool.lock("b2").run(pool.lock_all(["a", "c"]).acquire());
            within(DEADLINE, "nested calls", nested)
                .await
                .unwrap()
                .unwrap()
                .release()
                .await
                .unwrap();
            b.release().await.unwrap();
            within(DEADLINE, "both keys", both).await.unwrap().release().await.unwrap();
        }
    }

    /// The request keeps `a`, which comes back first, while it waits for `b`.
    #[tokio::test]
    async fn goes_back_if_the_other_one_takes_long() {
        for store in STORES {
            let (pool, _server) = pool(store).await;
            let a = pool.lock("a").acquire().await.unwrap();
            let b = pool.lock("b").acquire().await.unwrap();
            let both = want(&pool, &["a", "b"]);
            until_waiting(&both).await;
            a.release().await.unwrap();
            let mut waits = Vec::new();
            for _ in 0..5 {
                let asked = Instant::now();
                let a = pool.lock("a").wait(ms(2_500)).acquire().await;
                let a = a.unwrap_or_else(|error| panic!("{store:?}: {error}"));
                waits.push(asked.elapsed());
                a.release().await.unwrap();
            }
            println!("{store:?}: `a` by the holder of `b` after {waits:?}");
            b.release().await.unwrap();
            within(DEADLINE, "both keys", both).await.unwrap().release().await.unwrap();
        }
    }

    /// The holder of `b` is another process, so the request waits in the queue of the server.
    #[tokio::test]
    async fn is_acquired_by_its_own_process_as_soon_as_by_another() {
        let server = RedisServer::start();
        let (holder, ours, theirs) = (
            connect(&server.url()).await,
            connect(&server.url()).await,
            connect(&server.url()).await,
        );
        let b = holder.lock("b").acquire().await.unwrap();
        let both = want(&ours, &["a", "b"]);
        until_queued(&server, "b", 1).await;
        for (name, pool) in [("our", &ours), ("their", &theirs)] {
            for round in 0..5 {
                let asked = Instant::now();
                let a = pool.lock("a").wait(ms(2_500)).acquire().await;
                let a = a.unwrap_or_else(|error| panic!("{name} {round}: {error}"));
                println!("{name} own `a` after {:?}", asked.elapsed());
                a.release().await.unwrap();
            }
        }
        assert!(!both.is_finished());
        b.release().await.unwrap();
        within(DEADLINE, "both keys", both).await.unwrap().release().await.unwrap();
        until_nothing_is_left(&server).await;
    }
}

mod orders {
    use super::*;

    /// Three requests in a ring, each beside a single key that is taken all the time.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_ring_of_three_is_served() {
        for store in STORES {
            let (pool, _server) = pool(store).await;
            let inside: Arc<[AtomicBool; 3]> = Arc::default();
            let mut tasks = JoinSet::new();
            for n in 0..12 {
                let (pool, inside) = (pool.clone(), inside.clone());
                tasks.spawn(async move {
                    let keys = if n % 4 < 3 { vec![n % 3, (n + 1) % 3] } else { vec![n % 3] };
                    for _ in 0..40 {
                        let names = keys.iter().map(|key| format!("ring:{key}"));
                        let guard = pool.lock_all(names).acquire().await.unwrap();
                        for &key in &keys {
                            assert!(!inside[key].swap(true, Ordering::SeqCst), "two inside");
                        }
                        tokio::task::yield_now().await;
                        for &key in &keys {
                            inside[key].store(false, Ordering::SeqCst);
                        }
                        guard.release().await.unwrap();
                    }
                });
            }
            within(DEADLINE, "all of a ring", tasks.join_all()).await;
        }
    }

    /// The holder of each key acquires the next one while requests for pairs wait.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nested_calls_beside_requests_for_pairs_are_served() {
        for store in STORES {
            let (pool, _server) = pool(store).await;
            let mut tasks = JoinSet::new();
            for n in 0..8 {
                let pool = pool.clone();
                tasks.spawn(async move {
                    for _ in 0..25 {
                        if n % 2 == 0 {
                            let both = pool.lock_all(["n:a", "n:b"]).acquire().await.unwrap();
                            both.release().await.unwrap();
                        } else {
                            let outer = pool.lock("n:b").acquire().await.unwrap();
                            sleep(ms(1)).await;
                            // The other order alone would deadlock by itself.
                            if n % 4 == 1 {
                                let inner = pool.lock("n:c").acquire().await.unwrap();
                                inner.release().await.unwrap();
                            }
                            outer.release().await.unwrap();
                        }
                    }
                });
            }
            within(DEADLINE, "nested calls and pairs", tasks.join_all()).await;
        }
    }
}

mod fairness {
    use super::*;

    /// Two keys that tasks of the same process acquire continuously, and a request for both.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_keys_that_are_never_free_are_both_acquired() {
        for store in STORES {
            let (pool, _server) = pool(store).await;
            let over = Arc::new(AtomicBool::new(false));
            let mut crowd = JoinSet::new();
            for n in 0..8 {
                let (pool, over) = (pool.clone(), over.clone());
                crowd.spawn(async move {
                    let (key, other) = if n % 2 == 0 { ("a", "b") } else { ("b", "a") };
                    let mut longest = Duration::ZERO;
                    while !over.load(Ordering::Relaxed) {
                        let asked = Instant::now();
                        let guard = pool.lock(key).fencing(n < 4).acquire().await.unwrap();
                        longest = longest.max(asked.elapsed());
                        sleep(ms(2)).await;
                        // The holder of one key may try the other, without waiting for it.
                        if n == 5 {
                            drop(pool.lock(other).try_acquire().await.unwrap());
                        }
                        guard.release().await.unwrap();
                    }
                    longest
                });
            }
            let mut took = Vec::new();
            for round in 0..30 {
                let asked = Instant::now();
                let order = if round % 2 == 0 { ["a", "b"] } else { ["b", "a"] };
                let guard = within(DEADLINE, "both", pool.lock_all(order).acquire()).await.unwrap();
                took.push(asked.elapsed());
                sleep(ms(1)).await;
                guard.release().await.unwrap();
            }
            over.store(true, Ordering::Relaxed);
            let longest = crowd.join_all().await.into_iter().max().unwrap();
            took.sort();
            println!(
                "{store:?}: both of two busy keys: median {:?}, longest {:?}; a single key: longest {longest:?}",
                took[took.len() / 2],
                took[took.len() - 1]
            );
        }
    }

    /// A hundred transfers between an account of their own and a hot one, and calls on the idle accounts.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn transfers_to_a_hot_account_refuse_nothing_on_idle_ones() {
        const TASKS: usize = 100;
        for store in STORES {
            let (pool, _server) = pool(store).await;
            let (served, refused) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            let mut tasks = JoinSet::new();
            for n in 0..TASKS {
                let (transfers, singles) = (pool.clone(), pool.clone());
                let (served, refused) = (served.clone(), refused.clone());
                tasks.spawn(async move {
                    let asked = Instant::now();
                    let keys = [format!("acct:{n}"), "acct:hot".to_owned()];
                    let guard = transfers.lock_all(keys).acquire().await.unwrap();
                    let took = asked.elapsed();
                    sleep(ms(20)).await;
                    served.fetch_add(1, Ordering::Relaxed);
                    guard.release().await.unwrap();
                    (took, Duration::ZERO)
                });
                tasks.spawn(async move {
                    sleep(ms(100 + 5 * n as u64)).await;
                    let asked = Instant::now();
                    let single = singles.lock(format!("acct:{n}")).wait(ms(1_000)).acquire().await;
                    let took = asked.elapsed();
                    match single {
                        Ok(guard) => guard.release().await.unwrap(),
                        Err(error) if error.is_conflict() => {
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => panic!("{error}"),
                    }
                    (Duration::ZERO, took)
                });
            }
            let waits = within(DEADLINE, "all transfers", tasks.join_all()).await;
            println!(
                "{store:?}: {refused:?} of {TASKS} calls on idle accounts refused; longest wait of a transfer {:?}, of a call {:?}",
                waits.iter().map(|wait| wait.0).max().unwrap(),
                waits.iter().map(|wait| wait.1).max().unwrap()
            );
            assert_eq!(served.load(Ordering::Relaxed), TASKS);
            assert_eq!(refused.load(Ordering::Relaxed), 0, "{store:?}: conflicts on idle accounts");
        }
    }
}

mod the_wait {
    use super::*;

    #[tokio::test]
    async fn is_kept_when_the_server_falls_silent_while_one_key_is_held() {
        let server = RedisServer::start();
        let holder = connect(&server.url()).await;
        // A wait that is not kept ends with the timeout of the request.
        let ours = LockPool::builder(server.url()).wait(Wait::Forever).request_timeout(ms(10_000));
        let ours = ours.connect().await.unwrap();
        let b = holder.lock("b").acquire().await.unwrap();
        let wait = ms(1_500);
        let asked = Instant::now();
        let acquiring = ours.lock_all(["a", "b"]).ttl(ms(2_000)).wait(wait).acquire();
        let waiting = tokio::spawn(acquiring);
        until_queued(&server, "b", 1).await;
        server.pause();
        let error = within(DEADLINE, "the end of the wait", waiting).await.unwrap().unwrap_err();
        let took = asked.elapsed();
        server.resume();
        println!("asked to wait for {wait:?}, failed after {took:?}: {error}");
        assert!(took < wait + ms(5_000), "{took:?}");
        b.release().await.unwrap();
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn of_a_request_behind_a_task_of_its_own_process_is_kept() {
        for store in STORES {
            let (pool, _server) = pool(store).await;
            let b = pool.lock("b").acquire().await.unwrap();
            let asked = Instant::now();
            let error = pool.lock_all(["a", "b"]).wait(ms(300)).acquire().await.unwrap_err();
            assert!(error.is_conflict(), "{error}");
            assert!(asked.elapsed() >= ms(300));
            let one_try = pool.lock_all(["a", "b"]).try_acquire();
            assert!(within(DEADLINE, "a single try", one_try).await.unwrap().is_none());
            b.release().await.unwrap();
        }
    }

    #[tokio::test]
    async fn of_a_closed_pool_ends() {
        for store in STORES {
            let (pool, _server) = pool(store).await;
            let b = pool.lock("b").acquire().await.unwrap();
            let acquiring = pool.lock_all(["a", "b"]).acquire();
            let waiting = tokio::spawn(acquiring);
            sleep(ms(100)).await;
            let stopping = pool.shutdown(Duration::from_secs(5));
            tokio::pin!(stopping);
            let error = tokio::select! {
                error = within(DEADLINE, "the waiter", waiting) => error.unwrap().unwrap_err(),
                _ = &mut stopping => panic!("`b` is held"),
            };
            assert_eq!(error.kind(), ErrorKind::PoolClosed);
            drop(b);
            stopping.await;
        }
    }
}

mod the_number_of_keys {
    use super::*;

    const MOST: usize = 128;

    fn names(count: usize) -> impl Iterator<Item = String> {
        (0..count).map(|n| format!("{{tag}}:{n}"))
    }

    #[tokio::test]
    async fn is_bounded_by_an_error_that_says_what_to_do() {
        let (pool, _) = pool(Store::Memory).await;
        for count in [MOST + 1, 10_000] {
            let error = pool.lock_all(names(count)).acquire().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            let text = error.to_string();
            assert!(text.contains(&count.to_string()) && text.contains("128"), "{text}");
            assert!(text.contains("one key"), "{text}");
        }
        // Each key counts once.
        let twice = names(MOST).chain(names(MOST));
        pool.lock_all(twice).acquire().await.unwrap().release().await.unwrap();
    }

    #[tokio::test]
    async fn that_is_the_most_is_locked_and_waited_for_everywhere() {
        let servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
        let nodes: Vec<_> =
            servers.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        for url in [servers[0].url(), format!("redlock://{}", nodes.join(","))] {
            // A busy machine is slow at five hundred commands; nothing here is about time.
            let slowly = || {
                let pool = LockPool::builder(&url).wait(Wait::Forever).request_timeout(ms(5_000));
                pool.node_timeout(ms(2_500)).connect()
            };
            let (ours, theirs) = (slowly().await.unwrap(), slowly().await.unwrap());
            let guard = ours.lock_all(names(MOST)).acquire().await.unwrap();
            assert_eq!(guard.keys().len(), MOST);
            let next = theirs.lock_all(names(MOST)).acquire();
            let next = tokio::spawn(async move { next.await.unwrap() });
            until_waiting(&next).await;
            guard.verify().await.unwrap();
            guard.release().await.unwrap();
            within(DEADLINE, "the next", next).await.unwrap().release().await.unwrap();
            // One of them is held elsewhere: all others are acquired between steps.
            let last = ours.lock("{tag}:127").acquire().await.unwrap();
            let next = theirs.lock_all(names(MOST)).acquire();
            let next = tokio::spawn(async move { next.await.unwrap() });
            until_waiting(&next).await;
            last.release().await.unwrap();
            within(DEADLINE, "all of them", next).await.unwrap().release().await.unwrap();
        }
    }
}
