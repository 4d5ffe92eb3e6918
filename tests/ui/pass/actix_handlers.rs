#![deny(warnings)]
#![allow(dead_code)]

use actix_web::{HttpResponse, Responder, ResponseError, get, web};
use lock_runtime::{LockError, distributed_lock};

#[derive(serde::Deserialize)]
struct Payment {
    order: u64,
}

#[derive(Debug)]
struct FailureKind(LockError);

impl From<LockError> for FailureKind {
    fn from(error: LockError) -> Self {
        Self(error)
    }
}

impl std::fmt::Display for FailureKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl ResponseError for FailureKind {}

#[distributed_lock(key = "order:<id>", ttl = "5s", on_error = |error| HttpResponse::Conflict().body(error.to_string()))]
async fn settle(id: web::Path<u64>) -> HttpResponse {
    HttpResponse::Ok().body(id.to_string())
}

#[distributed_lock(key = "order:<payment.order>")]
async fn pay(payment: web::Json<Payment>) -> Result<HttpResponse, FailureKind> {
    Ok(HttpResponse::Ok().body(payment.order.to_string()))
}

#[distributed_lock(key = "<tenant>:<id>")]
async fn both(
    path: web::Path<(String, u64)>,
    web::Query((tenant, id)): web::Query<(String, u64)>,
) -> Result<impl Responder, FailureKind> {
    Ok(format!("{path:?} {tenant} {id}"))
}

#[get("/report/{id}")]
#[distributed_lock(key = "report:<id>")]
async fn routed(id: web::Path<u64>) -> Result<impl Responder, FailureKind> {
    Ok(id.to_string())
}

fn app(config: &mut web::ServiceConfig) {
    config
        .route("/settle/{id}", web::post().to(settle))
        .route("/pay", web::post().to(pay))
        .route("/both", web::get().to(both))
        .service(routed);
}

fn main() {}
