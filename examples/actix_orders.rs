//! Like `axum_orders`, with actix-web: annotated handlers, and a route behind a lock.
//!
//! ```text
//! cargo add lock-runtime --features actix     # in another program
//! cargo run --example actix_orders -- redis://127.0.0.1:6379 8081 /tmp/ledger
//! cargo run --example actix_orders -- redis://127.0.0.1:6379 8082 /tmp/ledger
//! curl -X POST localhost:8081/orders/42/settle
//! curl -X PUT  localhost:8082/orders -H 'content-type: application/json' -d '{"id":42,"amount":7}'
//! curl -X POST localhost:8082/orders/42/note -d 'fragile'
//! cargo run --example orders_load -- localhost:8081 localhost:8082
//! ```

mod ledger;

use std::io;
use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::{App, HttpResponse, HttpServer, Responder, ResponseError, web};
use ledger::Ledger;
use lock_runtime::web::LockMiddleware;
use lock_runtime::{Fence, LockError, LockPool, OnOutage, distributed_lock};
use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::LevelFilter;

#[derive(Debug, Deserialize, Serialize)]
struct Order {
    id: u64,
    amount: u64,
}

#[derive(Debug, Serialize)]
struct Receipt {
    order: u64,
}

#[derive(Debug, thiserror::Error)]
enum OrderError {
    #[error("order {0} is already settled")]
    Settled(u64),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("the ledger: {0}")]
    Ledger(#[from] io::Error),
}

impl ResponseError for OrderError {
    fn status_code(&self) -> StatusCode {
        match self {
            Self::Settled(_) => StatusCode::GONE,
            Self::Lock(error) => error.status_code(),
            Self::Ledger(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn error_response(&self) -> HttpResponse {
        match self {
            // 409, 429 or 503 with `Retry-After`, or 500 once the body has begun: see `lock_runtime::Problem`.
            Self::Lock(error) => error.error_response(),
            Self::Settled(_) => HttpResponse::build(self.status_code()).body(self.to_string()),
            Self::Ledger(_) => HttpResponse::InternalServerError().finish(),
        }
    }
}

/// actix-web runs a handler to its end, even when its client is gone: `max_hold` bounds how long it holds the lock.
#[distributed_lock(key = "order:<id>", ttl = "5s", wait = "50ms", max_hold = "10s")]
async fn settle(
    ledger: web::Data<Ledger>,
    id: web::Path<u64>,
) -> Result<impl Responder, OrderError> {
    let id = id.into_inner();
    if ledger.has(id, "settled")? {
        return Err(OrderError::Settled(id));
    }
    // The call to the payment provider takes time. Without the lock, a second request would get here too. The handler may be
    // cancelled between the call and its record. The order's id is the call's idempotency key: a second call charges nothing.
    actix_web::rt::time::sleep(Duration::from_millis(20)).await;
    ledger.append(id, "settled")?;
    Ok(web::Json(Receipt { order: id }))
}

#[distributed_lock(key = "order:<order.id>", ttl = "5s", wait = "50ms")]
async fn amend(
    ledger: web::Data<Ledger>,
    order: web::Json<Order>,
) -> Result<HttpResponse, OrderError> {
    if ledger.has(order.id, "settled")? {
        return Err(OrderError::Settled(order.id));
    }
    ledger.append(order.id, &format!("amount {}", order.amount))?;
    Ok(HttpResponse::NoContent().finish())
}

/// A handler without an attribute: its route is locked.
async fn note(
    ledger: web::Data<Ledger>,
    id: web::Path<u64>,
    fence: web::ReqData<Fence>,
    text: String,
) -> Result<HttpResponse, OrderError> {
    ledger.append(*id, &format!("note {} {}", *fence, text.escape_debug()))?;
    Ok(HttpResponse::NoContent().finish())
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Standard error gets the warnings: lost locks, a store that is down.
    tracing_subscriber::fmt().with_max_level(LevelFilter::WARN).with_writer(io::stderr).init();
    let mut args = std::env::args().skip(1);
    let url = args.next().unwrap_or_else(|| "memory://".to_owned());
    let port: u16 = args.next().map_or(Ok(8080), |port| port.parse())?;
    let ledger = web::Data::new(Ledger::open(args.next())?);
    // While Redis is down, requests are answered with 503 immediately.
    lock_runtime::init_with(LockPool::builder(url).on_outage(OnOutage::Fail)).await?;

    let server = HttpServer::new(move || {
        // The text is read under the lock: a client that stalls holds it for at most ten seconds.
        let lock = LockMiddleware::for_path("order:<id>").parameter::<u64>("id");
        let lock = lock.ttl(Duration::from_secs(5)).max_hold(Duration::from_secs(10));
        let note = web::post().to(note).wrap(lock);
        App::new()
            .app_data(ledger.clone())
            .service(web::resource("/orders/{id}/note").route(note))
            .route("/orders/{id}/settle", web::post().to(settle))
            .route("/orders", web::put().to(amend))
    });
    let server = server.workers(2).disable_signals().bind(("127.0.0.1", port))?;
    for address in server.addrs() {
        println!("listening on {address}");
    }
    // SIGTERM or Ctrl-C stops the server first: its requests have two seconds to finish. Then all locks are released.
    let served = lock_runtime::web::serve_actix(Duration::from_secs(2), server.run()).await?;
    println!("shut down: {:?}", served.locks);
    served.output.transpose()?;
    Ok(())
}
