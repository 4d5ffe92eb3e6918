//! `serve`: the server stops first, and its locks afterwards.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use lock_runtime::{LockPool, distributed_lock, serve_until};
use lock_tests::prelude::*;
use lock_tests::runtimes::{current_thread, multi_thread};
use lock_tests::{RedisServer, eventually_async, in_own_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, oneshot};

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

async fn post_to(address: std::net::SocketAddr, path: &str) -> std::io::Result<u16> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("POST {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    status.ok_or_else(|| std::io::Error::other(format!("no response: {text:?}")))
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
    let first = tokio::spawn(post_to(address, "/7"));
    until_begun(&app, 1).await;
    let second = tokio::spawn(post_to(address, "/7"));
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
    let statuses = [first.await.unwrap(), second.await.unwrap()];
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
