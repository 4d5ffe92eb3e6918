//! `lockctl release`: takes a lock away from the holder that was shown, and names the operator in the event of it.

use std::io::{self, BufRead, IsTerminal, Write};
use std::time::Duration;

use lock_runtime::{LockHolder, LockPool};
use serde_json::json;

use crate::args::ReleaseArgs;
use crate::event_lines;
use crate::failure::Failure;
use crate::output::{End, GOOD, HELD, Output, STRONG, holder_text, owner_text, printable};

pub(crate) async fn run(
    pool: &LockPool,
    args: &ReleaseArgs,
    output: &Output,
) -> Result<End, Failure> {
    let key = args.key.as_str();
    let shown = pool.inspect(key).await?;
    let Some(holder) = shown.holder else {
        let free = json!({ "key": key, "released": false, "holder": null });
        output.print(&free, || format!("{}: {GOOD}free{GOOD:#}\n", printable(key)))?;
        return Ok(End::NotHeld);
    };
    if let Some(expected) = &args.owner
        && *expected != owner_text(holder.owner)
    {
        return report(output, key, &holder, false);
    }
    confirm(args, &holder, shown.waiting)?;
    event_lines::print();
    let released = pool.force_release_by(&args.operator, key, &holder).await;
    // Its events are printed by then, even after an error.
    pool.shutdown(Duration::ZERO).await;
    report(output, key, &holder, released?)
}

fn report(output: &Output, key: &str, holder: &LockHolder, released: bool) -> Result<End, Failure> {
    output.print(&json!({ "key": key, "released": released, "holder": holder }), || {
        let (key, holder) = (printable(key), holder_text(holder));
        if released {
            format!("{key}: {GOOD}released{GOOD:#} from {holder}\n")
        } else {
            format!(
                "{key}: {HELD}not released{HELD:#}, that owner does not hold it; seen: {holder}\n"
            )
        }
    })?;
    Ok(if released { End::Done } else { End::NotHeld })
}

/// Asks, and says which holder loses its lock.
fn confirm(args: &ReleaseArgs, holder: &LockHolder, waiting: Option<usize>) -> Result<(), Failure> {
    let (key, text) = (printable(&args.key), holder_text(holder));
    if !args.force {
        return Err(Failure::Refused(format!(
            "`{key}` is held by {text}; its holder releases it, or its ttl ends it. Pass `--force` to take it away: the holder's body is cancelled"
        )));
    }
    if args.yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() {
        return Err(Failure::Refused(format!(
            "`{key}` is held by {text}, and there is no terminal to ask at; pass `--yes`, and `--owner` to affect only this holder"
        )));
    }
    let queue = waiting.map_or_else(String::new, |count| format!(" {count} wait."));
    let question = format!(
        "{STRONG}{key}{STRONG:#} is held by {text}.{queue}\nIts body is cancelled, and the next owner is granted the lock. Release it? [y/N] "
    );
    let mut stderr = anstream::stderr();
    stderr.write_all(question.as_bytes())?;
    stderr.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    if matches!(answer.trim(), "y" | "Y" | "yes") {
        return Ok(());
    }
    Err(Failure::Refused("nothing was released".to_owned()))
}
