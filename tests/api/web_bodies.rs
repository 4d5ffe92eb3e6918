//! The end of a response with `until_body_end`: the client that has all of it finds the lock free.

#![allow(clippy::disallowed_methods)]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::body::{BodySize, MessageBody};
use actix_web::{HttpResponse, HttpServer, web};
use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::{HeaderMap, Request, Response, StatusCode};
use axum::response::IntoResponse;
use axum::routing::get;
use http_body::{Body as _, Frame};
use lock_runtime::LockPool;
use lock_runtime::testing::{Fault, Operation};
use lock_runtime::web::{LockLayer, LockMiddleware};
use lock_tests::RedisServer;
use lock_tests::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tower::ServiceExt;

const SOON: Duration = ms(30_000);
/// How long a release takes at the store of a test.
const SLOW: Duration = ms(60);

/// A body of frames that are all there.
#[derive(Debug, Default)]
struct Frames {
    parts: Vec<&'static str>,
    trailers: Option<HeaderMap>,
    /// Whether the body tells at its last frame that no other follows.
    tells_end: bool,
    /// In place of the last part.
    panics: bool,
}

impl Frames {
    fn of(parts: &[&'static str]) -> Self {
        Self { parts: parts.iter().rev().copied().collect(), ..Self::default() }
    }
}

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(part) = self.parts.pop() else {
            return Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))));
        };
        assert!(!(self.panics && self.parts.is_empty()), "a bug in a stream");
        Poll::Ready(Some(Ok(Frame::data(part.into()))))
    }
    fn is_end_stream(&self) -> bool {
        self.tells_end && self.parts.is_empty() && self.trailers.is_none()
    }
}

impl MessageBody for Frames {
    type Error = Infallible;
    fn size(&self) -> BodySize {
        BodySize::Stream
    }
    fn poll_next(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Infallible>>> {
        Poll::Ready(self.parts.pop().map(|part| Ok(part.into())))
    }
}

fn lock(pool: &LockPool) -> LockLayer {
    LockLayer::new(|_| "k").pool(pool).wait(Duration::ZERO).until_body_end()
}

async fn axum_serves(routes: Router) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, routes).await.unwrap() });
    address
}

/// Sends a request and reads its response, to the last byte and no further.
async fn exchange(stream: &mut TcpStream, method: &str, path: &str) -> (u16, String) {
    let request = format!("{method} {path} HTTP/1.1\r\nhost: h\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    loop {
        let mut byte = [0];
        assert_eq!(stream.read(&mut byte).await.unwrap(), 1, "{text}");
        text.push(byte[0].into());
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let head = head.to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let is_whole = match length {
            _ if method == "HEAD" || status == 204 => true,
            Some(length) => body.len() == length.parse::<usize>().unwrap(),
            None => body.ends_with("0\r\n\r\n"),
        };
        if is_whole {
            return (status, head);
        }
    }
}

const PATHS: [(&str, &str); 6] = [
    ("GET", "/text"),
    ("GET", "/told"),
    ("GET", "/stream"),
    ("GET", "/none"),
    ("HEAD", "/text"),
    ("HEAD", "/stream"),
];

/// Requests one after the other, on one connection and on another: all have the lock.
async fn follow_each_other(
    address: SocketAddr,
    plan_slow_release: impl Fn(),
    paths: &[(&str, &str)],
) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    for (method, path) in paths {
        for round in 0..4 {
            if round == 2 {
                stream = TcpStream::connect(address).await.unwrap();
            }
            plan_slow_release();
            let answer = exchange(&mut stream, method, path);
            let (status, head) = within(SOON, path, answer).await;
            assert!([200, 204].contains(&status), "{method} {path} {round}: {head}");
            if *path == "/text" {
                assert!(head.contains("content-length: 4"), "{method} {head}");
            }
        }
    }
}

