//! What each owner of this process has in the ensemble, as far as is known.
//!
//! A claim is in this table before its first request is sent, and until its nodes are known to be gone: so a node whose
//! answer was lost, or whose caller was dropped, is found and deleted at the claim's deadline at the latest.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedMutexGuard, mpsc};

use crate::backend::Owner;
use crate::backend::queue_events::QueueEvents;
use crate::backend::zookeeper::lock_node::Slot;
use crate::backend::zookeeper::owner_claims::{Claims, OwnerClaim};
use crate::backend::zookeeper::protocol::operation::NodeOperation;
use crate::backend::zookeeper::session::SessionEnd;
use crate::base::clock::{Clock, Instant};
use crate::base::key::Key;

/// A held key whose container or node has changed.
pub(crate) struct ChangedHold {
    pub(crate) owner: Owner,
    pub(crate) key: Key,
}

/// The claims of a pool, and where notifications of watches lead.
pub(crate) struct ClaimTable {
    pub(crate) events: Arc<QueueEvents>,
    pub(crate) clock: Clock,
    claims: Mutex<Claims>,
    changed: mpsc::UnboundedSender<ChangedHold>,
    /// The first deadline is earlier than before.
    pub(crate) earlier: Notify,
}

impl ClaimTable {
    pub(crate) fn new(
        events: Arc<QueueEvents>,
        clock: Clock,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<ChangedHold>) {
        let (changed, changes) = mpsc::unbounded_channel();
        let (claims, earlier) = (Mutex::default(), Notify::new());
        (Arc::new(Self { events, clock, claims, changed, earlier }), changes)
    }

    pub(super) fn claims(&self) -> MutexGuard<'_, Claims> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The turn of a request for `owner`: requests of one owner run one after the other. What they leave is deleted
    /// `kept_for` from now, unless the deadline is later already.
    pub(crate) async fn begin(self: &Arc<Self>, owner: Owner, kept_for: Duration) -> ClaimTurn {
        let until = self.clock.now() + kept_for;
        let (turn, users) = {
            let mut claims = self.claims();
            let claim = claims.claim(owner, until);
            claim.users += 1;
            (claim.turn.clone(), ClaimUser { table: self.clone(), owner })
        };
        self.earlier.notify_one();
        ClaimTurn { _turn: turn.lock_owned().await, user: users }
    }

    pub(crate) fn slots(&self, owner: &Owner) -> Vec<(Key, Slot)> {
        self.claims().by_owner.get(owner).map(|claim| claim.slots.clone()).unwrap_or_default()
    }

    pub(crate) fn slot(&self, owner: &Owner, key: &Key) -> Option<Slot> {
        let claims = self.claims();
        let slots = &claims.by_owner.get(owner)?.slots;
        slots.iter().find(|(of, _)| of == key).map(|(_, slot)| slot.clone())
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

    /// Requests that the queue of a held key is read again.
    pub(crate) fn look_again(&self, changed: ChangedHold) {
        let _ = self.changed.send(changed);
    }

    /// Records that a request outside of the queue makes nodes for `keys`.
    pub(crate) fn record_try(&self, owner: &Owner, keys: &[Key]) {
        let mut claims = self.claims();
        let Some(claim) = claims.by_owner.get_mut(owner) else { return };
        for key in keys {
            if !claim.tried.contains(key) {
                claim.tried.push(key.clone());
            }
        }
    }

    /// Whether the node for `key` was made by a request outside of the queue, and is not granted.
    pub(crate) fn is_tried(&self, owner: &Owner, key: &Key) -> bool {
        self.claims().by_owner.get(owner).is_some_and(|claim| claim.tried.contains(key))
    }

    /// When what the claim has is deleted.
    pub(crate) fn deadline(&self, owner: &Owner) -> Option<Instant> {
        self.claims().by_owner.get(owner).map(|claim| claim.deadline.0)
    }

    /// A release of these keys looks for further nodes of `owner`.
    pub(crate) fn expect_strays(&self, owner: &Owner, keys: &[Key]) {
        let mut claims = self.claims();
        let Some(claim) = claims.by_owner.get_mut(owner) else { return };
        for (_, slot) in claim.slots.iter_mut().filter(|(key, _)| keys.contains(key)) {
            if let Slot::Node(node) = slot {
                node.has_strays = true;
            }
        }
    }

    /// Extends the deadline.
    pub(crate) fn keep_until(&self, owner: &Owner, until: Instant) {
        let mut claims = self.claims();
        let extends = |claim: &OwnerClaim| claim.deadline.0 < until || claim.is_over;
        if claims.by_owner.get(owner).is_some_and(extends) {
            claims.set_deadline(owner, until);
        }
    }

    /// Sets the deadline. `is_kept` says that the owner has released its keys.
    pub(crate) fn end_at(&self, owner: &Owner, until: Instant, is_kept: bool) {
        let mut claims = self.claims();
        claims.set_deadline(owner, until);
        if let Some(claim) = claims.by_owner.get_mut(owner) {
            claim.is_kept = is_kept;
        }
        drop(claims);
        self.earlier.notify_one();
    }

    pub(crate) fn first_deadline(&self) -> Option<Instant> {
        self.claims().deadlines.first_key_value().map(|((until, _), _)| *until)
    }

    /// The owners whose claims are over from now on. Each is returned once, until it has another deadline.
    pub(crate) fn take_due(&self, now: Instant) -> Vec<Owner> {
        let mut claims = self.claims();
        let mut due = Vec::new();
        while let Some(first) = claims.deadlines.first_entry()
            && first.key().0 <= now
        {
            due.push(first.remove());
        }
        for owner in &due {
            if let Some(claim) = claims.by_owner.get_mut(owner) {
                claim.is_over = true;
            }
        }
        due
    }

    /// Whether the deadline of the claim has passed, and it has no other one.
    pub(crate) fn is_over(&self, owner: &Owner) -> bool {
        self.claims().by_owner.get(owner).is_some_and(|claim| claim.is_over)
    }

    /// How a session ends when the pool is closed. Nodes stay that keep released keys locked.
    pub(crate) fn end_of_session(&self, session: u64) -> SessionEnd {
        let claims = self.claims();
        let (mut ending, mut stays) = (Vec::new(), false);
        for claim in claims.by_owner.values() {
            for (_, slot) in &claim.slots {
                match slot {
                    Slot::Node(node) if node.session.number() == session => {
                        if claim.is_kept && !node.is_leaving() {
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

    /// The node at `path` is gone without a release. What the owner has in its place meanwhile stays.
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

/// The right to send requests for an owner. Dropping it passes the right on, and forgets an owner without nodes.
pub(crate) struct ClaimTurn {
    _turn: OwnedMutexGuard<()>,
    user: ClaimUser,
}

impl ClaimTurn {
    pub(crate) const fn owner(&self) -> &Owner {
        &self.user.owner
    }
}

struct ClaimUser {
    table: Arc<ClaimTable>,
    owner: Owner,
}

impl Drop for ClaimUser {
    fn drop(&mut self) {
        let mut claims = self.table.claims();
        if let Some(claim) = claims.by_owner.get_mut(&self.owner) {
            claim.users -= 1;
        }
        claims.remove_if_over(&self.owner);
    }
}
