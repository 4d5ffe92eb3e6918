//! `lockctl watch`: the table of `ls`, read again as the store reports a change, and at intervals.

use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};

use lock_runtime::LockPool;

use crate::args::WatchArgs;
use crate::failure::Failure;
use crate::list::Listing;
use crate::output::{End, FAINT, Format, Output};

/// To the first line of the terminal.
const TOP: &str = "\u{1b}[H";
/// Clears what is left of the line, and of the screen.
const REST_OF_LINE: &str = "\u{1b}[K";
const REST_OF_SCREEN: &str = "\u{1b}[J";

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
        let began = Instant::now();
        let listing = match Listing::read(pool, &args.list).await {
            Ok(listing) => listing,
            // A store that fails over is back soon.
            Err(failure) if rounds > 0 => {
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
                let text = (listing.text() + &foot).replace('\n', &format!("{REST_OF_LINE}\n"));
                output.raw(format!("{TOP}{text}{REST_OF_SCREEN}").as_bytes())?;
            }
        }
        rounds += 1;
        if args.count.is_some_and(|count| rounds >= count) {
            return Ok(End::Done);
        }
        // A search that takes long is not repeated all the time.
        let pause = SHORTEST_PAUSE.max(took * 10).min(args.interval.max(took * 10));
        sleep(pause).await;
        let _ = timeout(args.interval.saturating_sub(pause), changes.changed()).await;
    }
}
