//! `lockctl doctor`: the checks of a store, a verdict and a remedy for each.

use std::fmt::Write;
use std::time::Duration;

use lock_runtime::backend::Warning;
use lock_runtime::{Finding, LockError, LockPool, Verdict};
use serde_json::json;

use crate::args::StoreArgs;
use crate::failure::Failure;
use crate::latency::Latency;
use crate::output::{BAD, End, FAINT, GOOD, HELD, Output, latency_text, printable};

/// The number of requests that measure the latency.
const REQUESTS: usize = 100;

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
    let is_good = findings.iter().all(|finding| finding.verdict == Verdict::Good);
    Ok(if is_good { End::Done } else { End::Warned })
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
    findings.insert(0, finding);
    Ok(latency)
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
