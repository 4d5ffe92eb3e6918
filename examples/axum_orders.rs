//! A web service with annotated handlers, and a route behind a lock. Start several instances on one Redis: an order is
//! settled by one request at a time, whichever instance receives it, and later requests find it settled.
//!
//! ```text
//! cargo add lock-runtime --features axum     # in another program
//! cargo run --example axum_orders -- redis://127.0.0.1:6379 8081 /tmp/ledger
//! cargo run --example axum_orders -- redis://127.0.0.1:6379 8082 /tmp/ledger
//! curl -X POST localhost:8081/orders/42/settle
//! curl -X PUT  localhost:8082/orders -H 'content-type: application/json' -d '{"id":42,"amount":7}'
//! curl -X POST localhost:8082/orders/42/note -d 'fragile'
//! cargo run --example orders_load -- localhost:8081 localhost:8082
//! ```

mod ledger;

use std::io;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{post, put};
use axum::{Extension, Json, Router};
use ledger::Ledger;
use lock_runtime::web::LockLayer;
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

impl IntoResponse for OrderError {
    fn into_response(self) -> Response {
        match self {
            Self::Settled(_) => (StatusCode::GONE, self.to_string()).into_response(),
            // 409, 429 or 503 with `Retry-After`, or 500 once the body has begun: see `lock_runtime::Problem`.
            Self::Lock(error) => error.into_response(),
            Self::Ledger(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

#[distributed_lock(key = "order:<id>", ttl = "5s", wait = "50ms")]
async fn settle(
    State(ledger): State<Ledger>,
    Path(id): Path<u64>,
) -> Result<Json<Receipt>, OrderError> {
    if ledger.has(id, "settled")? {
        return Err(OrderError::Settled(id));
    }
    // The call to the payment provider takes time. Without the lock, a second request would get here too. The handler may be
    // cancelled between the call and its record. The order's id is the call's idempotency key: a second call charges nothing.
    tokio::time::sleep(Duration::from_millis(20)).await;
    ledger.append(id, "settled")?;
    Ok(Json(Receipt { order: id }))
}

#[distributed_lock(key = "order:<order.id>", ttl = "5s", wait = "50ms")]
async fn amend(
    State(ledger): State<Ledger>,
    Json(order): Json<Order>,
) -> Result<StatusCode, OrderError> {
    if ledger.has(order.id, "settled")? {
        return Err(OrderError::Settled(order.id));
    }
    ledger.append(order.id, &format!("amount {}", order.amount))?;
    Ok(StatusCode::NO_CONTENT)
}

/// A handler without an attribute: its route is locked.
async fn note(
    State(ledger): State<Ledger>,
    Path(id): Path<u64>,
    Extension(fence): Extension<Fence>,
    text: String,
) -> Result<StatusCode, OrderError> {
    ledger.append(id, &format!("note {fence} {}", text.escape_debug()))?;
    Ok(StatusCode::NO_CONTENT)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Standard error gets the warnings: lost locks, a store that is down.
    tracing_subscriber::fmt().with_max_level(LevelFilter::WARN).with_writer(io::stderr).init();
    let mut args = std::env::args().skip(1);
    let url = args.next().unwrap_or_else(|| "memory://".to_owned());
    let port: u16 = args.next().map_or(Ok(8080), |port| port.parse())?;
    let ledger = Ledger::open(args.next())?;
    // While Redis is down, requests are answered with 503 immediately.
    lock_runtime::init_with(LockPool::builder(url).on_outage(OnOutage::Fail)).await?;

    // The text is read under the lock: a client that stalls holds it for at most ten seconds.
    let lock = LockLayer::for_path("order:<id>").parameter::<u64>("id");
    let lock = lock.ttl(Duration::from_secs(5)).max_hold(Duration::from_secs(10));
    let routes = Router::new()
        .route("/orders/{id}/note", post(note).route_layer(lock))
        .route("/orders/{id}/settle", post(settle))
        .route("/orders", put(amend))
        .with_state(ledger);
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on {}", listener.local_addr()?);
    // SIGTERM or Ctrl-C stops the server first: its requests have two seconds to finish. Then all locks are released.
    let served = lock_runtime::serve(Duration::from_secs(2), |stopped| {
        axum::serve(listener, routes).with_graceful_shutdown(stopped)
    })
    .await?;
    println!("shut down: {:?}", served.locks);
    served.output.transpose()?;
    Ok(())
}
