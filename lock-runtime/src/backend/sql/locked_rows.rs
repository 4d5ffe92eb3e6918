//! Rows that another session keeps locked.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::backend::sql::job::{JobRequests, PendingRequest, fail_all};
use crate::backend::{BackendError, FailureKind};
use crate::base::clock::Instant;
use crate::base::key::Key;

/// The keys of rows that a statement has waited for in vain, so that no other statement waits for them before they are unlocked.
/// A wait lasts up to a second, the shortest that MySQL has.
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

    fn contains(&self, key: &Key, now: Instant) -> bool {
        self.0.get(key).is_some_and(|since| now.since(*since) < Self::REMEMBERED)
    }

    /// The keys of the requests that are in this set.
    pub(crate) fn suspects<R, T>(
        &self,
        requests: &[PendingRequest<R, T>],
        keys: impl Fn(&R) -> &[Key],
        now: Instant,
    ) -> HashSet<Key> {
        let asked = requests.iter().flat_map(|(request, _)| keys(request));
        asked.filter(|key| self.contains(key, now)).cloned().collect()
    }
}

/// Fails the requests for one of the keys `locked`, and returns the others. `remedy` says where to look for the other session.
pub(crate) fn fail_locked<R, T>(
    requests: JobRequests<R, T>,
    locked: &HashSet<Key>,
    keys: impl Fn(&R) -> &[Key],
    remedy: &'static str,
) -> JobRequests<R, T> {
    let (blocked, free) = split_locked(requests, locked, keys);
    fail_all(blocked, &row_is_locked(remedy));
    free
}

/// The failure of a request for a row that another session keeps locked.
pub(crate) fn row_is_locked(remedy: &'static str) -> BackendError {
    let message = "a row of the request's keys is locked by another session";
    BackendError::new(FailureKind::NotApplied, message).remedy(remedy)
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
