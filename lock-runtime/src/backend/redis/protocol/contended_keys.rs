//! Keys of locks that had waiters a moment ago.

use std::time::Duration;

use foldhash::HashMap;

use crate::base::clock::Instant;
use crate::base::key::Key;
use crate::base::mutex::Mutex;

/// The keys on which a wait queue was seen within the last second.
///
/// The next acquire of such a key goes to the wait queue immediately, without the plain command that would most
/// likely fail. At most 1,024 keys are kept; while all of them are recent, a further key is not added.
#[derive(Debug, Default)]
pub(crate) struct ContendedKeys(Mutex<HashMap<Key, Instant>>);

impl ContendedKeys {
    const EXPIRES_IN: Duration = Duration::from_secs(1);
    const MAX_KEYS: usize = 1024;

    pub(crate) fn note(&self, key: &str, now: Instant) {
        let mut noted = self.0.lock();
        if noted.len() >= Self::MAX_KEYS {
            noted.retain(|_, at| now.since(*at) < Self::EXPIRES_IN);
            if noted.len() >= Self::MAX_KEYS {
                return;
            }
        }
        noted.insert(key.into(), now);
    }

    pub(crate) fn contains(&self, key: &Key, now: Instant) -> bool {
        let noted = self.0.lock();
        noted.get(key).is_some_and(|at| now.since(*at) < Self::EXPIRES_IN)
    }
}
