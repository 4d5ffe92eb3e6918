//! Load for instances of `axum_orders` and `actix_orders`: 10,000 requests to settle 100 new orders, from 32 concurrent clients.
//! It counts the answers, and fails if an order was settled twice or not at all, or if an answer is unexpected.
//!
//! ```text
//! cargo run --example axum_orders -- redis://127.0.0.1:6379 8081           # a terminal each; wait for `listening on`
//! cargo run --example actix_orders -- redis://127.0.0.1:6379 8082
//! cargo run --example orders_load -- localhost:8081 localhost:8082
//! cargo run --example orders_load -- 2000 localhost:8081 localhost:8082    # fewer requests
//! ```

// The example measures time.
#![allow(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

const ORDERS: u64 = 100;
const CLIENTS: usize = 32;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (counts, addresses): (Vec<_>, Vec<_>) =
        std::env::args().skip(1).partition(|arg| arg.parse::<u64>().is_ok());
    let requests = counts.first().map_or(Ok(10_000), |count| count.parse())?;
    if addresses.is_empty() {
        return Err("name the instances: localhost:8081 localhost:8082".into());
    }
    if requests == 0 {
        return Err("0 requests test nothing".into());
    }

    // Each run has orders of its own.
    let first_order = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())?;
    let began = Instant::now();
    let next = Arc::new(AtomicU64::new(0));
    let mut clients = JoinSet::new();
    for n in 0..CLIENTS {
        let (next, address) = (next.clone(), addresses[n % addresses.len()].clone());
        clients.spawn(async move {
            let mut client = Client::connect(&address).await?;
            let mut answers = Vec::new();
            // All clients request the same order at the same time.
            loop {
                let request = next.fetch_add(1, Ordering::Relaxed);
                if request >= requests {
                    return Ok::<_, io::Error>(answers);
                }
                let order = first_order + request * ORDERS / requests;
                answers.push((order, client.settle(order).await?));
            }
        });
    }

    let mut settled: BTreeMap<u64, u32> = BTreeMap::new();
    let mut answers: BTreeMap<u16, u32> = BTreeMap::new();
    for client in clients.join_all().await {
        for (order, status) in client? {
            *answers.entry(status).or_default() += 1;
            *settled.entry(order).or_default() += u32::from(status == 200);
        }
    }
    let took = began.elapsed();
    // All requests for an order may have met a store that was slow for a moment.
    let mut client = Client::connect(&addresses[0]).await?;
    for (order, times) in settled.iter_mut().filter(|(_, times)| **times == 0) {
        for _ in 0..20 {
            match client.settle(*order).await? {
                200 => *times += 1,
                409 | 503 => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
                _ => {}
            }
            break;
        }
    }

    println!("{requests} requests in {took:.1?}");
    let mut unexpected = 0;
    for (status, count) in answers {
        let meaning = match status {
            200 => "settled",
            409 => "another request had the order",
            410 => "settled before",
            429 => "too many requests waited for the order",
            503 => "the store did not answer",
            _ => {
                unexpected += count;
                "not expected"
            }
        };
        println!("  {status} {count:>6}  {meaning}");
    }
    let wrong: Vec<_> = settled.iter().filter(|(_, times)| **times != 1).collect();
    if !wrong.is_empty() {
        return Err(format!("orders that were not settled once, and how often: {wrong:?}").into());
    }
    println!("each of {} orders was settled once", settled.len());
    if unexpected > 0 { Err(format!("{unexpected} unexpected answers").into()) } else { Ok(()) }
}

/// A connection that is kept alive.
struct Client(BufReader<TcpStream>);

impl Client {
    async fn connect(address: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    /// The status of the answer. An error after `REQUEST_TIMEOUT`.
    async fn settle(&mut self, order: u64) -> io::Result<u16> {
        timeout(REQUEST_TIMEOUT, self.exchange(order)).await?
    }

    async fn exchange(&mut self, order: u64) -> io::Result<u16> {
        let request = format!(
            "POST /orders/{order}/settle HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
        );
        self.0.write_all(request.as_bytes()).await?;
        let (mut status, mut length) = (None, 0);
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let line = line.trim_end().to_ascii_lowercase();
            if status.is_none() {
                status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
            } else if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.parse().map_err(io::Error::other)?;
            } else if line.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).await?;
        status.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}
