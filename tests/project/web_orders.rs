//! Two instances of a web example settle every order once: with axum and with actix-web.

#![allow(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lock_tests::{Latency, Monitor, RedisServer, Worker, eventually, eventually_async, example};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

const REQUESTS: usize = 10_000;
const ORDERS: usize = 100;
const CLIENTS: usize = 32;
const CLOSED: usize = 1_000;
/// Sockets that are closed together.
const GROUP: usize = 20;
/// The limit of effects that take a moment; the ttl of the example is 5 s.
const SOON: Duration = Duration::from_millis(4_500);
/// From the closed sockets to free locks, in a third of all rounds.
const PROMPT: Duration = Duration::from_millis(100);
/// The limit of what a busy machine may delay.
const DEADLINE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_order_is_settled_once_with_axum() {
    every_order_is_settled_once("axum_orders", true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_order_is_settled_once_with_actix() {
    every_order_is_settled_once("actix_orders", false).await;
}

/// `cancels`: whether the framework drops a handler when its client disconnects.
async fn every_order_is_settled_once(example: &'static str, cancels: bool) {
    let server = RedisServer::start();
    let ledger = tempfile::tempdir().unwrap();
    let instances = [(); 2].map(|()| Instance::start(example, &server, ledger.path()));
    let addresses = [instances[0].address.clone(), instances[1].address.clone()];

    // All clients are after the same order at a time, half of them at each instance.
    let next = Arc::new(AtomicUsize::new(0));
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (next, address) = (next.clone(), addresses[client % 2].clone());
        clients.spawn(async move {
            let mut connection = Client::connect(&address).await;
            let mut answers = Vec::new();
            loop {
                let request = next.fetch_add(1, Ordering::SeqCst);
                if request >= REQUESTS {
                    return answers;
                }
                let order = request * ORDERS / REQUESTS;
                answers.push((order, connection.settle(order).await));
            }
        });
    }
    let answers: Vec<(usize, Response)> = clients.join_all().await.into_iter().flatten().collect();
    assert_eq!(answers.len(), REQUESTS);
    let mut settled: BTreeMap<usize, usize> = (0..ORDERS).map(|order| (order, 0)).collect();
    let mut counts: BTreeMap<u16, usize> = BTreeMap::new();
    for (order, Response { status, retry_after }) in answers {
        *counts.entry(status).or_default() += 1;
        let passes = [409, 503].contains(&status);
        assert_eq!(retry_after, passes.then_some(1), "{status}");
        if status == 200 {
            *settled.get_mut(&order).unwrap() += 1;
        }
    }
    println!("answers: {counts:?}");
    // 410: settled already.
    assert!(counts.keys().all(|status| [200, 409, 410, 503].contains(status)), "{counts:?}");
    // All requests for an order may have met a store that was slow for a moment.
    let mut client = Client::connect(&addresses[0]).await;
    for (order, times) in settled.iter_mut().filter(|(_, times)| **times == 0) {
        client.settle_at_last(*order).await;
        *times += 1;
    }
    assert!(settled.values().all(|times| *times == 1), "{settled:?}");
    for order in 0..ORDERS {
        assert_eq!(entries(ledger.path(), order), 1, "order {order}");
    }

    let cut = close_in_mid_handler(&server, &addresses, ledger.path(), cancels).await;

    // The service continues, and settles the interrupted orders.
    for order in &cut {
        client.settle_at_last(*order).await;
        assert_eq!(entries(ledger.path(), *order), 1, "order {order}");
    }

    // Some are at work when the signal comes, and are served.
    let mut late = JoinSet::new();
    for n in 0..8 {
        let address = addresses[n % 2].clone();
        let order = 3_000 + n;
        late.spawn(async move { (order, Client::connect(&address).await.settle(order).await) });
    }
    eventually_async(DEADLINE, "all late requests are at work, or were", async || {
        (3_000..3_008).all(|order| {
            server.cli(&["EXISTS", &format!("order:{order}")]) == "1"
                || entries(ledger.path(), order) > 0
        })
    })
    .await;
    for Instance { worker, .. } in &instances {
        worker.terminate();
    }
    for (order, Response { status, .. }) in late.join_all().await {
        // 503: the store was slow.
        let settled = entries(ledger.path(), order) == 1;
        assert_eq!(status, if settled { 200 } else { 503 }, "order {order}");
    }
    for Instance { worker, .. } in &instances {
        let status = worker.wait_for_exit(DEADLINE);
        assert!(status.success(), "{status}: {:#?}", worker.stderr());
        let report = worker.stdout().pop().unwrap();
        assert!(report.starts_with("shut down: ") && report.contains("abandoned: 0"), "{report}");
        // Nothing but warnings of the pool, such as one of a server that keeps nothing on disk.
        let mut errors = worker.stderr();
        errors.retain(|line| !line.contains(" WARN lock_runtime: "));
        assert_eq!(errors, [""; 0]);
    }
    for address in &addresses {
        TcpStream::connect(address).await.expect_err("no connection is accepted");
    }
    assert_eq!(server.cli(&["KEYS", "order:*"]), "");
}

/// Closes sockets while their handlers hold locks. Returns the orders that were thereby not settled.
async fn close_in_mid_handler(
    server: &RedisServer,
    addresses: &[String; 2],
    ledger: &Path,
    cancels: bool,
) -> Vec<usize> {
    let monitor = Monitor::start(server);
    let cut = |closed: usize| -> Vec<usize> {
        (1_000..1_000 + closed).filter(|order| entries(ledger, *order) == 0).collect()
    };
    let (mut closed, mut free) = (0, Latency::below(PROMPT, (CLOSED / GROUP).div_ceil(3)));
    // On a slow machine more handlers finish before their socket is closed. Then more sockets are.
    while closed < CLOSED || (cancels && closed < 5 * CLOSED && cut(closed).len() <= CLOSED / 4) {
        let group = 1_000 + closed..1_000 + closed + GROUP;
        let mut clients = Vec::new();
        for order in group.clone() {
            let mut client = Client::connect(&addresses[order % 2]).await;
            client.ask(order).await;
            clients.push(client);
        }
        eventually_async(DEADLINE, "handlers are at work", async || {
            let locked = server.cli(&["KEYS", "order:*"]).lines().count();
            locked >= group.len() / 2 || group.clone().any(|order| entries(ledger, order) > 0)
        })
        .await;
        let ended = Instant::now();
        drop(clients);
        eventually(SOON, "no lock is left behind", || server.cli(&["KEYS", "order:*"]).is_empty());
        free.push(ended.elapsed());
        closed += group.len();
    }
    let taken = monitor.settled().iter().filter(|ran| ran.name() == "SET").count();
    let cut = cut(closed);
    println!(
        "{closed} closed sockets: {taken} handlers had begun, {} were cut short; free after {free}",
        cut.len()
    );
    assert!(!free.wants_more(), "{free}");
    assert!(taken > CLOSED / 4, "{taken} begun");
    assert!(!cancels || cut.len() > CLOSED / 4, "{} cut", cut.len());
    cut
}

/// How often the order was settled.
fn entries(ledger: &Path, order: usize) -> usize {
    let text = fs::read_to_string(ledger.join(order.to_string())).unwrap_or_default();
    text.lines().filter(|line| *line == "settled").count()
}

struct Instance {
    worker: Worker,
    address: String,
}

impl Instance {
    fn start(name: &str, server: &RedisServer, ledger: &Path) -> Self {
        let args = [&server.url(), "0", ledger.to_str().unwrap()];
        let worker = Worker::start(&example(name), &args);
        let line = worker.wait_for_line(DEADLINE, |line| line.starts_with("listening on "));
        let address = line.trim_start_matches("listening on ").to_owned();
        Self { worker, address }
    }
}

struct Response {
    status: u16,
    /// In seconds.
    retry_after: Option<u64>,
}

/// A connection that is kept alive.
struct Client {
    stream: TcpStream,
    received: Vec<u8>,
}

impl Client {
    async fn connect(address: &str) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, received: Vec::new() }
    }

    async fn settle(&mut self, order: usize) -> Response {
        self.ask(order).await;
        let answer = tokio::time::timeout(Duration::from_secs(30), self.answer());
        answer.await.expect("every request is answered")
    }

    /// Again after a 503, which is the answer while the store is slow.
    async fn settle_at_last(&mut self, order: usize) {
        let mut status = 503;
        for _ in 0..50 {
            status = self.settle(order).await.status;
            if status != 503 {
                break;
            }
        }
        assert_eq!(status, 200, "order {order}");
    }

    async fn ask(&mut self, order: usize) {
        let request = format!(
            "POST /orders/{order}/settle HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
        );
        self.stream.write_all(request.as_bytes()).await.unwrap();
    }

    async fn answer(&mut self) -> Response {
        loop {
            let text = String::from_utf8_lossy(&self.received).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                let length: usize = length.map_or(0, |length| length.parse().unwrap());
                if body.len() >= length {
                    self.received.drain(..head.len() + 4 + length);
                    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
                    let after = head.lines().find_map(|line| line.strip_prefix("retry-after: "));
                    return Response { status, retry_after: after.map(|it| it.parse().unwrap()) };
                }
            }
            let read = self.stream.read_buf(&mut self.received).await.unwrap();
            assert!(read > 0, "the server hung up: {text:?}");
        }
    }
}
