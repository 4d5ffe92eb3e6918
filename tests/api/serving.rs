//! `serve`: the server stops first, and its locks afterwards. Requests without a client leave nothing behind.

#![allow(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use actix_web::{HttpResponse, HttpServer, web};
use axum::error_handling::HandleErrorLayer;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{BoxError, Router};
use lock_runtime::web::serve_actix;
use lock_runtime::{LockError, LockPool, Served, distributed_lock, serve, serve_until};
use lock_tests::prelude::*;
use lock_tests::runtimes::{current_thread, multi_thread};
use lock_tests::{Latency, RedisServer, eventually_async, http, in_own_process};
use rustix::process::{Signal, getpid, kill_process};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tower::ServiceBuilder;
use tower::timeout::TimeoutLayer;

const SOON: Duration = ms(30_000);
/// From the end of a request to the end of its lock at the store, in a third of all rounds.
const PROMPT: Duration = ms(100);
/// The first of the orders with locks that another pool holds.
const FOREIGN: usize = 1_000_000;

#[derive(Clone, Default)]
struct App {
    begun: Arc<AtomicUsize>,
    /// How long each handler that has ended has run.
    ended: Arc<Mutex<Vec<Duration>>>,
    /// Handlers end from here on.
    finishes: watch::Sender<bool>,
}

impl App {
    async fn work(&self) {
        let _running = Running { since: Instant::now(), app: self };
        self.begun.fetch_add(1, Ordering::SeqCst);
        drop(self.finishes.subscribe().wait_for(|finishes| *finishes).await);
    }
}

struct Running<'a> {
    since: Instant,
    app: &'a App,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.app.ended.lock().unwrap().push(self.since.elapsed());
    }
}

#[distributed_lock(key = "order:<id>", wait = "60s")]
async fn settle(State(app): State<App>, Path(id): Path<u64>) -> Response {
    app.work().await;
    id.to_string().into_response()
}

#[distributed_lock(key = "order:<id>", wait = "60s")]
async fn settle_by_actix(app: web::Data<App>, id: web::Path<u64>) -> HttpResponse {
    app.work().await;
    HttpResponse::Ok().body(id.to_string())
}

/// Waits until `held` requests are in their handlers, and `waiting` wait for their locks.
async fn until_under_way(pool: &LockPool, held: usize, waiting: usize) {
    let count = || {
        let now = pool.snapshot();
        (now.held.len(), now.waiting.iter().map(|key| key.waiting).sum::<usize>())
    };
    let mut last = (0, 0);
    for _ in 0..SOON.as_millis() / 5 {
        last = count();
        if last == (held, waiting) {
            return;
        }
        tokio::time::sleep(ms(5)).await;
    }
    panic!("held and waiting: {last:?} instead of {:?}", (held, waiting));
}

