//! The signatures of actix-web's guide: each extractor, and each kind of response.
#![deny(warnings)]
#![allow(dead_code)]

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::future::{Ready, ready};
use std::rc::Rc;
use std::sync::Mutex;

use actix_web::dev::{ConnectionInfo, Payload};
use actix_web::http::header::{self, ContentType};
use actix_web::http::{Method, StatusCode, Uri};
use actix_web::web::{Bytes, Data, Form, Header, Json, Path, Query, Redirect, ReqData};
use actix_web::{
    Either, Error, FromRequest, HttpRequest, HttpResponse, Responder, ResponseError, delete, get,
    post, put, route, web,
};
use lock_runtime::{LockError, distributed_lock};

#[derive(serde::Deserialize, serde::Serialize)]
struct Payment {
    order: u64,
    amount: u64,
}

#[derive(serde::Deserialize)]
struct OrderPath {
    tenant: String,
    id: u64,
}

#[derive(Clone)]
struct User {
    name: String,
}

struct Tenant(String);

impl FromRequest for Tenant {
    type Error = Error;
    type Future = Ready<Result<Self, Error>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(Ok(Self(request.connection_info().host().to_owned())))
    }
}

#[derive(Debug)]
struct AppError(LockError);

impl From<LockError> for AppError {
    fn from(error: LockError) -> Self {
        Self(error)
    }
}

impl fmt::Display for AppError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl ResponseError for AppError {
    fn status_code(&self) -> StatusCode {
        StatusCode::CONFLICT
    }
}

#[get("/path/{id}")]
#[distributed_lock(key = "order:<id>")]
async fn by_path(id: Path<u64>) -> Result<String, LockError> {
    Ok(id.to_string())
}

#[get("/two/{tenant}/{id}")]
#[distributed_lock(key = "order:<path.0>:<path.1>")]
async fn two_in_the_path(path: Path<(String, u64)>) -> Result<String, Error> {
    let (tenant, id) = path.into_inner();
    Ok(format!("{tenant} {id}"))
}

#[get("/struct/{tenant}/{id}")]
#[distributed_lock(key = "order:<order.tenant>:<order.id>")]
async fn struct_of_the_path(order: Path<OrderPath>) -> actix_web::Result<String> {
    Ok(order.into_inner().tenant)
}

#[get("/query")]
#[distributed_lock(key = "order:<order.id>")]
async fn query(order: Query<OrderPath>) -> Result<&'static str, LockError> {
    drop(order);
    Ok("done")
}

#[get("/map")]
#[distributed_lock(key = "import")]
async fn query_as_a_map(all: Query<HashMap<String, String>>) -> Result<impl Responder, LockError> {
    Ok(all.len().to_string())
}

#[post("/json")]
#[distributed_lock(key = "order:<payment.order>")]
async fn json(payment: Json<Payment>) -> Result<Json<Payment>, LockError> {
    Ok(payment)
}

#[post("/form")]
#[distributed_lock(key = "order:<payment.order>")]
async fn form(payment: Form<Payment>) -> Result<HttpResponse, LockError> {
    Ok(HttpResponse::Created().json(payment.into_inner()))
}

#[put("/text")]
#[distributed_lock(key = "import")]
async fn text(body: String) -> Result<Vec<u8>, LockError> {
    Ok(body.into_bytes())
}

#[put("/bytes")]
#[distributed_lock(key = "import")]
async fn bytes(body: Bytes) -> Result<Bytes, LockError> {
    Ok(body)
}

#[put("/payload")]
#[distributed_lock(key = "import")]
async fn payload(body: web::Payload) -> Result<HttpResponse, AppError> {
    drop(body);
    Ok(HttpResponse::NoContent().finish())
}

#[get("/data/{id}")]
#[distributed_lock(key = "order:<id>")]
async fn data(totals: Data<Mutex<HashMap<u64, u64>>>, id: Path<u64>) -> Result<String, LockError> {
    Ok(totals.lock().unwrap().len().to_string() + &id.to_string())
}

