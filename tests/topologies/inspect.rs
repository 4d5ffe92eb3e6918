//! The holder of a key, as each store of Redis tells it; and keys of other clients.

use lock_runtime::{ErrorKind, LockError, LockPool, OwnerInfo, distributed_lock};
use lock_tests::inspected::{
    ShownQueue, owner_of, tells_the_holder_and_its_queue, tells_the_process_of_the_holder,
};
use lock_tests::prelude::*;
use lock_tests::quorum::Quorum;
use lock_tests::sentinel::Watched;
use lock_tests::{RedisCluster, RedisServer};

#[tokio::test]
async fn memory_tells_the_holder_and_its_queue() {
    tells_the_holder_and_its_queue("memory://inspected", ShownQueue::Shown).await;
}

#[tokio::test]
async fn redis_tells_the_holder_and_its_queue() {
    let server = RedisServer::start();
    tells_the_holder_and_its_queue(&server.url(), ShownQueue::Shown).await;
}

#[tokio::test]
async fn a_cluster_tells_the_holder_and_its_queue() {
    let cluster = RedisCluster::start();
    tells_the_holder_and_its_queue(&cluster.url(), ShownQueue::Shown).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_master_behind_sentinels_tells_the_holder_and_its_queue() {
    let watched = Watched::start().without_failover();
    tells_the_holder_and_its_queue(&watched.url(), ShownQueue::Shown).await;
}

#[tokio::test]
async fn redis_without_scripts_tells_the_holder() {
    let server = RedisServer::start();
    let url = format!("{}?scripts=off", server.url());
    let connect = || LockPool::builder(&url).key_prefix("seen:").connect();
    let [one, other] = [connect().await.unwrap(), connect().await.unwrap()];
    let guard = one.lock("order:1").fencing(false).acquire().await.unwrap();
    let shown = other.inspect("order:1").await.unwrap();
    assert_eq!(owner_of(&shown), Some(one.snapshot().held[0].owner));
    assert!(shown.holder.unwrap().expires_in.unwrap() <= ms(30_000));
    // A process with scripts tells the same.
    let scripted = LockPool::builder(server.url()).key_prefix("seen:").connect().await.unwrap();
    assert_eq!(
        owner_of(&scripted.inspect("order:1").await.unwrap()),
        Some(one.snapshot().held[0].owner)
    );
    guard.release().await.unwrap();
    assert!(other.inspect("order:1").await.unwrap().is_free());
    server.cli(&["SET", "seen:theirs", "worker-7"]);
    server.cli(&["RPUSH", "seen:list", "1"]);
    for key in ["theirs", "list"] {
        let shown = other.inspect(key).await.unwrap();
        assert!(!shown.is_free() && owner_of(&shown).is_none(), "{key}: {shown:?}");
    }
}

#[tokio::test]
async fn a_quorum_tells_what_a_majority_has() {
    let quorum = Quorum::start(5);
    tells_the_holder_and_its_queue(&quorum.url(), ShownQueue::Hidden).await;
    let pool = LockPool::builder(quorum.url()).ttl(ms(20_000)).connect().await.unwrap();
    let guard = pool.lock("order:1").acquire().await.unwrap();
    // Two nodes may be down, and a value on two of five is no lock.
    for node in &quorum.nodes()[..2] {
        node.cli(&["SET", "order:2", "worker-7", "PX", "60000"]);
    }
    assert!(pool.inspect("order:2").await.unwrap().is_free());
    quorum[2].cli(&["SET", "order:2", "worker-7", "PX", "30000"]);
    let theirs = pool.inspect("order:2").await.unwrap().holder.unwrap();
    assert_eq!((theirs.owner, theirs.fence), (None, None));
    assert!(theirs.expires_in.unwrap() <= ms(30_000), "{theirs:?}");
    for node in &quorum.nodes()[3..] {
        node.kill();
    }
    let shown = pool.inspect("order:1").await.unwrap().holder.unwrap();
    assert_eq!(shown.owner, Some(pool.snapshot().held[0].owner));
    assert_eq!(shown.fence, guard.fence());
    quorum[2].kill();
    let error = pool.inspect("order:1").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    drop(guard);
}

/// Other libraries write values of other forms, some of them in a key of another type.
#[tokio::test]
async fn keys_of_other_clients_are_held_by_another_client() {
    let server = RedisServer::start();
    let pool = LockPool::builder(server.url()).key_prefix("app:").connect().await.unwrap();
    server.cli(&["SET", "app:plain", "c2VjcmV0IHRva2Vu", "NX", "PX", "60000"]);
    server.cli(&["SET", "app:forever", "worker-7"]);
    server.cli(&["HSET", "app:redisson", "6f1a:42", "1"]);
    for (key, has_end) in [("plain", true), ("forever", false), ("redisson", false)] {
        let shown = pool.inspect(key).await.unwrap();
        let text = format!("{shown:?}");
        let holder = shown.holder.unwrap_or_else(|| panic!("{key} is held"));
        assert_eq!((holder.owner, holder.fence), (None, None), "{key}");
        assert_eq!(holder.expires_in.is_some(), has_end, "{key}: {text}");
        assert!(!text.contains("c2Vj"), "the value would be enough to free the lock: {text}");
        assert!(
            pool.lock(key).try_acquire().await.is_ok_and(|it| it.is_none()) || key == "redisson"
        );
    }
}

#[tokio::test]
async fn an_inspection_changes_nothing() {
    let server = RedisServer::start();
    let pool = patient(server.url(), ms(20_000)).await;
    let other = patient(server.url(), ms(20_000)).await;
    let guard = pool.lock("order:1").renew(false).acquire().await.unwrap();
    let changes = || {
        let info = server.cli(&["INFO", "persistence"]);
        let line = info.lines().find_map(|it| it.strip_prefix("rdb_changes_since_last_save:"));
        line.unwrap().trim().to_owned()
    };
    let before = (changes(), server.cli(&["KEYS", "*"]));
    let first = other.inspect("order:1").await.unwrap().holder.unwrap();
    for _ in 0..20 {
        assert!(other.inspect("order:2").await.unwrap().is_free());
        let next = other.inspect("order:1").await.unwrap().holder.unwrap();
        assert!(next.expires_in <= first.expires_in, "{next:?} behind {first:?}");
    }
    assert_eq!((changes(), server.cli(&["KEYS", "*"])), before);
    guard.release().await.unwrap();
}

/// A user that may not read wait queues is told the holder.
#[tokio::test]
async fn a_user_without_rights_to_queues_is_told_the_holder() {
    let user = "user worker on >pw ~order:* ~lock_runtime:* resetchannels -@all +set +get +mget +del +pexpire +pttl \
                +time +eval +evalsha +hello +ping +select";
    let server = RedisServer::builder().config_line(user).start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let url = format!("redis://worker:pw@127.0.0.1:{}", server.port());
    let limited = LockPool::connect(&url).await.unwrap();
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let shown = limited.inspect("order:1").await.unwrap();
    assert_eq!(owner_of(&shown), Some(pool.snapshot().held[0].owner));
    assert_eq!(shown.waiting, None);
    guard.release().await.unwrap();
    let refused = limited.inspect("secret").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Backend, "{refused}");
}

