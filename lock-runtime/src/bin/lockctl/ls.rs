//! `lockctl ls`: the locks of a store, with their holders.

use std::fmt::Write;
use std::panic::resume_unwind;
use std::time::{Duration, Instant};

use lock_runtime::{Inspection, Key, LockError, LockPool};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::args::ListArgs;
use crate::failure::Failure;
use crate::output::{BAD, End, FAINT, Output, STRONG, duration_text, owner_text, printable};

/// Locks of a store, one row each.
pub(crate) struct Listing {
    /// Where silent nodes of a quorum decide, the holder is not known.
    rows: Vec<(Key, Result<Inspection, LockError>)>,
    left_out: LeftOut,
    /// Whether any lock could be read, including one that is free by now.
    has_answer: bool,
}

/// Locks that match, and have no row.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LeftOut {
    None,
    /// More than the limit.
    AboveLimit,
    /// After the point at which the search of the store ended: the store has too many keys, or moves some.
    BehindSearch,
    /// Not read, as the store no longer answered.
    Unread(usize),
}

pub(crate) async fn run(pool: &LockPool, args: &ListArgs, output: &Output) -> Result<End, Failure> {
    let listing = Listing::read(pool, args).await?;
    output.print(&listing.json(), || listing.text())?;
    Ok(listing.end())
}

impl Listing {
    /// The locks that match now. One that is released meanwhile is left out.
    #[allow(clippy::disallowed_methods)]
    pub(crate) async fn read(pool: &LockPool, args: &ListArgs) -> Result<Self, Failure> {
        /// How many locks are read at the same time.
        const TOGETHER: usize = 32;
        /// How long reads without any answer may take: a store that has gone takes its time limit for each of them.
        const PATIENCE: Duration = Duration::from_secs(2);
        let found = pool.list(args.pattern(), args.limit).await?;
        let left_out = match found.is_complete {
            true => LeftOut::None,
            false if found.keys.len() >= args.limit => LeftOut::AboveLimit,
            false => LeftOut::BehindSearch,
        };
        let rows = Vec::with_capacity(found.keys.len());
        let mut listing = Self { rows, left_out, has_answer: false };
        let mut keys = found.keys.into_iter();
        let mut silent_since = Instant::now();
        loop {
            let reads: Vec<_> = keys.by_ref().take(TOGETHER).map(|key| read(pool, key)).collect();
            if reads.is_empty() {
                return Ok(listing);
            }
            let mut has_answer = false;
            for read in reads {
                let (key, shown) =
                    read.await.unwrap_or_else(|error| resume_unwind(error.into_panic()));
                has_answer |= shown.is_ok();
                if !shown.as_ref().is_ok_and(Inspection::is_free) {
                    listing.rows.push((key, shown));
                }
            }
            if has_answer {
                listing.has_answer = true;
                silent_since = Instant::now();
            } else if keys.len() > 0 && silent_since.elapsed() >= PATIENCE {
                listing.left_out = LeftOut::Unread(keys.len());
                return Ok(listing);
            }
        }
    }

