//! The signatures of axum's guide: each extractor, and each kind of response.
#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::rejection::JsonRejection;
use axum::extract::{
    ConnectInfo, FromRequestParts, MatchedPath, OriginalUri, Path, Query, Request, State,
};
use axum::http::header::{self, HeaderMap, HeaderName};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{AppendHeaders, Html, IntoResponse, NoContent, Redirect, Response};
use axum::routing::{any, delete, get, post, put};
use axum::{Extension, Form, Json, Router};
use lock_runtime::{LockError, distributed_lock};

#[derive(Clone, Default)]
struct App {
    totals: Arc<HashMap<u64, u64>>,
}

#[derive(serde::Deserialize)]
struct OrderPath {
    tenant: String,
    id: u64,
}

#[derive(serde::Deserialize, serde::Serialize)]
struct Payment {
    order: u64,
    amount: u64,
}

#[derive(Clone)]
struct User {
    name: String,
}

struct Tenant(String);

impl<S: Sync> FromRequestParts<S> for Tenant {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let host = parts.headers.get(header::HOST).and_then(|host| host.to_str().ok());
        Ok(Self(host.unwrap_or_default().to_owned()))
    }
}

struct AppError(StatusCode);

impl From<LockError> for AppError {
    fn from(error: LockError) -> Self {
        Self(if error.is_conflict() { StatusCode::CONFLICT } else { StatusCode::SERVICE_UNAVAILABLE })
    }
}

impl IntoResponse for AppError {
    fn into_response(self) -> Response {
        self.0.into_response()
    }
}

#[distributed_lock(key = "order:<id>")]
async fn path(Path(id): Path<u64>) -> Result<String, LockError> {
    Ok(id.to_string())
}

#[distributed_lock(key = "order:<tenant>:<id>")]
async fn two_in_the_path(Path((tenant, id)): Path<(String, u64)>) -> Result<String, LockError> {
    Ok(format!("{tenant} {id}"))
}

#[distributed_lock(key = "order:<order.tenant>:<order.id>")]
async fn struct_of_the_path(Path(order): Path<OrderPath>) -> Result<String, LockError> {
    Ok(order.tenant)
}

#[distributed_lock(key = "order:<order.id>")]
async fn query(Query(order): Query<OrderPath>) -> Result<&'static str, LockError> {
    drop(order);
    Ok("done")
}

#[distributed_lock(key = "import")]
async fn query_as_a_map(Query(all): Query<HashMap<String, String>>) -> Result<String, LockError> {
    Ok(all.len().to_string())
}

#[distributed_lock(key = "order:<payment.order>")]
async fn json(Json(payment): Json<Payment>) -> Result<Json<Payment>, LockError> {
    Ok(Json(payment))
}

#[distributed_lock(key = "order:<payment.order>")]
async fn form(Form(payment): Form<Payment>) -> Result<(StatusCode, Json<Payment>), LockError> {
    Ok((StatusCode::CREATED, Json(payment)))
}

#[distributed_lock(key = "import")]
async fn text(body: String) -> Result<Vec<u8>, LockError> {
    Ok(body.into_bytes())
}

#[distributed_lock(key = "import")]
async fn bytes(body: Bytes) -> Result<Bytes, LockError> {
    Ok(body)
}

#[distributed_lock(key = "import")]
async fn request(request: Request) -> Result<Body, LockError> {
    Ok(request.into_body())
}

#[distributed_lock(key = "order:<id>")]
async fn state(State(app): State<App>, Path(id): Path<u64>) -> Result<String, LockError> {
    Ok(app.totals.get(&id).copied().unwrap_or_default().to_string())
}

#[distributed_lock(key = "user:<user.name>")]
async fn extension(Extension(user): Extension<User>) -> Result<Html<String>, LockError> {
    Ok(Html(user.name))
}

#[distributed_lock(key = "tenant:<tenant.0>")]
async fn own_extractor(tenant: Tenant) -> Result<String, LockError> {
    Ok(tenant.0)
}

#[distributed_lock(key = "<method>:<uri>")]
async fn parts(method: Method, uri: Uri, headers: HeaderMap) -> Result<StatusCode, LockError> {
    drop((method, uri, headers));
    Ok(StatusCode::ACCEPTED)
}