#[tokio::test]
async fn what_is_no_key_is_refused_and_a_silent_store_is_an_error() {
    let server = RedisServer::start();
    let builder = LockPool::builder(server.url()).request_timeout(ms(300));
    let pool = builder.connect().await.unwrap();
    for key in ["", "lock_runtime:fence"] {
        let error = pool.inspect(key).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidKey, "{error}");
    }
    server.pause();
    let error = pool.inspect("order:1").await.unwrap_err();
    server.resume();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    assert_eq!(error.key().map(|key| key.as_str()), Some("order:1"));
}

const HOLDER: &str = env!("CARGO_BIN_EXE_annotated-holder");

#[tokio::test(flavor = "multi_thread")]
async fn redis_tells_the_process_of_the_holder() {
    let server = RedisServer::start();
    let stored = || server.cli(&["GET", "order:42"]);
    tells_the_process_of_the_holder(&server.url(), HOLDER, stored).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_tells_the_process_of_the_holder() {
    let cluster = RedisCluster::start();
    let stored = || cluster.owner(cluster.slot("order:42")).cli(&["GET", "order:42"]);
    tells_the_process_of_the_holder(&cluster.url(), HOLDER, stored).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_master_behind_sentinels_tells_the_process_of_the_holder() {
    let watched = Watched::start().without_failover();
    let stored = || watched.master().unwrap().cli(&["GET", "order:42"]);
    tells_the_process_of_the_holder(&watched.url(), HOLDER, stored).await;
}

#[distributed_lock(key = "order:<id>", pool = pool)]
async fn inspected_inside(pool: &LockPool, id: u32) -> Result<Option<OwnerInfo>, LockError> {
    let shown = pool.inspect(format!("order:{id}")).await?;
    Ok(shown.holder.and_then(|holder| holder.info))
}

#[tokio::test]
async fn memory_tells_the_function_of_the_holder() {
    let pool = LockPool::connect("memory://").await.unwrap();
    let info = inspected_inside(&pool, 42).await.unwrap().unwrap();
    assert_eq!(info.process_id, std::process::id());
    let site = info.call_site.unwrap();
    assert!(site.contains("topologies/inspect.rs:"), "{site}");
    let silent = LockPool::builder("memory://").owner_info(false).connect().await.unwrap();
    assert_eq!(inspected_inside(&silent, 42).await.unwrap(), None);
}

/// Without scripts no step compares a value with a text behind the token.
#[tokio::test]
async fn redis_without_scripts_tells_no_process() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&format!("{}?scripts=off", server.url())).await.unwrap();
    assert_eq!(inspected_inside(&pool, 42).await.unwrap(), None);
}