    /// Rows without a holder are no success, and neither is a part of the rows.
    pub(crate) fn end(&self) -> End {
        match self.rows.iter().any(|(_, shown)| shown.is_err()) {
            false if self.left_out == LeftOut::BehindSearch => End::Warned,
            false => End::Done,
            true if self.has_answer => End::Warned,
            true => End::Unreachable,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn json(&self) -> Value {
        let row = |(key, shown): &(Key, Result<Inspection, LockError>)| {
            let mut value = match shown {
                Ok(shown) => json!(shown),
                Err(error) => json!({ "error": error.to_string() }),
            };
            value["key"] = key.as_str().into();
            value
        };
        let locks: Vec<_> = self.rows.iter().map(row).collect();
        let (left_out, unread) = match self.left_out {
            LeftOut::None => (None, 0),
            LeftOut::AboveLimit => (Some("limit"), 0),
            LeftOut::BehindSearch => (Some("search"), 0),
            LeftOut::Unread(count) => (Some("unread"), count),
        };
        let is_complete = left_out.is_none();
        json!({ "locks": locks, "complete": is_complete, "left_out": left_out, "unread": unread })
    }

    /// A table. Colours surround whole cells, so that the columns stay aligned.
    pub(crate) fn text(&self) -> String {
        let head = ["KEY", "HOLDER", "EXPIRES", "FENCE", "WAITING", "PROCESS"];
        let mut cells = vec![head.map(str::to_owned)];
        cells.extend(self.rows.iter().map(|(key, shown)| row(key, shown)));
        let width = |column: usize| {
            cells.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
        };
        // The last cell ends the line.
        let widths: [usize; 6] =
            std::array::from_fn(|column| if column == 5 { 0 } else { width(column) });
        let mut text = String::new();
        for (number, row) in cells.iter().enumerate() {
            let style = if number == 0 { FAINT } else { STRONG };
            let [key, rest @ ..] = row;
            let _ = write!(text, "{style}{key:<width$}{style:#}", width = widths[0]);
            for (cell, width) in rest.iter().zip(&widths[1..]) {
                let style = if number == 0 { FAINT } else { clap::builder::styling::Style::new() };
                let _ = write!(text, "  {style}{cell:<width$}{style:#}");
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        match self.left_out {
            LeftOut::None => {}
            LeftOut::AboveLimit => {
                text += "there are more: pass a pattern, or a greater `--limit`\n";
            }
            LeftOut::BehindSearch => {
                text += "the search has ended early, and locks may be missing: the store has too many keys, or moves some; `lockctl show KEY` reads one lock\n";
            }
            LeftOut::Unread(count) => {
                let _ = writeln!(text, "{count} more were not read: the store no longer answers");
            }
        }
        let errors = self.rows.iter().filter_map(|(_, shown)| shown.as_ref().err());
        if let Some(error) = errors.into_iter().next() {
            let _ = writeln!(text, "{BAD}unknown:{BAD:#} {}", printable(&error.to_string()));
        }
        text
    }
}

fn read(pool: &LockPool, key: Key) -> JoinHandle<(Key, Result<Inspection, LockError>)> {
    let pool = pool.clone();
    tokio::spawn(async move {
        let shown = pool.inspect(&key).await;
        (key, shown)
    })
}

fn row(key: &Key, shown: &Result<Inspection, LockError>) -> [String; 6] {
    let key = printable(key.as_str()).into_owned();
    let Ok(shown) = shown else {
        let [expires, fence, waiting, process] = ["-"; 4].map(str::to_owned);
        return [key, "unknown".to_owned(), expires, fence, waiting, process];
    };
    let holder = shown.holder.as_ref();
    let owner = holder.map_or_else(String::new, |holder| owner_text(holder.owner));
    let expires = holder.and_then(|holder| holder.expires_in).map(duration_text);
    let fence = holder.and_then(|holder| holder.fence).map(|fence| fence.to_string());
    let waiting = shown.waiting.map(|count| count.to_string());
    let process = holder.and_then(|holder| holder.info.as_ref());
    let process = process.map(|info| printable(&info.to_string()).into_owned());
    let [expires, fence, waiting, process] =
        [expires, fence, waiting, process].map(|cell| cell.unwrap_or_else(|| "-".to_owned()));
    [key, owner, expires, fence, waiting, process]
}

#[cfg(test)]
mod tests {
    use lock_runtime::{Fence, LockHolder, OwnerInfo};

    use super::*;

    #[test]
    fn columns_are_aligned() {
        let holder = LockHolder::new(None).with_expiry(Some(Duration::from_secs(7)));
        let info = OwnerInfo::parse(b"web-7/4711 src/orders.rs:42");
        let fenced = holder.clone().with_fence(Some(Fence::new(34))).with_info(info);
        let listing = Listing {
            rows: vec![
                (Key::from("a"), Ok(Inspection::new(Some(fenced)).with_queue([], 2))),
                (Key::from("order:ä"), Ok(Inspection::new(Some(holder)))),
            ],
            left_out: LeftOut::AboveLimit,
            has_answer: true,
        };
        let plain = anstream::adapter::strip_str(&listing.text()).to_string();
        assert_eq!(
            plain,
            "KEY      HOLDER          EXPIRES  FENCE  WAITING  PROCESS\n\
             a        another client  7.0 s    34     2        web-7/4711 src/orders.rs:42\n\
             order:ä  another client  7.0 s    -      -        -\n\
             there are more: pass a pattern, or a greater `--limit`\n"
        );
        let json = listing.json();
        assert_eq!((&json["locks"][0]["key"], &json["left_out"]), (&"a".into(), &"limit".into()));
        assert_eq!(listing.end(), End::Done);
    }

    #[test]
    fn a_search_that_ended_early_is_told_and_no_success() {
        let listing =
            Listing { rows: Vec::new(), left_out: LeftOut::BehindSearch, has_answer: false };
        assert!(listing.text().contains("locks may be missing"), "{}", listing.text());
        let json = listing.json();
        assert_eq!((&json["complete"], &json["left_out"]), (&false.into(), &"search".into()));
        assert_eq!(listing.end(), End::Warned);
    }
}
