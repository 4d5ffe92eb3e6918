//! Keys of locks that had waiters a moment ago.

use std::time::Duration;

use foldhash::HashMap;

use crate::base::clock::{Clock, Instant};
use crate::base::key::Key;
use crate::base::mutex::Mutex;

/// The keys on which a wait queue was seen within the last second.
///
/// The next acquire of such a key goes to the wait queue immediately, without the plain command that would most
/// likely fail. At most 1,024 keys are kept; while all of them are recent, a further key is not added.
#[derive(Debug)]
pub(crate) struct ContendedKeys {
    noted: Mutex<HashMap<Key, Instant>>,
    clock: Clock,
}

impl ContendedKeys {
    const EXPIRES_IN: Duration = Duration::from_secs(1);
    const MAX_KEYS: usize = 1024;

    pub(crate) fn new(clock: Clock) -> Self {
        Self { noted: Mutex::default(), clock }
    }

    pub(crate) fn note(&self, key: &str) {
        let (now, mut noted) = (self.clock.now(), self.noted.lock());
        if noted.len() >= Self::MAX_KEYS {
            noted.retain(|_, at| now.since(*at) < Self::EXPIRES_IN);
            if noted.len() >= Self::MAX_KEYS {
                return;
            }
        }
        noted.insert(key.into(), now);
    }

    pub(crate) fn contains(&self, key: &Key) -> bool {
        let at = self.noted.lock().get(key).copied();
        at.is_some_and(|at| self.clock.now().since(at) < Self::EXPIRES_IN)
    }
}
