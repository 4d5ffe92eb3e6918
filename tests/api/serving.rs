//! `serve`: the server stops first, and its locks afterwards.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::error_handling::HandleErrorLayer;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{BoxError, Router};
use lock_runtime::{LockPool, distributed_lock, serve_until};
use lock_tests::prelude::*;
use lock_tests::runtimes::{current_thread, multi_thread};
use lock_tests::{RedisServer, eventually_async, http, in_own_process};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tower::ServiceBuilder;
use tower::timeout::TimeoutLayer;

const SOON: Duration = ms(30_000);

#[derive(Clone, Default)]
struct App {
    begun: Arc<AtomicUsize>,
    go_on: Arc<Notify>,
}

#[distributed_lock(key = "order:<id>", wait = "30s")]
async fn settle(State(app): State<App>, Path(id): Path<u64>) -> Response {
    app.begun.fetch_add(1, Ordering::SeqCst);
    app.go_on.notified().await;
    id.to_string().into_response()
}

async fn until_begun(app: &App, count: usize) {
    eventually_async(SOON, "handlers run", async || app.begun.load(Ordering::SeqCst) >= count)
        .await;
}

/// In a process of its own: the shutdown is that of all pools.
#[test]
fn requests_are_served_within_the_grace_and_cancelled_after_it() {
    in_own_process(
        concat!(module_path!(), "::requests_are_served_within_the_grace_and_cancelled_after_it"),
        || {
            let runtime = multi_thread();
            runtime.block_on(async {
                for finishes in [true, false] {
                    stops_in_order(finishes).await;
                }
            });
        },
    );
}

async fn stops_in_order(finishes: bool) {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    lock_runtime::install("default", pool.clone()).unwrap();
    let app = App::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let routes = Router::new().route("/{id}", post(settle)).with_state(app.clone());
    let (signal, signalled) = oneshot::channel::<()>();
    let grace = if finishes { SOON } else { ms(300) };
    let serving = tokio::spawn(async move {
        let signalled = async { drop(signalled.await) };
        serve_until(signalled, grace, |stopped| {
            axum::serve(listener, routes).with_graceful_shutdown(stopped)
        })
        .await
    });
    // One holds the lock, and one waits for it.
    let first = tokio::spawn(http::post(address, "/7"));
    until_begun(&app, 1).await;
    let second = tokio::spawn(http::post(address, "/7"));
    until_queued_in_process(&server, &pool).await;
    signal.send(()).unwrap();
    eventually_async(SOON, "no connection is accepted", async || {
        TcpStream::connect(address).await.is_err()
    })
    .await;
    if finishes {
        app.go_on.notify_one();
        until_begun(&app, 2).await;
        app.go_on.notify_one();
    }
    let statuses = [first, second].map(|request| joined("a request", request));
    let [first, second] = statuses;
    let statuses = [first.await.unwrap().0, second.await.unwrap().0];
    let served = joined("the server", serving).await.unwrap();
    assert!(matches!(served.output, Some(Ok(()))), "{served:?}");
    assert_eq!(served.locks.abandoned, 0);
    if finishes {
        assert_eq!(statuses, [200, 200]);
    } else {
        // The body was cancelled, and the waiter was refused.
        let [internal, unavailable] =
            [StatusCode::INTERNAL_SERVER_ERROR, StatusCode::SERVICE_UNAVAILABLE];
        assert_eq!(statuses, [internal.as_u16(), unavailable.as_u16()]);
        assert_eq!(served.locks.released, 1);
    }
    assert_eq!(server.cli(&["EXISTS", "order:7"]), "0");
    assert!(pool.lock("order:7").acquire().await.is_err(), "the pool is shut down");
}

/// The second request waits for the first one of the same process: nothing of it is at the store.
async fn until_queued_in_process(server: &RedisServer, pool: &LockPool) {
    let request = pool.lock("order:7").wait(Duration::ZERO);
    drop(request.acquire().await);
    assert_eq!(server.cli(&["EXISTS", "order:7"]), "1");
    tokio::time::sleep(ms(100)).await;
}

/// Half of the requests are in the handler, half wait for its lock.
#[test]
fn a_request_that_times_out_gives_its_lock_back() {
    in_own_process(
        concat!(module_path!(), "::a_request_that_times_out_gives_its_lock_back"),
        || multi_thread().block_on(times_out()),
    );
}

async fn times_out() {
    /// Pairs of requests that are under way together, and how often.
    const PAIRS: usize = 50;
    const GROUPS: usize = 10;
    let server = RedisServer::start();
    let pool = lock_runtime::init(&server.url()).await.unwrap();
    let app = App::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let times_out = ServiceBuilder::new()
        .layer(HandleErrorLayer::new(async |_: BoxError| StatusCode::REQUEST_TIMEOUT))
        .layer(TimeoutLayer::new(ms(300)));
    let routes =
        Router::new().route("/{id}", post(settle)).layer(times_out).with_state(app.clone());
    let serving = tokio::spawn(async move { axum::serve(listener, routes).await });
    for group in 0..GROUPS {
        let mut requests = JoinSet::new();
        for pair in 0..PAIRS {
            let path = format!("/{}", group * PAIRS + pair);
            for path in [path.clone(), path] {
                requests.spawn(async move { http::post(address, &path).await });
            }
        }
        for response in within(SOON, "responses", requests.join_all()).await {
            assert_eq!(response.unwrap().0, StatusCode::REQUEST_TIMEOUT.as_u16());
        }
        until_nothing_is_left(&server).await;
    }
    let begun = app.begun.load(Ordering::SeqCst);
    println!("{} requests timed out, {begun} of them in the handler", 2 * PAIRS * GROUPS);
    assert!(begun >= PAIRS, "{begun} were in the handler");
    // Each task of a request has ended, so nothing holds a lock and nothing waits for one.
    let report = pool.shutdown(Duration::ZERO).await;
    assert_eq!((report.released, report.abandoned), (0, 0));
    serving.abort();
}

#[test]
fn a_server_that_ends_by_itself_is_followed_by_its_pools() {
    in_own_process(
        concat!(module_path!(), "::a_server_that_ends_by_itself_is_followed_by_its_pools"),
        || {
            current_thread().block_on(async {
                let pool = lock_runtime::init("memory://").await.unwrap();
                let served =
                    serve_until(std::future::pending(), SOON, |_| async { 7 }).await.unwrap();
                assert_eq!(served.output, Some(7));
                assert!(pool.lock("k").acquire().await.is_err());
            });
        },
    );
}

#[test]
fn a_server_that_does_not_end_is_dropped() {
    in_own_process(concat!(module_path!(), "::a_server_that_does_not_end_is_dropped"), || {
        current_thread().block_on(async {
            lock_runtime::init("memory://").await.unwrap();
            let (dropped, drops) = oneshot::channel::<()>();
            let server = |_| async move {
                let _dropped = dropped;
                std::future::pending::<()>().await;
            };
            let served = serve_until(async {}, ms(10), server).await.unwrap();
            assert_eq!(served.output, None);
            drops.await.unwrap_err();
        });
    });
}
