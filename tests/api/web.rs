//! Routes behind a lock, and the responses for errors, of axum and actix-web.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::body::{BodySize, MessageBody};
use actix_web::http::header;
use actix_web::{HttpResponse, ResponseError, web};
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Path, Query};
use axum::http::{HeaderMap, Request, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use lock_runtime::testing::with_pool;
use lock_runtime::web::{LockLayer, LockMiddleware};
use lock_runtime::{Fence, FromLockError, LockError, LockPool, Problem, distributed_lock};
use lock_tests::RedisServer;
use lock_tests::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tower::{Service, ServiceBuilder, ServiceExt};

const SOON: Duration = ms(20_000);

fn to(path: &str) -> Request<Body> {
    Request::builder().uri(path).body(Body::empty()).unwrap()
}

async fn sent(routes: &Router, path: &str) -> (StatusCode, HeaderMap, String) {
    let response = within(SOON, path, routes.clone().oneshot(to(path))).await.unwrap();
    let (head, body) = response.into_parts();
    let body = to_bytes(body, 1 << 20).await.unwrap();
    (head.status, head.headers, String::from_utf8(body.to_vec()).unwrap())
}

async fn is_free(pool: &LockPool, key: &'static str) -> bool {
    match pool.lock(key).try_acquire().await.unwrap() {
        Some(guard) => {
            guard.release().await.unwrap();
            true
        }
        None => false,
    }
}

async fn until_free(pool: &LockPool, key: &'static str) {
    lock_tests::eventually_async(SOON, "the lock is free", async || is_free(pool, key).await).await;
}

#[distributed_lock(key = "order:<id>", wait = "0s")]
async fn settle(Path(id): Path<u64>) -> Result<String, LockError> {
    Ok(format!("settled {id}"))
}

#[distributed_lock(key = "order:<id>", wait = "0s")]
async fn report(Path(id): Path<u64>) -> Response {
    id.to_string().into_response()
}

#[distributed_lock(key = "order:<id>", wait = "0s")]
async fn cancel(Path(id): Path<u64>) -> Result<String, Response> {
    Ok(format!("cancelled {id}"))
}

/// The `?` of a lock error.
async fn refund(Path(id): Path<u64>) -> Result<String, Response> {
    Ok(settle(Path(id)).await?)
}

#[distributed_lock(key = "order:<id>", wait = "0s")]
async fn ship(Path(id): Path<u64>) -> Result<String, StatusCode> {
    Ok(format!("shipped {id}"))
}

#[tokio::test]
async fn an_error_of_a_handler_is_a_problem_without_details() {
    let pool = memory().await;
    with_pool("default", pool.clone(), async {
        let routes = Router::new()
            .route("/settle/{id}", get(settle))
            .route("/report/{id}", get(report))
            .route("/cancel/{id}", get(cancel))
            .route("/refund/{id}", get(refund))
            .route("/ship/{id}", get(ship));
        let held = pool.lock("order:42").acquire().await.unwrap();
        for path in ["/settle/42", "/report/42", "/cancel/42", "/refund/42"] {
            let (status, headers, body) = sent(&routes, path).await;
            assert_eq!(status, StatusCode::CONFLICT, "{path}");
            assert_eq!(headers["content-type"], Problem::MEDIA_TYPE);
            assert_eq!(headers["retry-after"], "1");
            let problem: serde_json::Value = serde_json::from_str(&body).unwrap();
            assert_eq!((&problem["status"], &problem["title"]), (&409.into(), &"Conflict".into()));
            for detail in ["order", "42", "memory", "default", "wait"] {
                assert!(!body.contains(detail), "{detail}: {body}");
            }
        }
        // A status has neither document nor headers.
        let (status, headers, body) = sent(&routes, "/ship/42").await;
        assert_eq!((status, &*body), (StatusCode::CONFLICT, ""));
        assert!(!headers.contains_key("retry-after"));
        held.release().await.unwrap();
        assert_eq!(sent(&routes, "/settle/42").await.2, "settled 42");
        assert_eq!(sent(&routes, "/report/42").await.2, "42");
        assert_eq!(sent(&routes, "/ship/42").await.2, "shipped 42");
    })
    .await;
}

#[derive(serde::Deserialize)]
struct Named {
    name: String,
}

#[distributed_lock(key = "order:<named.name>", wait = "0s")]
async fn named(Query(named): Query<Named>) -> Result<String, LockError> {
    Ok(named.name)
}

#[distributed_lock(key = "order:<id>", wait = "20s")]
async fn patient(Path(id): Path<u64>) -> Response {
    id.to_string().into_response()
}

#[distributed_lock(key = "order:<id>", max_hold = "20ms")]
async fn endless(Path(id): Path<u64>) -> Result<String, LockError> {
    std::future::pending::<()>().await;
    Ok(id.to_string())
}

/// The handlers above, of actix-web.
mod by_actix {
    use super::*;

    #[distributed_lock(key = "order:<id>", wait = "0s")]
    pub(super) async fn settle(id: web::Path<u64>) -> Result<String, LockError> {
        Ok(format!("settled {id}"))
    }

    #[distributed_lock(key = "order:<named.name>", wait = "0s")]
    pub(super) async fn named(named: web::Query<Named>) -> Result<String, LockError> {
        Ok(named.into_inner().name)
    }

    #[distributed_lock(key = "order:<id>", wait = "20s")]
    pub(super) async fn patient(id: web::Path<u64>) -> HttpResponse {
        HttpResponse::Ok().body(id.to_string())
    }

    #[distributed_lock(key = "order:<id>", max_hold = "20ms")]
    pub(super) async fn endless(id: web::Path<u64>) -> Result<String, LockError> {
        std::future::pending::<()>().await;
        Ok(id.to_string())
    }
}

/// What the client is told of an error, in each of its forms.
#[actix_web::test]
async fn each_error_has_its_status_and_no_details() {
    let server = RedisServer::start();
    let pool = LockPool::builder(server.url()).max_waiters(1).connect().await.unwrap();
    let port = server.port().to_string();
    // Of keys, of the store, of settings, and of what an error tells a programmer.
    let details = [
        "order",
        "77123",
        "lock",
        "pool",
        "default",
        "redis",
        "127.0.0.1",
        &port,
        "ttl",
        "max_",
        "waiters",
        "builder",
        "check ",
        "raise ",
        "`",
        "::",
    ];
    let layer = LockLayer::for_path("order:<id>").wait(Duration::ZERO);
    let routes = Router::new()
        .route("/settle/{id}", get(settle))
        .route("/patient/{id}", get(patient))
        .route("/endless/{id}", get(endless))
        .route("/named", get(named))
        .route("/route/{id}", get(async || "").route_layer(layer));
    let middleware = LockMiddleware::for_path("order:<id>").wait(Duration::ZERO);
    let app = actix_web::App::new()
        .route("/settle/{id}", web::get().to(by_actix::settle))
        .route("/patient/{id}", web::get().to(by_actix::patient))
        .route("/endless/{id}", web::get().to(by_actix::endless))
        .route("/named", web::get().to(by_actix::named))
        .service(web::resource("/route/{id}").wrap(middleware).to(async || ""));
    let app = actix_web::test::init_service(app).await;
    let refused = async |path: &str, status: u16| {
        let (of_axum, headers, body) = sent(&routes, path).await;
        let of_actix = actix_web::test::call_service(&app, to_actix(path).to_request()).await;
        assert_eq!((of_axum.as_u16(), of_actix.status().as_u16()), (status, status), "{path}");
        let passes = [409, 429, 503].contains(&status).then_some("1");
        let text = |value: Option<&[u8]>| value.map(|it| String::from_utf8(it.to_vec()).unwrap());
        let of_actix_header = |name| text(of_actix.headers().get(name).map(|it| it.as_bytes()));
        assert_eq!(headers.get("retry-after").map(|it| it.to_str().unwrap()), passes, "{path}");
        assert_eq!(of_actix_header("retry-after").as_deref(), passes, "{path}");
        assert_eq!(headers["content-type"], Problem::MEDIA_TYPE);
        assert_eq!(of_actix_header("content-type").as_deref(), Some(Problem::MEDIA_TYPE));
        let actix_body = actix_web::test::read_body(of_actix).await;
        assert_eq!(text(Some(&actix_body[..])).as_ref(), Some(&body), "{path}");
        let problem: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(problem["status"], status);
        for detail in details {
            assert!(!body.contains(detail), "{detail:?} in {body}");
        }
    };
    with_pool("default", pool.clone(), async {
        let held = pool.lock("order:77123").acquire().await.unwrap();
        for path in ["/settle/77123", "/route/77123"] {
            refused(path, 409).await;
        }
        let waiting = tokio::spawn(pool.lock("order:77123").wait(SOON).acquire());
        lock_tests::eventually_async(SOON, "one waits", async || {
            !pool.snapshot().waiting.is_empty()
        })
        .await;
        refused("/patient/77123", 429).await;
        held.release().await.unwrap();
        joined("the waiter", waiting).await.unwrap().release().await.unwrap();
        refused("/named?name=", 400).await;
        refused("/endless/77123", 500).await;
        server.kill();
        for path in ["/settle/77123", "/route/77123"] {
            refused(path, 503).await;
        }
        pool.shutdown(Duration::ZERO).await;
        for path in ["/settle/77123", "/route/77123"] {
            refused(path, 503).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_pool_changes_its_problems() {
    let pool = LockPool::builder("memory://").problem(|error, mut problem| {
        if error.is_conflict() {
            problem.status = 423;
            problem.title = "\"Locked\"".into();
            problem.retry_after = None;
        }
        problem
    });
    let pool = pool.connect().await.unwrap();
    lock_runtime::install("changed", pool.clone()).unwrap();
    let _held = pool.lock("k").acquire().await.unwrap();
    let error = pool.lock("k").wait(Duration::ZERO).acquire().await.unwrap_err();
    let response = error.clone().into_response();
    assert_eq!(response.status(), StatusCode::LOCKED);
    assert!(!response.headers().contains_key("retry-after"));
    let of_actix = error.error_response();
    assert_eq!(of_actix.status().as_u16(), 423);
    let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(problem["title"], "\"Locked\"");
}

#[tokio::test]
async fn a_route_runs_only_under_its_lock() {
    let pool = memory().await;
    let (inside, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let fences = Arc::<Mutex<Vec<Fence>>>::default();
    let handler = {
        let (inside, most, fences) = (inside.clone(), most.clone(), fences.clone());
        move |Extension(fence): Extension<Fence>| async move {
            most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            fences.lock().unwrap().push(fence);
            tokio::task::yield_now().await;
            inside.fetch_sub(1, Ordering::SeqCst);
        }
    };
    let lock = LockLayer::for_path("order:<tenant>:<id>").pool(&pool).wait(SOON);
    let routes = Router::new().route("/{tenant}/orders/{id}", post(handler).layer(lock));
    let requests = (0..50).map(|_| {
        let request = Request::post("/t%3A1/orders/7").body(Body::empty()).unwrap();
        tokio::spawn(routes.clone().oneshot(request))
    });
    for request in requests.collect::<Vec<_>>() {
        let response = joined("a request", request).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
    }
    assert_eq!(most.load(Ordering::SeqCst), 1);
    let mut fences = std::mem::take(&mut *fences.lock().unwrap());
    assert!(fences.is_sorted());
    fences.dedup();
    assert_eq!(fences.len(), 50);
    // The value of a parameter is escaped as in the attribute.
    let _held = pool.lock("order:t%3A1:7").acquire().await.unwrap();
    let lock = LockLayer::for_path("order:<tenant>:<id>").pool(&pool).wait(Duration::ZERO);
    let routes = Router::new().route("/{tenant}/orders/{id}", get(async || "").layer(lock));
    assert_eq!(sent(&routes, "/t%3A1/orders/7").await.0, StatusCode::CONFLICT);
    assert_eq!(sent(&routes, "/t%3A1/orders/8").await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_route_without_the_parameter_is_an_error_of_the_program() {
    let pool = memory().await;
    let lock = LockLayer::for_path("order:<id>").pool(&pool);
    let routes = Router::new().route("/{name}", get(async || "").layer(lock));
    let (status, _, body) = sent(&routes, "/x").await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(!body.contains("id"), "{body}");
}

/// The handler may mean the other one.
#[tokio::test]
async fn a_route_with_two_parameters_of_one_name_is_an_error_of_the_program() {
    let pool = memory().await;
    let lock = LockLayer::for_path("order:<id>").pool(&pool);
    let orders = Router::new().route("/orders/{id}", get(async || "").layer(lock));
    let routes = Router::new().nest("/tenants/{id}", orders);
    let (status, _, _) = sent(&routes, "/tenants/1/orders/7").await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test]
async fn a_key_may_be_computed_from_the_head_of_the_request() {
    let pool = memory().await;
    let lock =
        LockLayer::new(|head| format!("tenant:{}", head.headers["tenant"].to_str().unwrap()));
    let lock = lock.pool(&pool).wait(Duration::ZERO).fencing(false);
    let has_fence = async |fence: Option<Extension<Fence>>| fence.is_some().to_string();
    let routes = Router::new().route("/", get(has_fence)).layer(lock);
    let _held = pool.lock("tenant:a").acquire().await.unwrap();
    for (tenant, status) in [("a", StatusCode::CONFLICT), ("b", StatusCode::OK)] {
        let request = Request::get("/").header("tenant", tenant).body(Body::empty()).unwrap();
        let response = routes.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), status, "{tenant}");
        if status == StatusCode::OK {
            assert_eq!(to_bytes(response.into_body(), 100).await.unwrap(), "false");
        }
    }
}

/// It would pass for the fence of the inner lock.
#[actix_web::test]
async fn a_lock_without_a_fence_hides_that_of_a_lock_around_it() {
    let pool = memory().await;
    for fencing in [false, true] {
        let outer = LockLayer::new(|_| "tenant").pool(&pool);
        let inner = LockLayer::new(|_| "order").pool(&pool).fencing(fencing);
        let has_fence = async |fence: Option<Extension<Fence>>| fence.is_some().to_string();
        let handler = get(has_fence).route_layer(inner).route_layer(outer);
        let routes = Router::new().route("/", handler);
        assert_eq!(sent(&routes, "/").await.2, fencing.to_string());

        let outer = LockMiddleware::new(|_| "tenant").pool(&pool);
        let inner = LockMiddleware::new(|_| "order").pool(&pool).fencing(fencing);
        let has_fence = async |fence: Option<web::ReqData<Fence>>| fence.is_some().to_string();
        let resource = web::resource("/").wrap(inner).wrap(outer).to(has_fence);
        let app = actix_web::test::init_service(actix_web::App::new().service(resource)).await;
        let body = actix_web::test::call_and_read_body(&app, to_actix("/").to_request()).await;
        assert_eq!(body, fencing.to_string());
    }
}

#[test]
#[should_panic(expected = "`order:<order.id>` of a route is invalid: `<order.id>` is not the name")]
fn an_invalid_template_ends_the_program_when_it_starts() {
    let _ = LockLayer::for_path("order:<order.id>");
}

/// A body of parts that a test sends.
struct Parts(tokio::sync::mpsc::Receiver<&'static str>);

fn streamed() -> (tokio::sync::mpsc::Sender<&'static str>, Parts) {
    let (sender, parts) = tokio::sync::mpsc::channel(8);
    (sender, Parts(parts))
}

impl http_body::Body for Parts {
    type Data = Bytes;
    type Error = std::convert::Infallible;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        let frame = |part: &'static str| Ok(http_body::Frame::data(part.into()));
        self.0.poll_recv(cx).map(|part| part.map(frame))
    }
}

/// A body that does not end.
struct Endless(tokio::time::Interval);

impl MessageBody for Endless {
    type Error = std::convert::Infallible;
    fn size(&self) -> BodySize {
        BodySize::Stream
    }
    fn poll_next(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        self.0.poll_tick(cx).map(|_| Some(Ok("part".into())))
    }
}

impl MessageBody for Parts {
    type Error = std::convert::Infallible;
    fn size(&self) -> BodySize {
        BodySize::Stream
    }
    fn poll_next(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        self.0.poll_recv(cx).map(|part| part.map(|part| Ok(part.into())))
    }
}

/// An empty body that records how many locks its pool holds as it is dropped.
struct CountsHeld(LockPool, Arc<AtomicUsize>);

impl Drop for CountsHeld {
    fn drop(&mut self) {
        self.1.store(self.0.snapshot().held.len(), Ordering::SeqCst);
    }
}

impl http_body::Body for CountsHeld {
    type Data = Bytes;
    type Error = std::convert::Infallible;
    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        Poll::Ready(None)
    }
}

impl MessageBody for CountsHeld {
    type Error = std::convert::Infallible;
    fn size(&self) -> BodySize {
        BodySize::Stream
    }
    fn poll_next(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        Poll::Ready(None)
    }
}

/// The service of a route whose response is a stream, and the sender of its parts.
fn streaming(
    pool: &LockPool,
    lock: impl Fn(LockLayer) -> LockLayer,
) -> (tokio::sync::mpsc::Sender<&'static str>, Router) {
    let (sender, body) = streamed();
    let body = Arc::new(Mutex::new(Some(Body::new(body))));
    let handler = move || async move { body.lock().unwrap().take().unwrap() };
    let lock = lock(LockLayer::new(|_| "stream").pool(pool));
    (sender, Router::new().route("/", get(handler).layer(lock)))
}

#[tokio::test]
async fn a_lock_lasts_until_the_response_is_sent_if_the_layer_says_so() {
    let pool = memory().await;
    let (parts, routes) = streaming(&pool, LockLayer::until_body_end);
    let response = routes.oneshot(to("/")).await.unwrap();
    assert!(!is_free(&pool, "stream").await);
    parts.send("one").await.unwrap();
    parts.send("two").await.unwrap();
    drop(parts);
    assert_eq!(to_bytes(response.into_body(), 100).await.unwrap(), "onetwo");
    until_free(&pool, "stream").await;

    let (parts, routes) = streaming(&pool, LockLayer::until_body_end);
    let response = routes.oneshot(to("/")).await.unwrap();
    assert!(!is_free(&pool, "stream").await);
    drop(response);
    until_free(&pool, "stream").await;
    assert!(parts.is_closed());

    let (_parts, routes) = streaming(&pool, |lock| lock);
    let _response = routes.oneshot(to("/")).await.unwrap();
    assert!(is_free(&pool, "stream").await, "released when the handler has returned");
}

/// What a stream uses under the lock ends before the release.
#[actix_web::test]
async fn a_response_that_has_been_sent_is_dropped_before_the_release() {
    let pool = memory().await;
    let lock = LockLayer::new(|_| "k").pool(&pool).until_body_end();
    let held = Arc::new(AtomicUsize::new(0));
    let body = CountsHeld(pool.clone(), held.clone());
    let body = Arc::new(Mutex::new(Some(Body::new(body))));
    let handler = move || async move { body.lock().unwrap().take().unwrap() };
    let routes = Router::new().route("/", get(handler).layer(lock));
    let response = routes.oneshot(to("/")).await.unwrap();
    assert!(to_bytes(response.into_body(), 100).await.unwrap().is_empty());
    assert_eq!(held.swap(0, Ordering::SeqCst), 1, "axum");

    let lock = LockMiddleware::for_path("k:<id>").pool(&pool).until_body_end();
    let (counted, seen) = (pool.clone(), held.clone());
    let resource = web::resource("/{id}").wrap(lock).to(move || {
        let body = CountsHeld(counted.clone(), seen.clone());
        async { HttpResponse::Ok().body(body) }
    });
    let app = actix_web::test::init_service(actix_web::App::new().service(resource)).await;
    let response = actix_web::test::call_service(&app, to_actix("/1").to_request()).await;
    until_free(&pool, "k").await;
    assert!(actix_web::test::read_body(response).await.is_empty());
    assert_eq!(held.load(Ordering::SeqCst), 1, "actix");
}

#[tokio::test(start_paused = true)]
async fn a_response_ends_when_its_lock_is_lost() {
    let pool = LockPool::builder("memory://").on_current_runtime().connect().await.unwrap();
    let (parts, routes) = streaming(&pool, |lock| lock.until_body_end().max_hold(ms(5_000)));
    let response = routes.oneshot(to("/")).await.unwrap();
    parts.send("one").await.unwrap();
    let error = to_bytes(response.into_body(), 100).await.unwrap_err();
    assert!(format!("{error:?}").contains("max_hold"), "{error:?}");
    until_free(&pool, "stream").await;
}

#[tokio::test]
async fn a_request_that_is_dropped_gives_its_lock_back() {
    let pool = memory().await;
    let entered = Arc::new(tokio::sync::Notify::new());
    let handler = {
        let entered = entered.clone();
        move || async move {
            entered.notify_one();
            std::future::pending::<()>().await;
        }
    };
    let lock = LockLayer::new(|_| "k").pool(&pool);
    let routes = Router::new().route("/", get(handler).layer(lock));
    for waits in [false, true] {
        let held = if waits { Some(pool.lock("k").acquire().await.unwrap()) } else { None };
        let request = tokio::spawn(routes.clone().oneshot(to("/")));
        if !waits {
            entered.notified().await;
        }
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        drop(held);
        until_free(&pool, "k").await;
    }
    // By a layer above.
    let limited = ServiceBuilder::new().timeout(ms(100)).service(routes.clone().into_service());
    let error = limited.oneshot(to("/")).await.unwrap_err();
    assert!(error.is::<tower::timeout::error::Elapsed>());
    until_free(&pool, "k").await;
}

/// A service that serves one request until it is ready again, as `tower` allows.
#[tokio::test]
async fn the_service_that_was_ready_serves_the_request() {
    #[derive(Debug, Default)]
    struct Ready(bool);
    impl Clone for Ready {
        fn clone(&self) -> Self {
            Self(false)
        }
    }
    impl Service<Request<Body>> for Ready {
        type Response = Response;
        type Error = std::convert::Infallible;
        type Future = std::future::Ready<Result<Response, Self::Error>>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
            self.0 = true;
            Poll::Ready(Ok(()))
        }
        fn call(&mut self, _: Request<Body>) -> Self::Future {
            assert!(std::mem::take(&mut self.0), "it was not asked whether it is ready");
            std::future::ready(Ok(Response::default()))
        }
    }
    let lock = LockLayer::new(|_| "k").pool(&memory().await);
    let mut service = ServiceBuilder::new().layer(lock).service(Ready::default());
    for _ in 0..3 {
        service.ready().await.unwrap().call(to("/")).await.unwrap();
    }
}

#[actix_web::test]
async fn an_actix_resource_runs_only_under_its_lock() {
    let pool = memory().await;
    let handler = async |fence: web::ReqData<Fence>| format!("fence {}", *fence);
    let lock = LockMiddleware::for_path("order:<id>").pool(&pool).wait(Duration::ZERO);
    let resource = web::resource("/orders/{id}").wrap(lock).route(web::get().to(handler));
    let app = actix_web::test::init_service(actix_web::App::new().service(resource)).await;
    let request = || to_actix("/orders/42").to_request();

    let response = actix_web::test::call_and_read_body(&app, request()).await;
    assert!(response.starts_with(b"fence "), "{response:?}");
    let held = pool.lock("order:42").acquire().await.unwrap();
    // A response, so that a logger around the middleware sees it.
    let refused = actix_web::test::call_service(&app, request()).await;
    assert_eq!(refused.status().as_u16(), 409);
    assert_eq!(refused.headers().get(header::RETRY_AFTER).unwrap(), "1");
    assert_eq!(refused.headers().get(header::CONTENT_TYPE).unwrap(), Problem::MEDIA_TYPE);
    held.release().await.unwrap();
    let response = actix_web::test::call_service(&app, request()).await;
    assert_eq!(response.status().as_u16(), 200);
    assert!(is_free(&pool, "order:42").await);
}

#[actix_web::test]
async fn a_key_may_be_computed_from_an_actix_request() {
    let pool = memory().await;
    let lock = LockMiddleware::new(|request| {
        format!("tenant:{}", request.headers().get("tenant").unwrap().to_str().unwrap())
    });
    let lock = lock.template("tenant").pool(&pool).wait(Duration::ZERO);
    // Around the whole application, where no path parameter is known.
    let fence = async |fence: web::ReqData<Fence>| fence.to_string();
    let app = actix_web::App::new().wrap(lock).route("/", web::get().to(fence));
    let app = actix_web::test::init_service(app).await;
    let held = pool.lock("tenant:a").acquire().await.unwrap();
    for (tenant, status) in [("a", 409), ("b", 200)] {
        let request = to_actix("/").insert_header(("tenant", tenant)).to_request();
        let response = actix_web::test::call_service(&app, request).await;
        assert_eq!(response.status().as_u16(), status, "{tenant}");
    }
    held.release().await.unwrap();
    let request = to_actix("/").insert_header(("tenant", "a")).to_request();
    assert!(!actix_web::test::call_and_read_body(&app, request).await.is_empty());
    assert!(is_free(&pool, "tenant:a").await);
}

#[test]
#[should_panic(expected = "a computed lock key has no parameter `<id>`")]
fn a_computed_key_of_actix_has_no_parameters() {
    let _ = LockMiddleware::new(|_| "k").parameter::<u64>("id");
}

/// A service with one actix resource, whose response is a stream, and the sender of its parts.
macro_rules! actix_streaming {
    ($pool:expr, $lock:expr) => {{
        let (sender, body) = streamed();
        let body = std::cell::Cell::new(Some(body));
        let handler = std::rc::Rc::new(move || HttpResponse::Ok().body(body.take().unwrap()));
        let lock: LockMiddleware = $lock(LockMiddleware::for_path("stream:<id>").pool($pool));
        let resource = web::resource("/{id}").wrap(lock).to(move || {
            let handler = handler.clone();
            async move { handler() }
        });
        let app = actix_web::App::new().service(resource);
        (sender, actix_web::test::init_service(app).await)
    }};
}

fn to_actix(path: &str) -> actix_web::test::TestRequest {
    actix_web::test::TestRequest::get().uri(path)
}

#[actix_web::test]
async fn a_lock_lasts_until_an_actix_response_is_sent_if_the_middleware_says_so() {
    let pool = memory().await;
    let (parts, app) = actix_streaming!(&pool, LockMiddleware::until_body_end);
    let response = actix_web::test::call_service(&app, to_actix("/1").to_request()).await;
    assert!(!is_free(&pool, "stream:1").await);
    parts.send("one").await.unwrap();
    parts.send("two").await.unwrap();
    drop(parts);
    assert_eq!(actix_web::test::read_body(response).await, "onetwo");
    until_free(&pool, "stream:1").await;

    // Boxed by a middleware around the lock, and dropped.
    let (parts, app) = actix_streaming!(&pool, LockMiddleware::until_body_end);
    let response = actix_web::test::call_service(&app, to_actix("/1").to_request()).await;
    let response = response.map_into_boxed_body();
    assert!(!is_free(&pool, "stream:1").await);
    drop(response);
    until_free(&pool, "stream:1").await;
    assert!(parts.is_closed());

    let (_parts, app) = actix_streaming!(&pool, |lock| lock);
    let _response = actix_web::test::call_service(&app, to_actix("/1").to_request()).await;
    assert!(is_free(&pool, "stream:1").await, "released when the handler has returned");
}

/// actix-web polls the body of a response to `HEAD`, and sends nothing of it.
#[actix_web::test]
async fn a_response_to_head_does_not_keep_the_lock_of_a_stream() {
    let pool = memory().await;
    let (parts, app) = actix_streaming!(&pool, LockMiddleware::until_body_end);
    let head =
        actix_web::test::TestRequest::default().method(actix_web::http::Method::HEAD).uri("/1");
    let response = actix_web::test::call_service(&app, head.to_request()).await;
    assert_eq!(actix_web::test::read_body(response).await, "");
    until_free(&pool, "stream:1").await;
    assert!(parts.is_closed());
}

/// A middleware that takes a body in memory as bytes would end the lock before they are sent.
#[actix_web::test]
async fn a_boxed_actix_response_in_memory_keeps_its_lock_until_it_is_sent() {
    let pool = memory().await;
    let lock = LockMiddleware::for_path("stream:<id>").pool(&pool).until_body_end();
    let resource = web::resource("/{id}").wrap(lock).to(async || "text");
    let app = actix_web::test::init_service(actix_web::App::new().service(resource)).await;
    let response = actix_web::test::call_service(&app, to_actix("/1").to_request()).await;
    let response = response.map_into_boxed_body();
    assert!(!is_free(&pool, "stream:1").await);
    assert_eq!(actix_web::test::read_body(response).await, "text");
    until_free(&pool, "stream:1").await;
}

#[tokio::test(start_paused = true)]
async fn an_actix_response_ends_when_its_lock_is_lost() {
    let pool = LockPool::builder("memory://").on_current_runtime().connect().await.unwrap();
    let limit = |lock: LockMiddleware| lock.until_body_end().max_hold(ms(5_000));
    let (parts, app) = actix_streaming!(&pool, limit);
    let response = actix_web::test::call_service(&app, to_actix("/1").to_request()).await;
    parts.send("one").await.unwrap();
    let error = actix_web::body::to_bytes(response.into_body()).await.unwrap_err();
    assert!(error.to_string().contains("max_hold"), "{error}");
    until_free(&pool, "stream:1").await;
}

/// actix-web runs a handler to its end without a client; a body is dropped.
#[actix_web::test]
async fn a_client_that_closes_its_socket_within_an_actix_stream_frees_the_lock() {
    let pool = memory().await;
    let lock = LockMiddleware::for_path("stream:<id>").pool(&pool).until_body_end();
    let server = actix_web::HttpServer::new(move || {
        let stream = || async { HttpResponse::Ok().body(Endless(tokio::time::interval(ms(10)))) };
        actix_web::App::new().service(web::resource("/{id}").wrap(lock.clone()).to(stream))
    });
    let server = server.workers(1).disable_signals().bind("127.0.0.1:0").unwrap();
    let address = server.addrs()[0];
    let server = server.run();
    let handle = server.handle();
    let serving = tokio::spawn(server);
    let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
    client.write_all(b"GET /1 HTTP/1.1\r\nHost: here\r\n\r\n").await.unwrap();
    let mut begin = [0; 512];
    assert!(client.read(&mut begin).await.unwrap() > 0);
    assert!(!is_free(&pool, "stream:1").await);
    drop(client);
    until_free(&pool, "stream:1").await;
    handle.stop(false).await;
    joined("the server", serving).await.unwrap();
}

/// An axum and an actix instance exclude each other, and a client does not choose its lock by the way it writes a value.
#[actix_web::test]
async fn one_value_has_one_key_in_all_frameworks() {
    let pool = memory().await;
    let text = LockMiddleware::for_path("text:<value>").pool(&pool).wait(Duration::ZERO);
    let number = LockMiddleware::for_path("n:<value>").parameter::<u64>("value").pool(&pool);
    let number = number.wait(Duration::ZERO);
    let app = actix_web::App::new()
        .service(web::resource("/text/{value}").wrap(text).to(async || ""))
        .service(web::resource("/number/{value}").wrap(number).to(async || ""));
    let app = actix_web::test::init_service(app).await;
    let by_actix = async |path: &str| {
        actix_web::test::call_service(&app, to_actix(path).to_request()).await.status().as_u16()
    };
    let text = LockLayer::for_path("text:<value>").pool(&pool).wait(Duration::ZERO);
    let number = LockLayer::for_path("n:<value>").parameter::<u64>("value").pool(&pool);
    let routes = Router::new()
        .route("/text/{value}", get(async || "").route_layer(text))
        .route("/number/{value}", get(async || "").route_layer(number.wait(Duration::ZERO)));
    for (key, paths) in [
        ("text:a/b", vec!["/text/a%2fb", "/text/a%2Fb"]),
        ("text:a+b", vec!["/text/a+b", "/text/a%2Bb", "/text/%61%2bb"]),
        ("n:42", vec!["/number/42", "/number/042", "/number/%2B42"]),
    ] {
        let held = pool.lock(key).acquire().await.unwrap();
        for path in &paths {
            assert_eq!(sent(&routes, path).await.0, StatusCode::CONFLICT, "{key} {path}");
            assert_eq!(by_actix(path).await, 409, "{key} {path}");
        }
        held.release().await.unwrap();
        for path in &paths {
            assert_eq!(sent(&routes, path).await.0, StatusCode::OK, "{key} {path}");
            assert_eq!(by_actix(path).await, 200, "{key} {path}");
        }
    }
    assert_eq!(sent(&routes, "/number/x").await.0, StatusCode::BAD_REQUEST);
    assert_eq!(by_actix("/number/x").await, 400);
}

/// The handler asks for the lock that its route holds.
#[tokio::test]
async fn a_nested_call_is_an_error_and_no_wait() {
    let pool = memory().await;
    for until_body_end in [false, true] {
        let inner = pool.clone();
        let handler = move || async move {
            let error = inner.lock("k").wait(SOON).acquire().await.unwrap_err();
            format!("{:?}", error.kind())
        };
        let lock = LockLayer::new(|_| "k").pool(&pool);
        let lock = if until_body_end { lock.until_body_end() } else { lock };
        let routes = Router::new().route("/", get(handler).layer(lock));
        assert_eq!(sent(&routes, "/").await.2, "WouldDeadlock");
        until_free(&pool, "k").await;
    }
}

#[actix_web::test]
async fn an_actix_handler_may_return_the_response_of_an_error() {
    #[distributed_lock(key = "order:<id>", wait = "0s")]
    async fn settle(id: u64) -> HttpResponse {
        HttpResponse::Ok().body(id.to_string())
    }
    let pool = memory().await;
    with_pool("default", pool.clone(), async {
        let _held = pool.lock("order:42").acquire().await.unwrap();
        assert_eq!(settle(42).await.status().as_u16(), 409);
        assert_eq!(settle(43).await.status().as_u16(), 200);
    })
    .await;
    let of_no_pool = lock_runtime::pool("of no test").is_none();
    assert!(
        of_no_pool && HttpResponse::from_lock_error(config_error().await).status().as_u16() == 500
    );
}

async fn config_error() -> LockError {
    LockPool::connect("mongodb://").await.unwrap_err()
}
