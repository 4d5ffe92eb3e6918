//! Searches for locks by their names.

use crate::backend::etcd::key_names::KeyNames;
use crate::backend::etcd::locks::EtcdLocks;
use crate::backend::etcd::protocol::transaction::{
    KeyOperation, KeySearch, SearchOrder, Transaction,
};
use crate::backend::{BackendError, KeyList, KeyPattern};
use crate::base::key::Key;

/// How many keys one request reads.
const PAGE: i64 = 1_000;

/// How many requests one search sends.
const MOST_PAGES: usize = 1_000;

impl EtcdLocks {
    /// The locks with keys that match, `limit` at most. Each page is confirmed by a majority.
    pub(crate) async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<KeyList, BackendError> {
        let member = self.link.member().await?;
        let names = &self.keys.names;
        let (mut from, to) = names.starting_with(&pattern.start());
        let mut locks: Vec<Key> = Vec::new();
        for _ in 0..MOST_PAGES {
            let search = KeySearch {
                from: from.clone(),
                to: to.clone(),
                order: SearchOrder::ByName,
                limit: PAGE,
                created_from: 0,
                created_to: 0,
            };
            let read = Transaction::of(vec![KeyOperation::Find(search)]);
            let (answer, _) = self.transact(&member, &read).await?;
            let found = answer.found(0)?;
            // A key of a lock has a lease.
            for key in found.iter().filter(|key| key.lease != 0) {
                if let Some(lock) = names.lock_of(&key.key)
                    && pattern.key_of(lock.as_str()).is_some()
                    && locks.last() != Some(&lock)
                {
                    locks.push(lock);
                }
            }
            let Some(last) = found.last().filter(|_| found.len() as i64 == PAGE) else {
                return Ok(KeyList::new(locks, true, limit));
            };
            if locks.len() > limit {
                break;
            }
            from = KeyNames::behind(&last.key);
        }
        Ok(KeyList::new(locks, false, limit))
    }
}