/// All that the nodes have, with the digits of each vote also as the text that they stand for.
fn stored_votes(quorum: &Quorum) -> String {
    let mut all = String::new();
    for node in quorum.nodes() {
        let vote = node.cli(&["GET", "order:42"]);
        let digits = vote.split(['/', '#']).nth(1).unwrap_or_default().as_bytes();
        let text = digits.chunks(2).map(|pair| {
            let pair = std::str::from_utf8(pair).unwrap();
            char::from(u8::from_str_radix(pair, 16).unwrap_or(b'?'))
        });
        let ballots = node.cli(&["ZRANGE", "lock_runtime:ballots", "0", "-1"]);
        all += &format!("{vote} {} {ballots}\n", text.collect::<String>());
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quorum_tells_the_process_of_the_holder() {
    let quorum = Quorum::start(5);
    tells_the_process_of_the_holder(&quorum.url(), HOLDER, || stored_votes(&quorum)).await;
}

/// The request of a lock without a fence is a plain `SET`, and its release compares the whole value.
#[tokio::test]
async fn a_quorum_tells_the_function_of_a_lock_without_a_fence() {
    let quorum = Quorum::start(3);
    let pool = LockPool::connect(&quorum.url()).await.unwrap();
    let guard = pool.lock("order:42").fencing(false).acquire().await.unwrap();
    let call_site = format!("{}:{}", file!(), line!() - 1);
    let info = pool.inspect("order:42").await.unwrap().holder.unwrap().info.unwrap();
    assert_eq!((info.process_id, info.call_site), (std::process::id(), Some(call_site)));
    assert!(stored_votes(&quorum).contains(&format!("/{}", std::process::id())));
    guard.release().await.unwrap();
    assert!(pool.inspect("order:42").await.unwrap().is_free());
    let silent = LockPool::builder(quorum.url()).owner_info(false).connect().await.unwrap();
    let guard = silent.lock("order:42").fencing(false).acquire().await.unwrap();
    assert_eq!(pool.inspect("order:42").await.unwrap().holder.unwrap().info, None);
    assert!(!stored_votes(&quorum).contains(&format!("/{}", std::process::id())));
    guard.release().await.unwrap();
}

/// The text stands behind the token, and the plain commands of an uncontended lock stay what they are.
#[tokio::test]
async fn without_a_text_the_value_is_the_token() {
    let server = RedisServer::start();
    let connect = |tells: bool| LockPool::builder(server.url()).owner_info(tells).connect();
    let (silent, telling) = (connect(false).await.unwrap(), connect(true).await.unwrap());
    for (pool, tells) in [(&silent, false), (&telling, true)] {
        for fencing in [false, true] {
            let guard = pool.lock("order:1").fencing(fencing).acquire().await.unwrap();
            let value = server.cli(&["GET", "order:1"]);
            assert_eq!(value.len() > 49, tells, "{value}");
            assert_eq!(value.contains(&format!("/{}", std::process::id())), tells, "{value}");
            guard.release().await.unwrap();
            assert_eq!(server.cli(&["GET", "order:1"]), "(nil)");
        }
    }
}

/// A pool that tells and one that does not pass a lock to each other in the order of the queue.
#[tokio::test]
async fn pools_with_and_without_a_text_share_one_queue() {
    let server = RedisServer::start();
    let connect = |tells: bool| {
        let builder = LockPool::builder(server.url()).owner_info(tells).ttl(ms(20_000));
        builder.wait(lock_runtime::Wait::Forever).connect()
    };
    let (silent, telling) = (connect(false).await.unwrap(), connect(true).await.unwrap());
    let mut guard = silent.lock("order:1").acquire().await.unwrap();
    for round in 0..10 {
        let next = if round % 2 == 0 { &telling } else { &silent };
        let waiting = acquire_in_task(next, "order:1");
        until_queued(&server, "order:1", 1).await;
        assert!(has_contended_mark(&server.cli(&["GET", "order:1"])));
        guard.release().await.unwrap();
        guard = joined("the next", waiting).await.1;
        let info = silent.inspect("order:1").await.unwrap().holder.unwrap().info;
        assert_eq!(info.is_some(), round % 2 == 0, "round {round}");
        assert!(guard.verify().await.is_ok());
    }
    guard.release().await.unwrap();
    until_nothing_is_left(&server).await;
}
