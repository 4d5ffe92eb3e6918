//! `lockctl doctor`: the checks of a store, a verdict and a remedy for each.

// A program that measures reads clocks.
#![allow(clippy::disallowed_methods)]

use std::fmt::Write;
use std::time::{Duration, Instant};

use lock_runtime::backend::Warning;
use lock_runtime::{Finding, LockError, LockPool, Verdict, Wait};
use serde_json::json;

use crate::args::StoreArgs;
use crate::failure::Failure;
use crate::latency::Latency;
use crate::output::{BAD, End, FAINT, GOOD, HELD, Output, latency_text, printable};
use crate::unused_key::unused_key;

/// The number of requests that measure the latency.
const REQUESTS: usize = 100;

/// How long a `doctor` that is killed leaves its key.
const TTL: Duration = Duration::from_secs(5);

/// A slower store makes short ttls and request timeouts fail.
const SLOW: Duration = Duration::from_millis(100);

pub(crate) async fn run(store: &StoreArgs, output: &Output) -> Result<End, Failure> {
    let pool = match store.connect().await {
        Ok(pool) => pool,
        Err(failure) => {
            let Some(error) = failure.of_store() else { return Err(failure) };
            let json = json!({ "connected": false, "error": error.to_string(), "findings": [] });
            let text = printable(&error.to_string()).into_owned();
            output.print(&json, || line(BAD, "bad", "connect", &text, None))?;
            return Ok(End::Unreachable);
        }
    };
    let mut findings = Vec::new();
    let checked = check(&pool, &mut findings).await;
    let json = json!({
        "connected": true,
        "latency": checked.as_ref().ok().map(|latency| latency.json()),
        "error": checked.as_ref().err().map(ToString::to_string),
        "findings": findings,
    });
    // Partial findings are better than none.
    output.print(&json, || {
        let servers = || findings.iter().filter_map(|finding| finding.server.as_ref());
        let several = servers().any(|server| Some(server) != servers().next());
        findings.iter().map(|finding| finding_text(finding, several)).collect()
    })?;
    checked?;
    let is_good = |finding: &Finding| finding.verdict == Verdict::Good;
    Ok(if findings.iter().any(|finding| finding.verdict == Verdict::Bad) {
        End::Unreachable
    } else if findings.iter().all(is_good) {
        End::Done
    } else {
        End::Warned
    })
}

/// Adds what the checks find, up to the first that fails.
async fn check(pool: &LockPool, findings: &mut Vec<Finding>) -> Result<Latency, LockError> {
    findings.extend(pool.diagnose().await?);
    let latency = latency_of(pool).await?;
    let measured = format!("{}, {REQUESTS} requests", latency_text(&latency));
    let finding = if latency.p99 > SLOW {
        let remedy = "use ttls of many round trips, and a `request_timeout` above the slowest ones";
        Finding::warning("latency", &Warning::new(measured, remedy))
    } else {
        Finding::good("latency", measured)
    };
    // Fences need scripts.
    let lacks = |finding: &Finding| finding.check == "scripts" && finding.verdict != Verdict::Good;
    let has_fences = !findings.iter().any(lacks);
    findings.splice(0..0, [finding, grant(pool, has_fences).await]);
    Ok(latency)
}

/// Acquires a lock as a program does, and releases it: the other checks only read.
async fn grant(pool: &LockPool, has_fences: bool) -> Finding {
    let began = Instant::now();
    let request = pool
        .lock(unused_key("doctor"))
        .ttl(TTL)
        .wait(Wait::For(Duration::ZERO))
        .fencing(has_fences);
    let released = async { request.acquire().await?.release().await };
    match released.await {
        Ok(()) => {
            let fence = if has_fences { "with" } else { "without" };
            let millis = began.elapsed().as_secs_f64() * 1_000.0;
            Finding::good(
                "lock",
                format!("acquired {fence} a fence and released in {millis:.2} ms"),
            )
        }
        Err(error) => Finding::bad("lock", error.to_string()),
    }
}

async fn latency_of(pool: &LockPool) -> Result<Latency, LockError> {
    let mut spans = Vec::with_capacity(REQUESTS);
    for _ in 0..REQUESTS {
        spans.push(pool.ping().await?);
    }
    Ok(Latency::of(spans))
}

fn finding_text(finding: &Finding, several: bool) -> String {
    let (style, word) = match finding.verdict {
        Verdict::Good => (GOOD, "ok"),
        Verdict::Warning => (HELD, "warn"),
        Verdict::Bad => (BAD, "bad"),
        _ => (FAINT, "?"),
    };
    let text = match &finding.server {
        // A warning names its server.
        Some(server) if several && finding.verdict != Verdict::Warning => {
            format!("{}: {}", server, finding.text)
        }
        _ => finding.text.clone(),
    };
    line(style, word, finding.check, &text, finding.remedy)
}

fn line(
    style: clap::builder::styling::Style,
    word: &str,
    check: &str,
    text: &str,
    remedy: Option<&str>,
) -> String {
    let mut line = format!("{style}{word:<5}{style:#}{check:<12} {}\n", printable(text));
    if let Some(remedy) = remedy {
        let _ = writeln!(line, "{:17} {FAINT}->{FAINT:#} {remedy}", "");
    }
    line
}
