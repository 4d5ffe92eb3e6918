//! `lockctl show`: the holder of a key and its wait queue.

use std::fmt::Write;

use lock_runtime::{Inspection, LockPool};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::output::{End, FAINT, GOOD, HELD, Output, STRONG, duration_text, owner_text, printable};

pub(crate) async fn run(pool: &LockPool, key: &str, output: &Output) -> Result<End, Failure> {
    let shown = pool.inspect(key).await?;
    output.print(&json(key, &shown), || text(key, &shown))?;
    Ok(if shown.is_free() { End::NotHeld } else { End::Done })
}

/// The fields of the inspection, and the key.
fn json(key: &str, shown: &Inspection) -> Value {
    let mut value = json!(shown);
    value["key"] = key.into();
    value
}

fn text(key: &str, shown: &Inspection) -> String {
    let mut text = format!("{STRONG}{}{STRONG:#}", printable(key));
    let mut row = |name: &str, value: String| {
        let _ = write!(text, "\n  {FAINT}{name:<8}{FAINT:#} {value}");
    };
    match &shown.holder {
        None => row("state", format!("{GOOD}free{GOOD:#}")),
        Some(holder) => {
            row("state", format!("{HELD}held{HELD:#}"));
            row("holder", owner_text(holder.owner));
            if let Some(info) = &holder.info {
                row("process", format!("{}/{}", printable(&info.host), info.process_id));
                if let Some(call_site) = &info.call_site {
                    row("site", printable(call_site).into_owned());
                }
            }
            if let Some(left) = holder.expires_in {
                row("expires", format!("in {}, if it is not renewed", duration_text(left)));
            }
            if let Some(fence) = holder.fence {
                row("fence", fence.to_string());
            }
        }
    }
    if let Some(waiting) = shown.waiting {
        row("waiting", waiting.to_string());
    }
    for (number, waiter) in (1..).zip(&shown.waiters) {
        row("", format!("{number}. {}", owner_text(waiter.owner)));
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lock_runtime::{Fence, LockHolder, OwnerInfo, WaitingOwner};

    use super::*;

    #[test]
    fn everything_that_is_known_is_shown() {
        let holder = LockHolder::new(None)
            .with_expiry(Some(Duration::from_secs(7)))
            .with_fence(Some(Fence::new(34)))
            .with_info(OwnerInfo::parse("web-7/4711 src/\u{202e}orders.rs:42".as_bytes()));
        let shown = Inspection::new(Some(holder)).with_queue([WaitingOwner::new(None)], 12);
        let plain = anstream::adapter::strip_str(&text("order:1\n", &shown)).to_string();
        assert_eq!(
            plain,
            "order:1\\n\n  state    held\n  holder   another client\n  \
             process  web-7/4711\n  site     src/\\u{202e}orders.rs:42\n  \
             expires  in 7.0 s, if it is not renewed\n  fence    34\n  waiting  12\n           1. another client\n"
        );
        let value = json("order:1", &shown);
        assert_eq!(value["holder"]["fence"], 34);
        assert_eq!(value["holder"]["expires_in_ms"], 7_000);
        let info =
            json!({ "host": "web-7", "process_id": 4711, "call_site": "src/\u{202e}orders.rs:42" });
        assert_eq!(value["holder"]["info"], info);
        assert_eq!((&value["key"], &value["waiting"]), (&json!("order:1"), &json!(12)));
    }
}