#[distributed_lock(key = "<uri>")]
async fn original(
    OriginalUri(uri): OriginalUri,
    matched: MatchedPath,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
) -> Result<String, LockError> {
    Ok(format!("{uri} {} {peer}", matched.as_str()))
}

#[distributed_lock(key = "import")]
async fn optional(id: Option<Path<u64>>) -> Result<NoContent, LockError> {
    let _ = id;
    Ok(NoContent)
}

#[distributed_lock(key = "import")]
async fn rejected(payment: Result<Json<Payment>, JsonRejection>) -> Result<(), AppError> {
    payment.map(drop).map_err(|rejection| AppError(rejection.status()))
}

#[distributed_lock(key = "order:<id>")]
async fn response(Path(id): Path<u64>) -> Response {
    id.to_string().into_response()
}

#[distributed_lock(key = "order:<id>")]
async fn redirect(Path(id): Path<u64>) -> Result<Redirect, LockError> {
    Ok(Redirect::to(&format!("/orders/{id}")))
}

#[distributed_lock(key = "order:<id>")]
async fn headers(Path(id): Path<u64>) -> Result<([(HeaderName, String); 1], String), LockError> {
    Ok(([(header::ETAG, id.to_string())], String::new()))
}

#[distributed_lock(key = "order:<id>")]
async fn appended(Path(id): Path<u64>) -> Result<impl IntoResponse, AppError> {
    Ok((StatusCode::OK, AppendHeaders([(header::AGE, "0")]), id.to_string()))
}

#[distributed_lock(key = "order:<id>")]
async fn any_error(Path(id): Path<u64>) -> axum::response::Result<String> {
    Ok(id.to_string())
}

#[distributed_lock(key = "order:<id>", on_error = |_| StatusCode::CONFLICT)]
async fn status(Path(id): Path<u64>) -> StatusCode {
    drop(id.to_string());
    StatusCode::OK
}

#[distributed_lock(key = "order:<id>", on_error = |_| (StatusCode::CONFLICT, String::new()))]
async fn anything(Path(id): Path<u64>) -> impl IntoResponse {
    (StatusCode::OK, id.to_string())
}

#[distributed_lock(key = "order:<id>", guard = lock)]
async fn fenced(Path(id): Path<u64>) -> Result<String, LockError> {
    Ok(format!("{id} {:?}", lock.fence()))
}

#[distributed_lock(key = "all", on_conflict = "skip")]
async fn skipped() -> Result<Option<String>, LockError> {
    Ok(Some(String::new()))
}

#[distributed_lock(key = "order:<id>")]
async fn generic<S: Clone + Send + Sync>(
    State(state): State<S>,
    Path(id): Path<u64>,
) -> Result<String, LockError> {
    drop(state);
    Ok(id.to_string())
}

struct Orders;

impl Orders {
    #[distributed_lock(key = "order:<id>")]
    async fn settle(State(app): State<App>, Path(id): Path<u64>) -> Result<String, LockError> {
        drop(app);
        Ok(id.to_string())
    }
}

fn routes() -> Router {
    Router::new()
        .route("/path/{id}", get(path))
        .route("/two/{tenant}/{id}", get(two_in_the_path))
        .route("/struct/{tenant}/{id}", get(struct_of_the_path))
        .route("/query", get(query))
        .route("/map", get(query_as_a_map))
        .route("/json", post(json))
        .route("/form", post(form))
        .route("/text", put(text))
        .route("/bytes", put(bytes))
        .route("/request", any(request))
        .route("/state/{id}", get(state))
        .route("/extension", get(extension))
        .route("/own", get(own_extractor))
        .route("/parts", get(parts))
        .route("/original", get(original))
        .route("/optional/{id}", get(optional))
        .route("/rejected", post(rejected))
        .route("/response/{id}", get(response))
        .route("/redirect/{id}", get(redirect))
        .route("/headers/{id}", get(headers))
        .route("/appended/{id}", get(appended))
        .route("/any/{id}", get(any_error))
        .route("/status/{id}", delete(status))
        .route("/anything/{id}", get(anything))
        .route("/fenced/{id}", get(fenced))
        .route("/skipped", get(|| async { skipped().await.map(Option::unwrap_or_default) }))
        .route("/generic/{id}", get(generic::<App>))
        .route("/method/{id}", get(Orders::settle))
        .with_state(App::default())
}

fn main() {}
