//! `lockctl watch`: the table of `ls`, read again as the store reports a change, and at intervals.

use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};

use lock_runtime::LockPool;

use crate::args::WatchArgs;
use crate::failure::Failure;
use crate::ls::Listing;
use crate::output::{End, FAINT, Format, Output};

/// Changes that follow each other faster are shown together.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);

#[allow(clippy::disallowed_methods)]
pub(crate) async fn run(
    pool: &LockPool,
    args: &WatchArgs,
    output: &Output,
) -> Result<End, Failure> {
    let mut changes = pool.changes(args.list.pattern());
    let mut rounds = 0_u64;
    loop {
        rounds += 1;
        let is_last = args.count.is_some_and(|count| rounds >= count);
        let began = Instant::now();
        let listing = match Listing::read(pool, &args.list).await {
            Ok(listing) => listing,
            // A store that fails over is back soon.
            Err(failure) if rounds > 1 && !is_last => {
                failure.print();
                sleep(args.interval).await;
                continue;
            }
            Err(failure) => return Err(failure),
        };
        let took = began.elapsed();
        match output.format {
            // One line for each reading.
            Format::Json => output.json_line(&listing.json())?,
            Format::Text => {
                let foot = format!("{FAINT}{} locks; Ctrl-C ends{FAINT:#}\n", listing.len());
                output.screen(&listing.text(), &foot)?;
            }
        }
        if is_last {
            return Ok(listing.end());
        }
        // A slow search is not repeated constantly.
        let pause = SHORTEST_PAUSE.max(took * 10).min(args.interval.max(took * 10));
        sleep(pause).await;
        let _ = timeout(args.interval.saturating_sub(pause), changes.changed()).await;
    }
}
