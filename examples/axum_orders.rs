//! A web service with annotated handlers. Start several instances on one Redis: an order is settled once,
//! whichever instance receives the request.
//!
//! ```text
//! cargo run --example axum_orders -- redis://127.0.0.1:6379 8081 /tmp/ledger
//! cargo run --example axum_orders -- redis://127.0.0.1:6379 8082 /tmp/ledger
//! curl -X POST localhost:8081/orders/42/settle
//! curl -X PUT  localhost:8082/orders -H 'content-type: application/json' -d '{"id":42,"amount":7}'
//! ```

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{post, put};
use axum::{Json, Router};
use lock_runtime::{ErrorKind, LockError, distributed_lock};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug)]
struct App {
    ledger: Ledger,
}

/// In place of a shared database: one file per order, one line per entry.
#[derive(Clone, Debug)]
struct Ledger {
    folder: PathBuf,
}

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
    #[error("order {0} is settled already")]
    Settled(u64),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("the ledger: {0}")]
    Ledger(#[from] io::Error),
}

impl IntoResponse for OrderError {
    fn into_response(self) -> Response {
        let status = match &self {
            Self::Settled(_) => StatusCode::CONFLICT,
            Self::Lock(error) => match error.kind() {
                // Another request is processing the order: the client may retry.
                ErrorKind::Conflict => StatusCode::CONFLICT,
                ErrorKind::InvalidKey => StatusCode::BAD_REQUEST,
                _ => StatusCode::SERVICE_UNAVAILABLE,
            },
            Self::Ledger(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, self.to_string()).into_response()
    }
}

#[distributed_lock(key = "order:<id>", ttl = "5s", wait = "50ms")]
async fn settle(State(app): State<App>, Path(id): Path<u64>) -> Result<Json<Receipt>, OrderError> {
    if app.ledger.has(id, "settled")? {
        return Err(OrderError::Settled(id));
    }
    // The call of the payment provider takes time. Without the lock, a second request would get here too.
    tokio::time::sleep(Duration::from_millis(20)).await;
    app.ledger.append(id, "settled")?;
    Ok(Json(Receipt { order: id }))
}

#[distributed_lock(key = "order:<order.id>", ttl = "5s", wait = "50ms")]
async fn amend(State(app): State<App>, Json(order): Json<Order>) -> Result<StatusCode, OrderError> {
    if app.ledger.has(order.id, "settled")? {
        return Err(OrderError::Settled(order.id));
    }
    app.ledger.append(order.id, &format!("amount {}", order.amount))?;
    Ok(StatusCode::NO_CONTENT)
}

impl Ledger {
    fn file(&self, id: u64) -> PathBuf {
        self.folder.join(id.to_string())
    }

    fn has(&self, id: u64, entry: &str) -> io::Result<bool> {
        match std::fs::read_to_string(self.file(id)) {
            Ok(text) => Ok(text.lines().any(|line| line == entry)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn append(&self, id: u64, entry: &str) -> io::Result<()> {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(self.file(id))?;
        writeln!(file, "{entry}")
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let url = args.next().unwrap_or_else(|| "memory://".to_owned());
    let port: u16 = args.next().map_or(Ok(8080), |port| port.parse())?;
    let folder =
        args.next().map_or_else(|| std::env::temp_dir().join("axum_orders"), PathBuf::from);
    std::fs::create_dir_all(&folder)?;
    lock_runtime::init(&url).await?;

    let routes = Router::new()
        .route("/orders/{id}/settle", post(settle))
        .route("/orders", put(amend))
        .with_state(App { ledger: Ledger { folder } });
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on {}", listener.local_addr()?);
    // On SIGTERM or Ctrl-C handlers get two seconds, then the server closes.
    let stopped = async {
        let report = lock_runtime::shutdown_on_signal(Duration::from_secs(2)).await;
        println!("shut down: {report:?}");
    };
    axum::serve(listener, routes).with_graceful_shutdown(stopped).await?;
    Ok(())
}
