//! Rows that another session keeps locked.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::backend::sql::job::JobRequests;
use crate::base::clock::Instant;
use crate::base::key::Key;

/// The keys for whose rows a statement has waited in vain, so that no other waits for them before they are unlocked. A wait lasts up
/// to a second, the shortest that MySQL has.
#[derive(Debug, Default)]
pub(crate) struct LockedRows(HashMap<Key, Instant>);

impl LockedRows {
    const REMEMBERED: Duration = Duration::from_secs(5);

    pub(crate) fn add(&mut self, key: Key, now: Instant) {
        self.0.retain(|_, since| now.since(*since) < Self::REMEMBERED);
        self.0.insert(key, now);
    }

    pub(crate) fn remove(&mut self, key: &Key) {
        self.0.remove(key);
    }

    pub(crate) fn contains(&self, key: &Key, now: Instant) -> bool {
        self.0.get(key).is_some_and(|since| now.since(*since) < Self::REMEMBERED)
    }
}

/// The requests for one of the keys `locked`, and the others.
pub(crate) fn split_locked<R, T>(
    requests: JobRequests<R, T>,
    locked: &HashSet<Key>,
    keys: impl Fn(&R) -> &[Key],
) -> (JobRequests<R, T>, JobRequests<R, T>) {
    requests
        .into_iter()
        .partition(|(request, _)| keys(request).iter().any(|key| locked.contains(key)))
}
