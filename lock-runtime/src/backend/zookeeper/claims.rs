//! What each owner of this process has in the ensemble, as far as is known.

use std::sync::{Arc, MutexGuard};

use tokio::sync::mpsc;

use crate::backend::Owner;
use crate::backend::coordination::owners::{OwnerTurn, Owners};
use crate::backend::queue_events::QueueEvents;
use crate::backend::zookeeper::lock_node::{LockNode, Slot};
use crate::backend::zookeeper::owner_claims::{ClaimIndex, Claims, OwnerClaim};
use crate::backend::zookeeper::protocol::operation::NodeOperation;
use crate::backend::zookeeper::session::{LiveSession, SessionEnd};
use crate::base::clock::{Clock, Instant};
use crate::base::key::Key;

/// A held key whose container or node has changed.
pub(crate) struct ChangedHold {
    pub(crate) owner: Owner,
    pub(crate) key: Key,
}

pub(crate) type ClaimTurn = OwnerTurn<OwnerClaim, ClaimIndex>;

/// The claims of a pool, and where notifications of watches lead.
pub(crate) struct ClaimTable {
    pub(crate) owners: Arc<Owners<OwnerClaim, ClaimIndex>>,
    pub(crate) events: Arc<QueueEvents>,
    changed: mpsc::UnboundedSender<ChangedHold>,
}

impl ClaimTable {
    pub(crate) fn new(
        events: Arc<QueueEvents>,
        clock: Clock,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<ChangedHold>) {
        let (changed, changes) = mpsc::unbounded_channel();
        let owners = Owners::new(clock);
        (Arc::new(Self { owners, events, changed }), changes)
    }

    pub(crate) fn now(&self) -> Instant {
        self.owners.clock.now()
    }

    pub(super) fn claims(&self) -> MutexGuard<'_, Claims> {
        self.owners.table()
    }

    pub(crate) fn slots(&self, owner: &Owner) -> Vec<(Key, Slot)> {
        self.claims().state(owner).map(|claim| claim.slots.clone()).unwrap_or_default()
    }

    pub(crate) fn slot(&self, owner: &Owner, key: &Key) -> Option<Slot> {
        let claims = self.claims();
        let slots = &claims.state(owner)?.slots;
        slots.iter().find(|(of, _)| of == key).map(|(_, slot)| slot.clone())
    }

    /// The queued node for `key`, and its predecessor. `None` after the notification that ends the wait.
    pub(crate) fn queued(&self, owner: &Owner, key: &Key) -> Option<(LockNode, String)> {
        self.claims().queued(owner, key)
    }

    /// Whether the slot was taken over. Not if its session has expired meanwhile.
    pub(crate) fn set(&self, owner: &Owner, key: &Key, slot: Slot) -> bool {
        let mut claims = self.claims();
        if !slot.session().is_current() {
            return false;
        }
        claims.set(owner, key, slot)
    }

    pub(crate) fn remove(&self, owner: &Owner, key: &Key) {
        self.claims().remove(owner, key);
    }

    /// Requests another read of the queue of a held key.
    pub(crate) fn look_again(&self, changed: ChangedHold) {
        let _ = self.changed.send(changed);
    }

    /// Records that a request outside of the queue makes nodes for `keys`.
    pub(crate) fn record_try(&self, owner: &Owner, keys: &[Key]) {
        let mut claims = self.claims();
        let Some(claim) = claims.state_mut(owner) else { return };
        for key in keys {
            if !claim.tried.contains(key) {
                claim.tried.push(key.clone());
            }
        }
    }

    /// Whether the node for `key` was made by a request outside of the queue, and is not granted.
    pub(crate) fn is_tried(&self, owner: &Owner, key: &Key) -> bool {
        self.claims().state(owner).is_some_and(|claim| claim.tried.contains(key))
    }

    /// A release of these keys looks for further nodes of `owner`.
    pub(crate) fn expect_strays(&self, owner: &Owner, keys: &[Key]) {
        let mut claims = self.claims();
        let Some(claim) = claims.state_mut(owner) else { return };
        for (_, slot) in claim.slots.iter_mut().filter(|(key, _)| keys.contains(key)) {
            if let Slot::Node(node) = slot {
                node.has_strays = true;
            }
        }
    }

    /// How a session ends when the pool is closed. Nodes that keep released keys locked stay.
    pub(crate) fn end_of_session(&self, session: u64) -> SessionEnd {
        let claims = self.claims();
        let (mut ending, mut stays) = (Vec::new(), false);
        for (_, claim, is_kept) in claims.all() {
            for (_, slot) in &claim.slots {
                match slot {
                    Slot::Node(node) if node.session.number() == session => {
                        if is_kept && !node.is_leaving() {
                            stays = true;
                        } else {
                            ending.push(NodeOperation::Delete { path: node.path.clone() });
                        }
                    }
                    Slot::Node(_) | Slot::Unanswered(_) => {}
                }
            }
        }
        if stays { SessionEnd::Nodes(ending) } else { SessionEnd::Session }
    }

    /// Ends `session` if it has no nodes but those that are about to be deleted. From then on no slot takes it. Returns whether it
    /// has ended.
    pub(crate) fn end_if_unused(&self, session: &LiveSession) -> bool {
        let claims = self.claims();
        let is_leaving = |slot: &Slot| matches!(slot, Slot::Node(node) if node.is_leaving());
        let is_used = claims.all().any(|(_, claim, _)| {
            let mut slots = claim.slots.iter().map(|(_, slot)| slot);
            slots.any(|slot| slot.session().is(session) && !is_leaving(slot))
        });
        !is_used && session.end()
    }

    /// The node at `path` is gone without a release. What has replaced it meanwhile stays.
    pub(crate) fn lose(&self, owner: &Owner, key: &Key, path: &str) {
        let mut claims = self.claims();
        let Some(was_leaving) = claims.remove_node(owner, key, path) else { return };
        drop(claims);
        if !was_leaving {
            self.tell_of_change(key);
        }
    }

    pub(crate) fn tell_of_change(&self, key: &Key) {
        if let Some(notifier) = self.events.notifier() {
            notifier.key_changed(key.as_str());
        }
    }
}
