//! Requests for rows that another session keeps locked. They fail, and requests for other keys are sent without them.

use std::collections::HashSet;
use std::time::Duration;

use tokio::time::sleep;
use tokio_postgres::types::Type;

use crate::backend::BackendError;
use crate::backend::postgres::batch::Batch;
use crate::backend::postgres::server_error::{LONG_TRANSACTIONS, is_lock_timeout};
use crate::backend::postgres::session::get;
use crate::backend::sql::job::{JobRequests, PendingRequest, fail_all};
use crate::backend::sql::locked_rows::{fail_locked, split_locked};
use crate::base::key::Key;

/// Requests that go in one statement, until a locked row delays all of them.
pub(super) struct Parts<T>(Vec<Vec<T>>);

impl<T> Parts<T> {
    pub(super) fn of(requests: Vec<T>) -> Self {
        let mut parts = Self(Vec::new());
        parts.add(requests);
        parts
    }

    pub(super) fn next(&mut self) -> Option<Vec<T>> {
        self.0.pop()
    }

    pub(super) fn add(&mut self, requests: Vec<T>) {
        if !requests.is_empty() {
            self.0.push(requests);
        }
    }

    /// The requests that are left, in their order.
    pub(super) fn rest(self) -> Vec<T> {
        self.0.into_iter().rev().flatten().collect()
    }

    fn add_one_by_one(&mut self, requests: Vec<T>) {
        self.0.extend(requests.into_iter().rev().map(|request| vec![request]));
    }
}

impl Batch<'_> {
    /// Fails the requests for rows that another session is known to have locked. Returns the others.
    pub(super) async fn without_locked<R, T>(
        &self,
        requests: JobRequests<R, T>,
        keys: impl Fn(&R) -> &[Key],
    ) -> JobRequests<R, T> {
        let suspects = self.session.locked_rows().suspects(&requests, &keys, self.clock.now());
        if suspects.is_empty() {
            return requests;
        }
        match self.locked_of(suspects).await {
            Ok(locked) => fail_locked(requests, &locked, keys, LONG_TRANSACTIONS),
            Err(error) => {
                fail_all(requests, &error.before_sending());
                Vec::new()
            }
        }
    }

    /// After a statement that failed with `error`: returns the requests that fail with it. If locked rows were the reason, the
    /// others go to `parts` again.
    pub(super) async fn blocked<R, T>(
        &self,
        requests: JobRequests<R, T>,
        keys: impl Fn(&R) -> &[Key],
        error: &BackendError,
        parts: &mut Parts<PendingRequest<R, T>>,
    ) -> JobRequests<R, T> {
        if !is_lock_timeout(error) {
            return requests;
        }
        let asked: HashSet<Key> =
            requests.iter().flat_map(|(request, _)| keys(request)).cloned().collect();
        if requests.len() < 2 {
            self.remember_locked(asked);
            return requests;
        }
        let Ok(locked) = self.locked_of(asked).await else { return requests };
        if locked.is_empty() {
            // Unlocked by now, or the lock is not that of a row that can be seen.
            parts.add_one_by_one(requests);
            return Vec::new();
        }
        let (blocked, free) = split_locked(requests, &locked, keys);
        self.remember_locked(locked);
        parts.add(free);
        blocked
    }

    /// For some seconds the rows of these keys are looked at before the next requests. Then a request waits again, because
    /// commits in turn keep a row of a hot key locked most of the time.
    pub(super) fn remember_locked(&self, keys: impl IntoIterator<Item = Key>) {
        let (mut known, now) = (self.session.locked_rows(), self.clock.now());
        for key in keys {
            known.add(key, now);
        }
    }

    /// Which of the keys have a row that another transaction has locked for longer than a commit takes.
    async fn locked_of(&self, asked: HashSet<Key>) -> Result<HashSet<Key>, BackendError> {
        const BETWEEN: Duration = Duration::from_millis(5);
        let mut locked = self.locked_now(asked).await?;
        for _ in 0..2 {
            if locked.is_empty() {
                break;
            }
            sleep(BETWEEN).await;
            locked = self.locked_now(locked).await?;
        }
        Ok(locked)
    }

    /// Which of the keys have a row that another transaction has locked. Waits for no row.
    async fn locked_now(&self, asked: HashSet<Key>) -> Result<HashSet<Key>, BackendError> {
        let texts: Vec<&[u8]> = asked.iter().map(|key| key.as_str().as_bytes()).collect();
        let rows = self.query(&self.statements.locked, &[(&texts, Type::BYTEA_ARRAY)]).await?;
        let found = rows.iter().map(|row| get::<Vec<u8>>(row, 0));
        let found: HashSet<Vec<u8>> = found.collect::<Result<_, _>>()?;
        let is_locked = |key: &Key| found.contains(key.as_str().as_bytes());
        let (locked, free): (HashSet<Key>, HashSet<Key>) = asked.into_iter().partition(is_locked);
        let mut known = self.session.locked_rows();
        for key in &free {
            known.remove(key);
        }
        Ok(locked)
    }
}
