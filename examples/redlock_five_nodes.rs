//! A lock that is held by a majority of five independent Redis servers. One freezes, without effect. Another loses
//! its data, and the lock is still held. Then servers stop. Without two of them there is a majority; without three there is
//! none, and the error says so.
//!
//! ```text
//! cargo run --example redlock_five_nodes      # starts its own servers; needs `redis-server`
//! ```

// The example measures time.
#![allow(clippy::disallowed_methods)]

use std::io;
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
    let outcome = fail_one_by_one(&pool, &mut nodes).await;
    pool.shutdown(Duration::from_secs(1)).await;
    outcome
}

async fn fail_one_by_one(
    pool: &LockPool,
    nodes: &mut [Node],
) -> Result<(), Box<dyn std::error::Error>> {
    let before = settle_often(pool, "five nodes are up").await?;
    nodes[0].signal("STOP")?;
    let after = settle_often(pool, "one is frozen").await?;
    assert!(after > before, "fence {after} comes after {before}");
    println!("and fences keep growing");
    nodes[0].signal("CONT")?;

    let guard = pool.lock("order:7").ttl(Duration::from_secs(2)).acquire().await?;
    nodes[1].restart()?;
    guard.verify().await?;
    println!("a node came back empty, and the lock is held");
    guard.release().await?;

    for gone in 1..=2 {
        nodes[gone - 1].stop();
        settle(pool, 1).await?;
        println!("{gone} of five gone: settled");
    }
    nodes[2].stop();
    match settle(pool, 1).await {
        Ok(_) => Err("two of five servers have granted a lock".into()),
        Err(error) if error.is_backend() => {
            println!("3 of five gone: not settled: {error}");
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
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

/// A server without persistence. Dropping the value stops it.
struct Node {
    port: u16,
    process: Child,
}

impl Node {
    fn start() -> io::Result<Self> {
        // A free port; a real deployment has its ports in a configuration.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let node = Self { port, process: Self::spawn(port)? };
        node.wait_until_it_answers()?;
        Ok(node)
    }

    fn spawn(port: u16) -> io::Result<Child> {
        Command::new("redis-server")
            .args(["--port", &port.to_string(), "--save", "", "--appendonly", "no"])
            .args(["--bind", "127.0.0.1"])
            .stdout(Stdio::null())
            .spawn()
    }

    fn wait_until_it_answers(&self) -> io::Result<()> {
        let began = Instant::now();
        while let Err(error) = TcpStream::connect(("127.0.0.1", self.port)) {
            if began.elapsed() > Duration::from_secs(10) {
                return Err(error);
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    fn restart(&mut self) -> io::Result<()> {
        self.stop();
        self.process = Self::spawn(self.port)?;
        self.wait_until_it_answers()
    }

    fn stop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    fn signal(&self, signal: &str) -> io::Result<()> {
        let pid = self.process.id().to_string();
        let sent = Command::new("kill").args([&format!("-{signal}"), &pid]).status()?;
        if sent.success() {
            Ok(())
        } else {
            Err(io::Error::other(format!("kill -{signal}: {sent}")))
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop();
    }
}
