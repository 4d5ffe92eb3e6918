//! Pages of keys that a search reads.

use crate::backend::{KeyList, KeyPattern};
use crate::base::key::Key;

/// How many rows one page has.
pub(crate) const PAGE: usize = 1_000;

/// A row of a page.
#[derive(Clone, Debug)]
pub(crate) struct ListedRow {
    pub(crate) key: Vec<u8>,
    pub(crate) is_held: bool,
}

/// How many pages one search reads.
const MOST_PAGES: usize = 1_000;

/// A search for keys that match, page by page in their order.
pub(crate) struct ListedKeys<'a> {
    pattern: &'a KeyPattern,
    limit: usize,
    keys: Vec<Key>,
    pages: usize,
    is_complete: bool,
    /// Where the next page begins. `None` after the last one.
    next: Option<Vec<u8>>,
}

impl<'a> ListedKeys<'a> {
    pub(crate) fn new(pattern: &'a KeyPattern, limit: usize) -> Self {
        let next = Some(pattern.start().into_bytes());
        Self { pattern, limit, keys: Vec::new(), pages: 0, is_complete: false, next }
    }

    /// The first key of the next page.
    pub(crate) fn next_page(&self) -> Option<&[u8]> {
        self.next.as_deref()
    }

    /// The keys of a page, in their order.
    pub(crate) fn add_page(&mut self, rows: &[ListedRow]) {
        let start = self.pattern.start();
        let is_behind = |row: &ListedRow| !row.key.starts_with(start.as_bytes());
        let text = |row: &ListedRow| String::from_utf8(row.key.clone()).ok();
        let held = rows.iter().filter(|row| row.is_held);
        let matching = held.filter_map(text).filter(|key| self.pattern.key_of(key).is_some());
        self.keys.extend(matching.map(Key::from));
        self.pages += 1;
        let last = rows.last().filter(|last| rows.len() == PAGE && !is_behind(last));
        self.is_complete = last.is_none();
        let goes_on = self.keys.len() <= self.limit && self.pages < MOST_PAGES;
        self.next = last.filter(|_| goes_on).map(|last| [&last.key, &b"\0"[..]].concat());
    }

    pub(crate) fn into_list(self) -> KeyList {
        KeyList::new(self.keys, self.is_complete, self.limit)
    }
}
