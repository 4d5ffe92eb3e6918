//! How long the answers to queued owners let them wait, and what stands in the wait queue, on PostgreSQL and MariaDB.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_runtime::Key;
use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, Owner, ReleaseRequest, WaitMode,
};
use lock_runtime::testing::open_backend;
use lock_tests::prelude::*;
use lock_tests::{SqlServer, SqlSession};

const KEY: &str = "order:1";

/// A request that is queued if the key is held.
fn request(ttl: Duration) -> AcquireRequest {
    let keys: Arc<[Key]> = Arc::new([Key::from(KEY)]);
    let mut request = AcquireRequest::new(keys, Owner::random().unwrap(), ttl);
    (request.enqueue, request.fencing) = (true, true);
    request
}

async fn acquire(store: &impl Backend, request: &mut AcquireRequest) -> AcquireOutcome {
    let outcome = store.acquire(std::slice::from_ref(request)).await.remove(0).unwrap();
    request.attempt += 1;
    outcome
}

/// When the queued owner is to look again, and how long the holder's lease lasts. `None` if it was granted the key.
fn next_look(outcome: AcquireOutcome) -> Option<(Duration, Option<Duration>)> {
    match outcome {
        AcquireOutcome::Acquired { .. } => None,
        AcquireOutcome::Contended {
            expires_in,
            wait_mode: WaitMode::Queued { retry_after },
            ..
        } => Some((retry_after, expires_in)),
        outcome => panic!("not queued: {outcome:?}"),
    }
}

#[tokio::test]
async fn behind_dead_owners_on_postgres_the_end_of_the_lease_is_not_missed() {
    dead_owners_delay_no_look(SqlServer::postgres(), |n| {
        format!(
            "INSERT INTO lock_queue (key, owner, channel, seen)
             VALUES ('{KEY}', 'dead-{n}', '', now() - interval '11 seconds')"
        )
    })
    .await;
}

#[tokio::test]
async fn behind_dead_owners_on_mysql_the_end_of_the_lease_is_not_missed() {
    dead_owners_delay_no_look(SqlServer::mysql(), |n| {
        format!(
            "INSERT INTO lock_queue (`key`, owner, position, channel, seen)
             VALUES ('{KEY}', 'dead-{n}', {n}, '', (UNIX_TIMESTAMP(NOW(6)) - 11) * 1000000)"
        )
    })
    .await;
}

/// The lease of a dead holder ends without a notification: the first live request in the queue looks at that time.
async fn dead_owners_delay_no_look(server: SqlServer, dead: impl Fn(u32) -> String) {
    const TTL: Duration = ms(150);
    let store = open_backend(&server.url()).await.unwrap();
    let mut looks = 0;
    for _ in 0..100 {
        assert_eq!(next_look(acquire(&store, &mut request(TTL)).await), None);
        let mut session = server.session().await;
        for n in 1..=3 {
            session.run(&dead(n)).await;
        }
        let mut waiter = request(TTL);
        // The first request queues the owner, and the second one finds it queued.
        for _ in 0..2 {
            let Some((retry_after, Some(expires_in))) =
                next_look(acquire(&store, &mut waiter).await)
            else {
                break;
            };
            assert!(retry_after <= expires_in + ms(1), "{retry_after:?} for {expires_in:?}");
            looks += 1;
        }
        session.run("DELETE FROM lock_queue").await;
        tokio::time::sleep(TTL).await;
        if looks >= 6 {
            return;
        }
    }
    panic!("the leases end too early on this machine");
}

#[tokio::test]
async fn the_next_owner_on_postgres_keeps_its_turn_behind_an_open_pin() {
    an_open_pin_keeps_the_turn_of_the_next_owner(SqlServer::postgres()).await;
}

#[tokio::test]
async fn the_next_owner_on_mysql_keeps_its_turn_behind_an_open_pin() {
    an_open_pin_keeps_the_turn_of_the_next_owner(SqlServer::mysql()).await;
}

/// The key is handed off to the first of three waiters, which cannot have it until the former holder's transaction ends.
async fn an_open_pin_keeps_the_turn_of_the_next_owner(server: SqlServer) {
    const TTL: Duration = ms(20_000);
    let store = open_backend(&format!("{}&pin=on", server.url())).await.unwrap();
    let mut holder = request(TTL);
    let AcquireOutcome::Acquired { fence: Some(fence), .. } = acquire(&store, &mut holder).await
    else {
        panic!("the key is free");
    };
    let mut pinned = server.session().await;
    pinned.begin().await;
    pinned.run(&store.pin_sql(&holder.keys, fence).unwrap()).await;
    let mut waiters = [request(TTL), request(TTL), request(TTL)];
    for waiter in &mut waiters {
        assert!(next_look(acquire(&store, waiter).await).is_some());
    }
    store.release(&[ReleaseRequest::new(holder.lease())]).await.remove(0).unwrap();
    let mut session = server.session().await;
    assert_eq!(queued(&mut session).await, "2");
    let refused = async |waiters: &mut [AcquireRequest; 3]| {
        let (retry_after, _) = next_look(acquire(&store, &mut waiters[0]).await).unwrap();
        assert!(retry_after <= ms(25), "{retry_after:?}");
    };
    // During its reservation, and behind its end if the other owners do not look.
    for _ in 0..2 {
        refused(&mut waiters).await;
        assert_eq!(queued(&mut session).await, "2");
        tokio::time::sleep(ms(1_200)).await;
    }
    // The pin outlasts each reservation. The owner asks again meanwhile, so the others find the key reserved.
    let began = Instant::now();
    while began.elapsed() < ms(1_500) {
        refused(&mut waiters).await;
        let (_, reserved_for) = next_look(acquire(&store, &mut waiters[1]).await).unwrap();
        assert!(reserved_for.is_some(), "the key has no owner");
        tokio::time::sleep(ms(10)).await;
    }
    assert_eq!(queued(&mut session).await, "2");
    pinned.run("COMMIT").await;
    assert_eq!(next_look(acquire(&store, &mut waiters[0]).await), None);
}

async fn queued(session: &mut SqlSession) -> String {
    session.rows("SELECT COUNT(*) FROM lock_queue").await.remove(0)
}
