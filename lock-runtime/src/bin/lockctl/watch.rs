//! `lockctl watch`: the table of `ls`, read again and again.

use tokio::time::sleep;

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

pub(crate) async fn run(
    pool: &LockPool,
    args: &WatchArgs,
    output: &Output,
) -> Result<End, Failure> {
    let mut rounds = 0_u64;
    loop {
        let listing = Listing::read(pool, &args.list).await?;
        match output.format {
            // One line for each reading.
            Format::Json => output.raw(format!("{}\n", listing.json()).as_bytes())?,
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
        sleep(args.interval).await;
    }
}
