#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use lock_runtime::{LockError, LockPool, distributed_lock};

#[derive(Clone)]
struct App {
    tenant: String,
    locks: Option<LockPool>,
}

#[derive(serde::Deserialize)]
struct Payment {
    order: u64,
    amount: u64,
}

struct FailureKind(LockError);

impl From<LockError> for FailureKind {
    fn from(error: LockError) -> Self {
        Self(error)
    }
}

impl IntoResponse for FailureKind {
    fn into_response(self) -> Response {
        let status = if self.0.is_conflict() {
            StatusCode::CONFLICT
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        };
        status.into_response()
    }
}

#[distributed_lock(key = "<app.tenant>:order:<id>", ttl = "5s")]
async fn settle(State(app): State<App>, Path(id): Path<u64>) -> Result<Json<u64>, FailureKind> {
    drop(app);
    Ok(Json(id))
}

#[distributed_lock(key = "order:<payment.order>")]
async fn pay(Json(payment): Json<Payment>) -> Result<impl IntoResponse, FailureKind> {
    if payment.amount == 0 {
        return Ok((StatusCode::BAD_REQUEST, String::new()));
    }
    Ok((StatusCode::OK, payment.amount.to_string()))
}

#[distributed_lock(key = "report:<id>", on_error = |_| StatusCode::CONFLICT.into_response())]
async fn report(Path(id): Path<u64>) -> Response {
    id.to_string().into_response()
}

#[distributed_lock(key = "ship:<id>")]
async fn ship(Path(id): Path<u64>) -> Result<String, StatusCode> {
    Ok(id.to_string())
}

#[distributed_lock(key = "bare:<id>", on_error = |_| (StatusCode::CONFLICT, String::new()))]
async fn bare(Path(id): Path<u64>) -> impl IntoResponse {
    (StatusCode::OK, id.to_string())
}

fn routes() -> Router<App> {
    Router::new()
        .route("/orders/{id}", post(settle))
        .route("/pay", post(pay))
        .route("/report/{id}", get(report))
        .route("/ship/{id}", post(ship))
        .route("/bare/{id}", get(bare))
}

fn main() {}
