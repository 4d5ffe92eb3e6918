//! `lockctl ls`: the locks of a store, with their holders.

use std::fmt::Write;

use lock_runtime::{Inspection, Key, LockError, LockPool};
use serde_json::{Value, json};

use crate::args::ListArgs;
use crate::failure::Failure;
use crate::output::{End, FAINT, Output, STRONG, duration_text, owner_text, printable};

/// Locks of a store, one row each.
pub(crate) struct Listing {
    /// Where silent nodes of a quorum decide, the holder is not known.
    rows: Vec<(Key, Result<Inspection, LockError>)>,
    is_complete: bool,
}

pub(crate) async fn run(pool: &LockPool, args: &ListArgs, output: &Output) -> Result<End, Failure> {
    let listing = Listing::read(pool, args).await?;
    output.print(&listing.json(), || listing.text())?;
    Ok(End::Done)
}

impl Listing {
    /// The locks that match now. One that is released meanwhile is left out.
    pub(crate) async fn read(pool: &LockPool, args: &ListArgs) -> Result<Self, Failure> {
        let found = pool.list(args.pattern.as_deref().unwrap_or("*"), args.limit).await?;
        let mut rows = Vec::with_capacity(found.keys.len());
        for key in found.keys {
            let shown = pool.inspect(&key).await;
            if !shown.as_ref().is_ok_and(Inspection::is_free) {
                rows.push((key, shown));
            }
        }
        Ok(Self { rows, is_complete: found.is_complete })
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
        json!({ "locks": self.rows.iter().map(row).collect::<Vec<_>>(), "complete": self.is_complete })
    }

    /// A table. Colours stand around whole cells, so that the columns stay aligned.
    pub(crate) fn text(&self) -> String {
        let mut cells = vec![["KEY", "HOLDER", "EXPIRES", "FENCE", "WAITING"].map(str::to_owned)];
        cells.extend(self.rows.iter().map(|(key, shown)| row(key, shown)));
        let width = |column: usize| {
            cells.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
        };
        let widths: [usize; 5] = std::array::from_fn(width);
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
        if !self.is_complete {
            text += "there are more: pass a pattern, or a greater `--limit`\n";
        }
        text
    }
}

fn row(key: &Key, shown: &Result<Inspection, LockError>) -> [String; 5] {
    let key = printable(key.as_str()).into_owned();
    let Ok(shown) = shown else {
        let [expires, fence, waiting] = ["-"; 3].map(str::to_owned);
        return [key, "unknown".to_owned(), expires, fence, waiting];
    };
    let holder = shown.holder.as_ref();
    let owner = holder.map_or_else(String::new, |holder| owner_text(holder.owner));
    let expires = holder.and_then(|holder| holder.expires_in).map(duration_text);
    let fence = holder.and_then(|holder| holder.fence).map(|fence| fence.to_string());
    let waiting = shown.waiting.map(|count| count.to_string());
    let [expires, fence, waiting] =
        [expires, fence, waiting].map(|cell| cell.unwrap_or_else(|| "-".to_owned()));
    [key, owner, expires, fence, waiting]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lock_runtime::{Fence, LockHolder};

    use super::*;

    #[test]
    fn columns_are_aligned() {
        let holder = LockHolder::new(None).with_expiry(Some(Duration::from_secs(7)));
        let fenced = holder.clone().with_fence(Some(Fence::new(34)));
        let listing = Listing {
            rows: vec![
                (Key::from("a"), Ok(Inspection::new(Some(fenced)).with_queue([], 2))),
                (Key::from("order:ä"), Ok(Inspection::new(Some(holder)))),
            ],
            is_complete: false,
        };
        let plain = anstream::adapter::strip_str(&listing.text()).to_string();
        assert_eq!(
            plain,
            "KEY      HOLDER          EXPIRES  FENCE  WAITING\n\
             a        another client  7.0 s    34     2\n\
             order:ä  another client  7.0 s    -      -\n\
             there are more: pass a pattern, or a greater `--limit`\n"
        );
        assert_eq!(listing.json()["locks"][0]["key"], "a");
    }
}