#[get("/extension")]
#[distributed_lock(key = "user:<user.name>")]
async fn request_data(user: ReqData<User>) -> Result<String, LockError> {
    Ok(user.into_inner().name)
}

#[get("/own")]
#[distributed_lock(key = "tenant:<tenant.0>")]
async fn own_extractor(tenant: Tenant) -> Result<String, LockError> {
    Ok(tenant.0)
}

#[get("/request")]
#[distributed_lock(key = "path:<request.path()>")]
async fn by_request(request: HttpRequest) -> Result<String, LockError> {
    Ok(request.path().to_owned())
}

#[get("/parts")]
#[distributed_lock(key = "<method>:<uri>")]
async fn parts(method: Method, uri: Uri, peer: ConnectionInfo) -> Result<String, LockError> {
    Ok(format!("{method} {uri} {}", peer.scheme()))
}

#[get("/header")]
#[distributed_lock(key = "import")]
async fn by_header(content: Header<ContentType>) -> Result<HttpResponse, LockError> {
    Ok(HttpResponse::Ok().content_type(content.into_inner()).finish())
}

#[post("/optional")]
#[distributed_lock(key = "import")]
async fn optional(payment: Option<Json<Payment>>) -> Result<String, LockError> {
    Ok(payment.is_some().to_string())
}

#[post("/rejected")]
#[distributed_lock(key = "import")]
async fn rejected(payment: Result<Json<Payment>, Error>) -> Result<String, Error> {
    Ok(payment?.order.to_string())
}

#[post("/either")]
#[distributed_lock(key = "import")]
async fn either(
    body: Either<Json<Payment>, Form<Payment>>,
) -> Result<Either<Json<Payment>, &'static str>, LockError> {
    Ok(match body {
        Either::Left(payment) => Either::Left(payment),
        Either::Right(_) => Either::Right("form"),
    })
}

#[delete("/response/{id}")]
#[distributed_lock(key = "order:<id>")]
async fn response(id: Path<u64>) -> HttpResponse {
    HttpResponse::Ok().body(id.to_string())
}

#[get("/redirect/{id}")]
#[distributed_lock(key = "order:<id>")]
async fn redirect(id: Path<u64>) -> Result<Redirect, LockError> {
    Ok(Redirect::to(format!("/orders/{id}")))
}

#[get("/customized/{id}")]
#[distributed_lock(key = "order:<id>")]
async fn customized(id: Path<u64>) -> Result<impl Responder, AppError> {
    Ok(id.to_string().customize().insert_header((header::AGE, "0")))
}

#[get("/anything/{id}")]
#[distributed_lock(key = "order:<id>", on_error = |_| String::from("later"))]
async fn anything(id: Path<u64>) -> impl Responder {
    id.to_string()
}

#[get("/fenced/{id}")]
#[distributed_lock(key = "order:<id>", guard = lock)]
async fn fenced(id: Path<u64>) -> Result<String, LockError> {
    Ok(format!("{id} {:?}", lock.fence()))
}

#[route("/routed/{id}", method = "GET", method = "HEAD")]
#[distributed_lock(key = "order:<id>")]
async fn routed(id: Path<u64>) -> Result<String, LockError> {
    Ok(id.to_string())
}

#[distributed_lock(key = "order:<id>")]
async fn of_one_thread(id: Path<u64>, calls: Data<Rc<Cell<u64>>>) -> Result<String, LockError> {
    calls.set(calls.get() + 1);
    Ok(id.to_string())
}

fn app(config: &mut web::ServiceConfig) {
    config
        .service((by_path, two_in_the_path, struct_of_the_path, query, query_as_a_map))
        .service((json, form, text, bytes, payload, data, request_data, own_extractor))
        .service((by_request, parts, by_header, optional, rejected, either, response, redirect))
        .service((customized, anything, fenced, routed))
        .route("/thread/{id}", web::get().to(of_one_thread));
}

fn main() {}
