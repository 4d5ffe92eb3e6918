//! `lockctl doctor`: the checks of a store, a verdict and a remedy for each.

use std::fmt::Write;
use std::time::Duration;

use lock_runtime::{Finding, LockPool, Verdict};
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
    let findings = pool.diagnose().await?;
    let latency = match latency_of(&pool).await {
        Ok(latency) => latency,
        Err(failure) => {
            // Partial findings are better than none.
            let json = json!({ "connected": true, "error": failure.of_store().map(ToString::to_string), "findings": findings });
            output.print(&json, || findings.iter().map(|it| finding_text(it, true)).collect())?;
            return Err(failure);
        }
    };
    let is_slow = latency.p99 > SLOW;
    let json = json!({
        "connected": true,
        "latency": latency.json(),
        "findings": findings,
    });
    output.print(&json, || {
        let remedy = is_slow.then_some(
            "use ttls of many round trips, and a `request_timeout` above the slowest ones",
        );
        let measured = format!("{}, {REQUESTS} requests", latency_text(&latency));
        let style = if is_slow { (HELD, "warn") } else { (GOOD, "ok") };
        let mut text = line(style.0, style.1, "latency", &measured, remedy);
        let several = findings.iter().any(|finding| finding.server != findings[0].server);
        for finding in &findings {
            text += &finding_text(finding, several);
        }
        text
    })?;
    let is_good = |finding: &Finding| finding.verdict == Verdict::Good;
    Ok(if findings.iter().all(is_good) && !is_slow { End::Done } else { End::Warned })
}

async fn latency_of(pool: &LockPool) -> Result<Latency, Failure> {
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
