//! An acquire in progress, as plain values.

use std::sync::Arc;

use crate::backend::etcd::keep_alives::AwaitedSign;
use crate::backend::etcd::leases::PoolLease;
use crate::backend::etcd::locks::ConfirmedAnswer;
use crate::backend::etcd::member::Member;
use crate::backend::etcd::owned_key::OwnerKey;
use crate::backend::etcd::owned_keys::KeyTurn;
use crate::backend::{AcquireOutcome, AcquireRequest, Owner};
use crate::base::clock::Instant;
use crate::base::key::Key;

/// An acquire in progress.
pub(crate) struct Acquiring<'a> {
    pub(crate) request: &'a AcquireRequest,
    pub(crate) turn: &'a KeyTurn,
    pub(crate) member: Arc<Member>,
    pub(crate) lease: Arc<PoolLease>,
    /// Until when the keys have to stay: counted from the beginning of the round, when the lease is there.
    pub(crate) until: Instant,
}

impl Acquiring<'_> {
    pub(crate) fn owner(&self) -> &Owner {
        self.turn.owner()
    }

    /// Several keys are in no queue.
    pub(crate) fn is_queuing(&self) -> bool {
        self.request.enqueue && self.request.keys.len() == 1
    }
}

/// What a round has found.
pub(crate) enum RoundEnd {
    Over(AcquireOutcome),
    /// Other keys than expected.
    Again,
}

/// The keys of a request, with no key of another owner before them.
pub(crate) struct FreeKeys {
    pub(crate) keys: Vec<(Key, OwnerKey)>,
    /// Other owners queue behind this one.
    pub(crate) is_contended: bool,
    /// The last write of a fence beside the queues.
    pub(crate) fenced: i64,
    /// The answer that has said so.
    pub(crate) answer: ConfirmedAnswer,
    /// Sent together with that request.
    pub(crate) sign: Option<AwaitedSign>,
}