/// Sends a request, and returns the connection.
async fn ask(address: SocketAddr, order: usize) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("POST /{order} HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

/// Waits until the requests of `pool` have neither locks nor waiters at the store, and returns the span since `ended`.
/// Waits also until nothing is left in the process.
async fn until_free(server: &RedisServer, pool: &LockPool, ended: Instant) -> Duration {
    let is_left = |key: &str| {
        let held_elsewhere = key.strip_prefix("order:").and_then(|order| order.parse().ok());
        key.starts_with("order:") && held_elsewhere.is_none_or(|order: usize| order < FOREIGN)
    };
    eventually_async(SOON, "neither locks nor waiters at the store", async || {
        !server.cli(&["KEYS", "*"]).lines().any(is_left)
    })
    .await;
    let took = ended.elapsed();
    until_under_way(pool, 0, 0).await;
    took
}

/// Shuts `pool` down, in which no task holds a lock or waits for one.
async fn end_unused(pool: &LockPool) {
    until_under_way(pool, 0, 0).await;
    // The answers to the last releases may be unread. They count as released.
    assert_eq!(pool.shutdown(Duration::ZERO).await.abandoned, 0);
}

/// Waits until the runtime has the tasks of a server and of a connection to the store, and none of a request.
async fn until_no_task_is_left() {
    const OTHERS: usize = 4;
    eventually_async(SOON, "no task is left", async || {
        Handle::current().metrics().num_alive_tasks() <= OTHERS
    })
    .await;
}

#[derive(Clone, Copy, Debug)]
enum Framework {
    Axum,
    Actix,
}

type Serving = JoinHandle<Result<Served<std::io::Result<()>>, LockError>>;

impl Framework {
    /// Serves until the sender is used.
    async fn serve(self, app: &App, grace: Duration) -> (SocketAddr, oneshot::Sender<()>, Serving) {
        let (stop, stopped) = oneshot::channel::<()>();
        let signalled = async { drop(stopped.await) };
        match self {
            Self::Axum => {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let address = listener.local_addr().unwrap();
                let routes = Router::new().route("/{id}", post(settle)).with_state(app.clone());
                let serving = serve_until(signalled, grace, |stopped| {
                    axum::serve(listener, routes).with_graceful_shutdown(stopped)
                });
                (address, stop, tokio::spawn(serving))
            }
            Self::Actix => {
                let app = web::Data::new(app.clone());
                let server = HttpServer::new(move || {
                    let routes = actix_web::App::new().app_data(app.clone());
                    routes.route("/{id}", web::post().to(settle_by_actix))
                });
                let server = server.workers(2).disable_signals().shutdown_timeout(60);
                let server = server.bind("127.0.0.1:0").unwrap();
                let address = server.addrs()[0];
                tokio::spawn(async {
                    signalled.await;
                    kill_process(getpid(), Signal::TERM).unwrap();
                });
                (address, stop, tokio::spawn(serve_actix(grace, server.run())))
            }
        }
    }
}

/// In a process of its own: the shutdown is that of all pools.
#[test]
fn requests_are_served_within_the_grace_and_cancelled_after_it() {
    in_own_process(
        concat!(module_path!(), "::requests_are_served_within_the_grace_and_cancelled_after_it"),
        || {
            let runtime = multi_thread();
            runtime.block_on(async {
                for framework in [Framework::Axum, Framework::Actix] {
                    for finishes in [true, false] {
                        stops_in_order(framework, finishes).await;
                    }
                }
            });
        },
    );
}

async fn stops_in_order(framework: Framework, finishes: bool) {
    /// Of each order, one request is in the handler, and all others wait.
    const ORDERS: usize = 8;
    const EACH: usize = 8;
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    lock_runtime::install("default", pool.clone()).unwrap();
    let app = App::default();
    let grace = if finishes { SOON } else { ms(300) };
    let (address, stop, serving) = framework.serve(&app, grace).await;
    let mut requests = JoinSet::new();
    for n in 0..ORDERS * EACH {
        let path = format!("/{}", n % ORDERS);
        requests.spawn(async move { http::post(address, &path).await.unwrap().0 });
    }
    until_under_way(&pool, ORDERS, ORDERS * (EACH - 1)).await;
    stop.send(()).unwrap();
    let stopped = Instant::now();
    let is_refused = async || TcpStream::connect(address).await.is_err();
    eventually_async(SOON, "no connection is accepted", is_refused).await;
    if finishes {
        assert_eq!(app.ended.lock().unwrap().len(), 0, "all requests have outlived the signal");
        app.finishes.send_replace(true);
    }
    let mut statuses = BTreeMap::<u16, usize>::new();
    for status in within(SOON, "responses", requests.join_all()).await {
        *statuses.entry(status).or_default() += 1;
    }
    let took = stopped.elapsed();
    let served = joined("the server", serving).await.unwrap();
    println!("{framework:?}: {statuses:?} within {took:?} of the signal");
    assert_eq!(served.locks.abandoned, 0);
    if finishes {
        assert_eq!(statuses, BTreeMap::from([(200, ORDERS * EACH)]));
        assert!(matches!(served.output, Some(Ok(()))), "{served:?}");
    } else {
        // Bodies were cancelled, and waiters were refused.
        let [internal, unavailable] =
            [StatusCode::INTERNAL_SERVER_ERROR, StatusCode::SERVICE_UNAVAILABLE];
        let refused = (unavailable.as_u16(), ORDERS * (EACH - 1));
        assert_eq!(statuses, BTreeMap::from([(internal.as_u16(), ORDERS), refused]));
        assert_eq!(served.locks.released, ORDERS);
    }
    assert!(is_refused().await, "still no connection is accepted");
    assert_eq!(server.cli(&["KEYS", "order:*"]), "");
    assert!(pool.lock("order:7").acquire().await.is_err(), "the pool is shut down");
    until_no_task_is_left().await;
}

/// Half of the requests are in the handler, half wait for its lock. Some more wait in the queue of the store.
#[test]
fn a_closed_socket_frees_its_lock_and_its_place_in_the_queue() {
    in_own_process(
        concat!(module_path!(), "::a_closed_socket_frees_its_lock_and_its_place_in_the_queue"),
        || multi_thread().block_on(closed_sockets()),
    );
}

async fn closed_sockets() {
    /// Pairs of requests that are under way together, and how often.
    const PAIRS: usize = 50;
    const GROUPS: usize = 20;
    const HELD_ELSEWHERE: usize = 5;
    let server = RedisServer::start();
    let pool = lock_runtime::init(&server.url()).await.unwrap();
    let elsewhere = LockPool::connect(&server.url()).await.unwrap();
    let foreign = FOREIGN..FOREIGN + HELD_ELSEWHERE;
    let held = elsewhere.lock_all(foreign.clone().map(|order| format!("order:{order}")));
    let held = held.acquire().await.unwrap();
    let app = App::default();
    let (address, _stop, serving) = Framework::Axum.serve(&app, SOON).await;
    let mut free = Latency::below(PROMPT, GROUPS.div_ceil(3));
    let mut closed = 0;
    while closed < PAIRS * GROUPS || free.wants_more() {
        let mut sockets = Vec::new();
        for order in (closed..closed + PAIRS).flat_map(|order| [order; 2]).chain(foreign.clone()) {
            sockets.push(ask(address, order).await);
        }
        until_under_way(&pool, PAIRS, PAIRS + HELD_ELSEWHERE).await;
        for order in foreign.clone() {
            until_queued(&server, &format!("order:{order}"), 1).await;
        }
        let ended = Instant::now();
        drop(sockets);
        free.push(until_free(&server, &pool, ended).await);
        until_no_task_is_left().await;
        closed += PAIRS;
    }
    // The socket of a holder may end before that of its waiter, which then enters for a moment.
    let begun = app.begun.load(Ordering::SeqCst);
    assert!(begun >= closed, "{begun} of {closed} were in the handler");
    assert_eq!(app.ended.lock().unwrap().len(), begun);
    println!(
        "{closed} sockets closed in the handler, as many while they waited: free after {free}"
    );
    held.release().await.unwrap();
    end_unused(&pool).await;
    serving.abort();
}

#[distributed_lock(key = "order:<id>", max_hold = "1s")]
async fn bounded(app: web::Data<App>, id: web::Path<u64>) -> HttpResponse {
    app.work().await;
    HttpResponse::Ok().body(id.to_string())
}

/// actix-web does not drop a handler when its client disconnects.
#[test]
fn an_actix_handler_outlives_its_client_for_max_hold() {
    in_own_process(
        concat!(module_path!(), "::an_actix_handler_outlives_its_client_for_max_hold"),
        || multi_thread().block_on(closed_sockets_of_actix()),
    );
}

async fn closed_sockets_of_actix() {
    const MAX_HOLD: Duration = ms(1_000);
    const TOGETHER: usize = 200;
    const CLOSED: usize = 1_000;
    let server = RedisServer::start();
    let pool = lock_runtime::init(&server.url()).await.unwrap();
    let app = App::default();
    let state = web::Data::new(app.clone());
    let actix = HttpServer::new(move || {
        let routes = actix_web::App::new().app_data(state.clone());
        routes.route("/{id}", web::post().to(bounded))
    });
    let actix = actix.workers(2).disable_signals().bind("127.0.0.1:0").unwrap();
    let address = actix.addrs()[0];
    let actix = actix.run();
    let (handle, serving) = (actix.handle(), tokio::spawn(actix));
    let mut free = Latency::below(MAX_HOLD + PROMPT, (CLOSED / TOGETHER).div_ceil(3));
    let mut closed = 0;
    while closed < CLOSED || free.wants_more() {
        let mut sockets = Vec::new();
        for order in closed..closed + TOGETHER {
            sockets.push(ask(address, order).await);
        }
        closed += TOGETHER;
        eventually_async(SOON, "all are in the handler, or were", async || {
            app.begun.load(Ordering::SeqCst) == closed
        })
        .await;
        let ended = Instant::now();
        drop(sockets);
        free.push(until_free(&server, &pool, ended).await);
    }
    let least = app.ended.lock().unwrap().iter().min().copied();
    println!("{closed} sockets closed in actix handlers, which ran {least:?} or longer: {free}");
    // The margin of a cancellation is a part of it.
    assert!(least.is_some_and(|least| least > MAX_HOLD / 2), "{least:?}");
    assert_eq!(app.ended.lock().unwrap().len(), closed);
    handle.stop(false).await;
    joined("the server", serving).await.unwrap();
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
    let mut free = Latency::below(PROMPT, GROUPS.div_ceil(3));
    let mut group = 0;
    while group < GROUPS || free.wants_more() {
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
        free.push(until_free(&server, &pool, Instant::now()).await);
        until_no_task_is_left().await;
        group += 1;
    }
    let begun = app.begun.load(Ordering::SeqCst);
    let requests = 2 * PAIRS * group;
    println!("{requests} requests timed out, {begun} in the handler; all free after {free}");
    assert!(begun >= PAIRS, "{begun} were in the handler");
    until_nothing_is_left(&server).await;
    end_unused(&pool).await;
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
fn a_second_signal_ends_the_grace_of_work_that_is_not_the_servers() {
    in_own_process(
        concat!(module_path!(), "::a_second_signal_ends_the_grace_of_work_that_is_not_the_servers"),
        || current_thread().block_on(is_stopped_by_a_second_signal()),
    );
}

async fn is_stopped_by_a_second_signal() {
    // A server that ends by itself begins the shutdown: the first signal ends its grace. It comes before the case that sends several.
    for waits_for_the_first in [false, true] {
        let pool = lock_runtime::init("memory://").await.unwrap();
        let held = pool.lock("k").acquire().await.unwrap();
        let (begins, begun) = oneshot::channel();
        let serving = tokio::spawn(serve(10 * DEADLINE, move |stopped| async move {
            begins.send(()).unwrap();
            if waits_for_the_first {
                stopped.await;
            }
        }));
        within(DEADLINE, "the server begins", begun).await.unwrap();
        if waits_for_the_first {
            kill_process(getpid(), Signal::TERM).unwrap();
        }
        eventually_async(DEADLINE, "the pool shuts down", async || {
            pool.lock("k").try_acquire().await.is_err()
        })
        .await;
        assert!(held.is_held() && !serving.is_finished());
        kill_process(getpid(), Signal::TERM).unwrap();
        eventually_async(DEADLINE, "the grace ends", async || {
            // Signals that are sent at once may arrive as one.
            if waits_for_the_first {
                kill_process(getpid(), Signal::TERM).unwrap();
            }
            serving.is_finished()
        })
        .await;
        assert_eq!(joined("the server", serving).await.unwrap().locks.released, 1);
        assert!(!held.is_held());
    }
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
