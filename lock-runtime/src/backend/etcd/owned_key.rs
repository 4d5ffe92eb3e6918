//! A key of this process: its claim to a lock.

use std::sync::Arc;

use crate::backend::etcd::leases::PoolLease;

/// What an owner has for a lock.
#[derive(Clone)]
pub(crate) enum KeyState {
    /// A request that puts the key has no answer.
    Unanswered,
    Known(OwnerKey),
}

impl KeyState {
    pub(crate) fn known(&self) -> Option<&OwnerKey> {
        match self {
            Self::Known(known) => Some(known),
            Self::Unanswered => None,
        }
    }

    pub(crate) fn known_mut(&mut self) -> Option<&mut OwnerKey> {
        match self {
            Self::Known(known) => Some(known),
            Self::Unanswered => None,
        }
    }
}

/// A key of this process.
#[derive(Clone)]
pub(crate) struct OwnerKey {
    /// The revision that has made it: its position in the queue.
    pub(crate) created: i64,
    /// The last revision for which the queue around it is known.
    pub(crate) seen: i64,
    pub(crate) lease: Arc<PoolLease>,
    pub(crate) place: KeyPlace,
    /// The revision of the grant's fence, once it has one.
    pub(crate) fence: Option<i64>,
    /// Whether a fence was written beside the queue.
    pub(crate) has_fence_key: bool,
    /// What reports changes around it.
    pub(crate) watch: Option<i64>,
}

/// The position of a key in the queue of its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyPlace {
    New,
    Queued,
    /// The oldest key, so that its owner holds the lock.
    Granted,
    /// About to be deleted.
    Leaving,
}

impl OwnerKey {
    /// A key of which nothing else is known yet.
    pub(crate) fn new(created: i64, seen: i64, lease: Arc<PoolLease>) -> Self {
        let (place, fence) = (KeyPlace::New, None);
        Self { created, seen, lease, place, fence, has_fence_key: false, watch: None }
    }

    pub(crate) fn is_granted(&self) -> bool {
        self.place == KeyPlace::Granted
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.place == KeyPlace::Leaving
    }
}

/// The leases of these keys, each once.
pub(crate) fn leases_of<'a>(keys: impl Iterator<Item = &'a OwnerKey>) -> Vec<Arc<PoolLease>> {
    let mut leases: Vec<Arc<PoolLease>> = Vec::new();
    for own in keys {
        if leases.iter().all(|lease| lease.id != own.lease.id) {
            leases.push(own.lease.clone());
        }
    }
    leases
}