#[tokio::test]
async fn a_client_with_the_whole_response_finds_the_lock_free() {
    let (pool, faults) = on_virtual_time("memory://", |builder| builder).await;
    let told = || async { Body::new(Frames { tells_end: true, ..Frames::of(&["a", "b"]) }) };
    let routes = Router::new()
        .route("/text", get(async || "text"))
        .route("/told", get(told))
        .route("/stream", get(async || Body::new(Frames::of(&["a", "b"]))))
        .route("/none", get(async || StatusCode::NO_CONTENT))
        .route_layer(lock(&pool));
    let slow = || faults.plan(Operation::Release, Fault::DelayRequest(SLOW));
    follow_each_other(axum_serves(routes).await, slow, &PATHS).await;
}

#[actix_web::test]
async fn a_client_with_the_whole_actix_response_finds_the_lock_free() {
    let (pool, faults) = on_virtual_time("memory://", |builder| builder).await;
    let lock = LockMiddleware::new(|_| "k").pool(&pool).wait(Duration::ZERO).until_body_end();
    let server = HttpServer::new(move || {
        let stream = async || HttpResponse::Ok().body(Frames::of(&["a", "b"]));
        actix_web::App::new()
            .wrap(lock.clone())
            .route("/text", web::get().to(async || "text"))
            .route("/text", web::head().to(async || "text"))
            .route("/told", web::get().to(async || "told"))
            .route("/stream", web::get().to(stream))
            .route("/stream", web::head().to(stream))
            .route("/none", web::get().to(async || HttpResponse::NoContent()))
    });
    let server = server.workers(2).disable_signals().bind("127.0.0.1:0").unwrap();
    let address = server.addrs()[0];
    let server = server.run();
    let handle = server.handle();
    let serving = tokio::spawn(server);
    let slow = || faults.plan(Operation::Release, Fault::DelayRequest(SLOW));
    follow_each_other(address, slow, &PATHS).await;
    handle.stop(false).await;
    joined("the server", serving).await.unwrap();
}

async fn response(pool: &LockPool, body: Frames) -> Response<Body> {
    let body = Arc::new(Mutex::new(Some(Body::new(body))));
    let handler = move || async move { body.lock().unwrap().take().unwrap().into_response() };
    let routes = Router::new().route("/", get(handler).route_layer(lock(pool)));
    routes.oneshot(Request::get("/").body(Body::empty()).unwrap()).await.unwrap()
}

/// The time of the test passes only while all tasks wait.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_body_waits_for_the_release_at_most_for_two_request_timeouts() {
    let paused =
        |builder: lock_runtime::PoolBuilder| builder.request_timeout(ms(1_000)).ttl(ms(20_000));
    for (fault, least, most) in
        [(Fault::DelayRequest(ms(700)), 700, 800), (Fault::DelayRequest(ms(8_000)), 2_000, 2_100)]
    {
        for tells_end in [false, true] {
            let (pool, faults) = on_virtual_time("memory://", paused).await;
            for _ in 0..8 {
                faults.plan(Operation::Release, fault);
            }
            let body = Frames { tells_end, ..Frames::of(&["one", "two"]) };
            let response = response(&pool, body).await;
            let began = Instant::now();
            assert_eq!(to_bytes(response.into_body(), 100).await.unwrap(), "onetwo");
            let took = began.elapsed();
            assert!((ms(least)..ms(most)).contains(&took), "{fault:?} {tells_end}: {took:?}");
            // Given up or not, the release is repeated.
            drop(pool.lock("k").wait(SOON).acquire().await.unwrap());
        }
    }
}

