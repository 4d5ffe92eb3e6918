//! `lockctl bench`: what locks cost on a store, measured from this machine.

// A program that measures reads clocks.
#![allow(clippy::disallowed_methods)]

use std::time::{Duration, Instant};

use lock_runtime::{LockError, LockPool, Wait};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::args::{BenchArgs, StoreArgs};
use crate::failure::Failure;
use crate::latency::Latency;
use crate::output::{End, Output, STRONG, latency_text};
use crate::unused_key::unused_key;

/// How long the release of all locks may take after a failure.
const RELEASED_WITHIN: Duration = Duration::from_secs(2);

const SHORTEST_TTL: Duration = Duration::from_secs(5);
const LONGEST_TTL: Duration = Duration::from_secs(30);

/// What one part measured.
struct Measured {
    name: &'static str,
    tasks: usize,
    cycles: usize,
    took: Duration,
    /// From the call for a lock to the end of its release.
    latency: Latency,
}

/// Which keys the tasks lock.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keys {
    Own,
    Shared,
}

pub(crate) async fn run(
    store: &StoreArgs,
    args: &BenchArgs,
    output: &Output,
) -> Result<End, Failure> {
    // A bench that is killed leaves its keys for one ttl.
    let ttl = store.request_timeout().saturating_mul(4).clamp(SHORTEST_TTL, LONGEST_TTL);
    let builder = store.builder()?.ttl(ttl).max_waiters(args.tasks);
    let pool = &builder.connect().await?;
    let key = unused_key("bench");
    let parts = [
        ("one task", 1, Keys::Own),
        ("a key each", args.tasks, Keys::Own),
        ("one key", args.tasks, Keys::Shared),
    ];
    let mut all = Vec::with_capacity(parts.len());
    for (name, tasks, keys) in parts {
        match measure(pool, name, &key, tasks, keys, args.time).await {
            Ok(measured) => all.push(measured),
            Err(failure) => {
                // The locks of the other tasks would stay until their ttl is over.
                pool.shutdown(RELEASED_WITHIN).await;
                return Err(failure);
            }
        }
    }
    let json = json!({ "parts": all.iter().map(Measured::json).collect::<Vec<_>>() });
    output.print(&json, || all.iter().map(Measured::text).collect())?;
    Ok(End::Done)
}

async fn measure(
    pool: &LockPool,
    name: &'static str,
    key: &str,
    tasks: usize,
    keys: Keys,
    time: Duration,
) -> Result<Measured, Failure> {
    let mut running = JoinSet::new();
    let began = Instant::now();
    for task in 0..tasks {
        let number = if keys == Keys::Own { task } else { 0 };
        running.spawn(cycles(pool.clone(), format!("{key}:{number}"), began + time));
    }
    let mut spans = Vec::new();
    while let Some(ended) = running.join_next().await {
        // A task neither panics nor is aborted.
        if let Ok(more) = ended {
            spans.extend(more?);
        }
    }
    let (took, cycles) = (began.elapsed(), spans.len());
    Ok(Measured { name, tasks, cycles, took, latency: Latency::of(spans) })
}

/// Acquires and releases `key` until `end`. The time of each cycle.
async fn cycles(pool: LockPool, key: String, end: Instant) -> Result<Vec<Duration>, LockError> {
    let mut spans = Vec::new();
    loop {
        let began = Instant::now();
        if began >= end {
            return Ok(spans);
        }
        let guard = pool.lock(&key).wait(Wait::Forever).acquire().await?;
        guard.release().await?;
        spans.push(began.elapsed());
    }
}

impl Measured {
    fn per_second(&self) -> f64 {
        self.cycles as f64 / self.took.as_secs_f64()
    }

    fn json(&self) -> Value {
        let mut value = self.latency.json();
        value["name"] = self.name.into();
        value["tasks"] = self.tasks.into();
        value["cycles"] = self.cycles.into();
        value["cycles_per_second"] = self.per_second().round().into();
        value
    }

    fn text(&self) -> String {
        let (name, tasks, rate) = (self.name, self.tasks, self.per_second());
        let latency = latency_text(&self.latency);
        format!("{name:<11} x{tasks:<4} {STRONG}{rate:>9.0}{STRONG:#} cycles/s  {latency}\n")
    }
}
