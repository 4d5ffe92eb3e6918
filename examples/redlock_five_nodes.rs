//! A lock that is held by a majority of five independent Redis servers. One freezes, without effect. Another loses
//! its data, and the next renewal restores the lock there. A third dies, and a majority remains. With two more gone
//! there is no majority, and the error says so.
//!
//! ```text
//! cargo run --example redlock_five_nodes      # starts its own servers; needs `redis-server`
//! ```

// The example measures time.
#![allow(clippy::disallowed_methods)]

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lock_runtime::{LockError, LockPool, distributed_lock};

#[distributed_lock(key = "order:<id>", ttl = "2s", pool = pool, guard = lock)]
async fn settle(pool: &LockPool, id: u64) -> Result<u64, LockError> {
    Ok(lock.fence().map_or(0, u64::from))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut nodes = Vec::new();
    for _ in 0..5 {
        nodes.push(Node::start()?);
    }
    let hosts: Vec<_> = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
    let pool = LockPool::connect(&format!("redlock://{}", hosts.join(","))).await?;

    let before = settle_often(&pool, "five nodes are up").await?;
    nodes[0].signal("STOP")?;
    let after = settle_often(&pool, "one is frozen").await?;
    println!("and fences keep growing: {}", if after > before { "yes" } else { "no" });
    nodes[0].signal("CONT")?;

    let guard = pool.lock("order:7").ttl(Duration::from_secs(2)).acquire().await?;
    nodes[1].restart()?;
    println!("a node came back empty, and the lock is held: {}", guard.verify().await.is_ok());
    guard.release().await?;

    for (gone, node) in nodes.iter_mut().take(3).enumerate() {
        node.stop();
        println!("{} of five gone: {}", gone + 1, outcome(settle(&pool, 1).await));
    }
    Ok(())
}

/// Returns the last fence.
async fn settle_often(pool: &LockPool, when: &str) -> Result<u64, LockError> {
    let mut spans = Vec::new();
    let mut fence = 0;
    for _ in 0..200 {
        let began = Instant::now();
        fence = settle(pool, 42).await?;
        spans.push(began.elapsed());
    }
    spans.sort();
    println!("{when}: half of 200 orders are settled within {:?} each", spans[100]);
    Ok(fence)
}

fn outcome(settled: Result<u64, LockError>) -> String {
    match settled {
        Ok(_) => "settled".to_owned(),
        Err(error) => format!("not settled: {error}"),
    }
}

/// A server without persistence. Dropping the value stops it.
struct Node {
    port: u16,
    process: Child,
}

impl Node {
    fn start() -> std::io::Result<Self> {
        // A free port; a real deployment has its ports in a configuration.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let node = Self { port, process: Self::spawn(port)? };
        node.wait_until_it_answers();
        Ok(node)
    }

    fn spawn(port: u16) -> std::io::Result<Child> {
        Command::new("redis-server")
            .args(["--port", &port.to_string(), "--save", "", "--appendonly", "no"])
            .args(["--bind", "127.0.0.1"])
            .stdout(Stdio::null())
            .spawn()
    }

    fn wait_until_it_answers(&self) {
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            std::thread::yield_now();
        }
    }

    fn restart(&mut self) -> std::io::Result<()> {
        self.stop();
        self.process = Self::spawn(self.port)?;
        self.wait_until_it_answers();
        Ok(())
    }

    fn stop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    fn signal(&self, signal: &str) -> std::io::Result<()> {
        let pid = self.process.id().to_string();
        Command::new("kill").args([&format!("-{signal}"), &pid]).status().map(drop)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop();
    }
}