#[tokio::test]
async fn a_body_with_a_last_frame_is_over_when_that_frame_is_there() {
    let (pool, faults) = on_virtual_time("memory://", |builder| builder).await;
    let mut trailers = HeaderMap::new();
    trailers.insert("a", "b".parse().unwrap());
    for trailers in [None, Some(trailers)] {
        faults.plan(Operation::Release, Fault::DelayRequest(SLOW));
        let has_trailers = trailers.is_some();
        let body = Frames { tells_end: !has_trailers, trailers, ..Frames::of(&["one", "two"]) };
        let mut body = response(&pool, body).await.into_body();
        let mut last = None;
        while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await
        {
            last = Some((frame.unwrap(), body.is_end_stream()));
        }
        let (frame, was_over) = last.unwrap();
        assert!(was_over && body.is_end_stream());
        assert_eq!(body.size_hint().exact(), Some(0));
        match frame.into_data() {
            Ok(data) => assert!(!has_trailers && data == "two"),
            Err(frame) => assert!(has_trailers && frame.trailers_ref().unwrap()["a"] == "b"),
        }
        pool.lock("k").wait(Duration::ZERO).acquire().await.unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn a_body_that_is_dropped_while_it_waits_for_the_release_leaves_the_release_going_on() {
    let (pool, faults) = on_virtual_time("memory://", |builder| builder).await;
    faults.plan(Operation::Release, Fault::DelayRequest(SLOW));
    let mut body = response(&pool, Frames::of(&["one"])).await.into_body();
    let mut poll = |cx: &mut Context<'_>| Pin::new(&mut body).poll_frame(cx);
    assert!(std::future::poll_fn(&mut poll).await.unwrap().unwrap().is_data());
    let mut cx = Context::from_waker(std::task::Waker::noop());
    assert!(poll(&mut cx).is_pending());
    assert!(poll(&mut cx).is_pending());
    assert!(!body.is_end_stream());
    drop(body);
    pool.lock("k").wait(SOON).acquire().await.unwrap().release().await.unwrap();
    assert_eq!(faults.count(Operation::Release), 2);
}

#[tokio::test]
async fn a_panic_of_a_body_releases_its_lock() {
    let pool = memory().await;
    let body = Frames { panics: true, ..Frames::of(&["one", "two"]) };
    let body = response(&pool, body).await.into_body();
    let reading = tokio::spawn(to_bytes(body, 100));
    assert!(within(SOON, "the panic", reading).await.unwrap_err().is_panic());
    pool.lock("k").wait(SOON).acquire().await.unwrap().release().await.unwrap();
}

/// A response body that blocks its thread, in a part or in its drop.
struct Blocks {
    blocked: mpsc::Receiver<()>,
    in_drop: bool,
}

impl http_body::Body for Blocks {
    type Data = Bytes;
    type Error = Infallible;
    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if !self.in_drop {
            let _ = self.blocked.recv();
        }
        Poll::Pending
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        if self.in_drop {
            let _ = self.blocked.recv();
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum BlocksIn {
    Handler,
    DropOfHandler,
    Part,
    DropOfBody,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_frees_no_lock_under_a_thread_in_a_handler_or_a_body() {
    for place in [BlocksIn::Handler, BlocksIn::DropOfHandler, BlocksIn::Part, BlocksIn::DropOfBody]
    {
        let server = RedisServer::start();
        let pool = LockPool::connect(&server.url()).await.unwrap();
        let (unblock, blocked) = mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(Some(blocked)));
        let (entered, mut is_inside) = tokio::sync::mpsc::unbounded_channel();
        let handler = move || {
            let (blocked, entered) = (blocked.clone(), entered.clone());
            async move {
                let blocked = blocked.lock().unwrap().take().unwrap();
                let in_drop = matches!(place, BlocksIn::DropOfHandler | BlocksIn::DropOfBody);
                let blocks = Blocks { blocked, in_drop };
                entered.send(()).unwrap();
                match place {
                    BlocksIn::Handler => drop(blocks.blocked.recv()),
                    BlocksIn::DropOfHandler => std::future::pending().await,
                    BlocksIn::Part | BlocksIn::DropOfBody => {}
                }
                Response::new(Body::new(blocks))
            }
        };
        let routes = Router::new().route("/", get(handler).route_layer(lock(&pool)));
        let request = Request::get("/").body(Body::empty()).unwrap();
        let served = tokio::spawn(async move {
            let response = routes.oneshot(request).await.unwrap();
            to_bytes(response.into_body(), usize::MAX).await
        });
        within(SOON, "the handler runs", is_inside.recv()).await.unwrap();
        let report = within(SOON, "the shutdown", pool.shutdown(ms(50))).await;
        assert_eq!((report.released, report.abandoned), (0, 1), "{place:?}");
        assert_eq!(server.cli(&["EXISTS", "k"]), "1", "{place:?}");
        drop(unblock);
        let _ = within(SOON, "the response ends", served).await.unwrap();
    }
}
