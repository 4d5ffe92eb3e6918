//! What each owner of this process has in the ensemble, as far as is known.
//!
//! A claim is in this table before its first request is sent, and until its nodes are known to be gone: so a node whose
//! answer was lost, or whose caller was dropped, is found and deleted at the claim's deadline at the latest.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedMutexGuard, mpsc};

use crate::backend::queue_events::QueueEvents;
use crate::backend::zookeeper::node_path::{owner_of, parent};
use crate::backend::zookeeper::protocol::answer::{NodeChange, NodeEvent};
use crate::backend::zookeeper::session::{LiveSession, SessionSink};
use crate::backend::{BackendError, Owner};
use crate::base::clock::{Clock, Instant};
use crate::base::key::Key;

/// What an owner has below the container of a key.
#[derive(Clone)]
pub(crate) enum Slot {
    /// A request of this session that makes a node has no answer.
    Unanswered(LiveSession),
    Node(LockNode),
}

impl Slot {
    pub(crate) fn session(&self) -> &LiveSession {
        match self {
            Self::Unanswered(session) => session,
            Self::Node(node) => &node.session,
        }
    }
}

/// A node of this process.
#[derive(Clone)]
pub(crate) struct LockNode {
    pub(crate) path: String,
    pub(crate) session: LiveSession,
    /// The transaction that created it. `None` behind a move: others may have queued before.
    pub(crate) created: Option<i64>,
    pub(crate) standing: Standing,
    /// The number of the grant, once it has one.
    pub(crate) fence: Option<u64>,
    /// An earlier request of this owner may have made another node. A release looks for it.
    pub(crate) has_strays: bool,
}

impl LockNode {
    /// The same node, to be deleted.
    pub(crate) fn leaving(self) -> Self {
        let was_granted = self.was_granted();
        Self { standing: Standing::Leaving { was_granted }, ..self }
    }

    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.standing, Standing::Leaving { .. })
    }

    /// Whether it is known to have been the first one.
    pub(crate) fn was_granted(&self) -> bool {
        matches!(self.standing, Standing::Granted { .. } | Standing::Leaving { was_granted: true })
    }

    pub(crate) fn name(&self) -> &str {
        self.path.rsplit_once('/').map_or("", |(_, name)| name)
    }
}

/// The position of a node in the queue of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    New,
    /// Behind the node at this path, which is watched.
    Queued {
        predecessor: String,
    },
    /// First, so that its owner holds the key.
    Granted {
        watched: WatchScope,
    },
    /// To be deleted. A release that is repeated has to say whether it was first.
    Leaving {
        was_granted: bool,
    },
}

/// What tells of a change around a held key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchScope {
    None,
    /// The container: another owner queues, or the node is deleted.
    Container,
    /// The node: it is deleted. Other owners are known to wait.
    Node,
}

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

#[derive(Default)]
struct Claims {
    by_owner: HashMap<Owner, OwnerClaim>,
    /// Queued nodes by the path of their predecessor.
    queued: HashMap<String, Vec<(Owner, Key)>>,
    /// Held keys by the path of their container.
    held: HashMap<String, (Owner, Key)>,
    /// Deadlines of claims, each with a number that makes it unique.
    deadlines: BTreeMap<(Instant, u64), Owner>,
    last_number: u64,
}

struct OwnerClaim {
    turn: Arc<tokio::sync::Mutex<()>>,
    /// How many requests are in progress.
    users: usize,
    slots: Vec<(Key, Slot)>,
    deadline: (Instant, u64),
    /// The deadline has passed, and what the claim has is about to be deleted.
    is_over: bool,
    /// Released, with its keys locked until the deadline.
    is_kept: bool,
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

    fn claims(&self) -> MutexGuard<'_, Claims> {
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

    /// Records what tells of a change around the held node at `path`, if it is still held.
    pub(crate) fn set_watched(&self, owner: &Owner, key: &Key, path: &str, scope: WatchScope) {
        let mut claims = self.claims();
        let Some(claim) = claims.by_owner.get_mut(owner) else { return };
        for (_, slot) in claim.slots.iter_mut().filter(|(of, _)| of == key) {
            if let Slot::Node(node) = slot
                && node.path == path
                && let Standing::Granted { watched } = &mut node.standing
            {
                *watched = scope;
            }
        }
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

    /// Paths of the nodes in a session that end with it, and whether others have to stay: those of released keys.
    pub(crate) fn of_session(&self, session: u64) -> (Vec<String>, bool) {
        let claims = self.claims();
        let (mut ending, mut stay) = (Vec::new(), false);
        for claim in claims.by_owner.values() {
            for (_, slot) in &claim.slots {
                match slot {
                    Slot::Node(node) if node.session.number() == session => {
                        if claim.is_kept && !node.is_leaving() {
                            stay = true;
                        } else {
                            ending.push(node.path.clone());
                        }
                    }
                    Slot::Node(_) | Slot::Unanswered(_) => {}
                }
            }
        }
        (ending, stay)
    }

    /// The claim of `owner` in `key` is gone without a release.
    pub(crate) fn lose(&self, owner: &Owner, key: &Key) {
        self.remove(owner, key);
        if let Some(notifier) = self.events.notifier() {
            notifier.key_changed(key.as_str());
        }
    }
}

impl Claims {
    fn claim(&mut self, owner: Owner, until: Instant) -> &mut OwnerClaim {
        let Self { by_owner, deadlines, last_number, .. } = self;
        by_owner.entry(owner).or_insert_with(|| {
            *last_number += 1;
            let deadline = (until, *last_number);
            deadlines.insert(deadline, owner);
            let (turn, slots) = (Arc::default(), Vec::new());
            OwnerClaim { turn, users: 0, slots, deadline, is_over: false, is_kept: false }
        })
    }

    fn set(&mut self, owner: &Owner, key: &Key, slot: Slot) -> bool {
        self.forget_watches(owner, key);
        let Some(claim) = self.by_owner.get_mut(owner) else { return false };
        if let Slot::Node(node) = &slot {
            match &node.standing {
                Standing::Queued { predecessor } => {
                    self.queued.entry(predecessor.clone()).or_default().push((*owner, key.clone()));
                }
                Standing::Granted { .. } => {
                    self.held.insert(parent(&node.path).to_owned(), (*owner, key.clone()));
                }
                Standing::New | Standing::Leaving { .. } => {}
            }
        }
        match claim.slots.iter_mut().find(|(of, _)| of == key) {
            Some((_, present)) => *present = slot,
            None => claim.slots.push((key.clone(), slot)),
        }
        true
    }

    fn remove(&mut self, owner: &Owner, key: &Key) {
        self.forget_watches(owner, key);
        if let Some(claim) = self.by_owner.get_mut(owner) {
            claim.slots.retain(|(of, _)| of != key);
        }
        self.remove_if_over(owner);
    }

    fn forget_watches(&mut self, owner: &Owner, key: &Key) {
        let Some(claim) = self.by_owner.get(owner) else { return };
        let Some((_, Slot::Node(node))) = claim.slots.iter().find(|(of, _)| of == key) else {
            return;
        };
        match &node.standing {
            Standing::Queued { predecessor } => {
                if let Some(owners) = self.queued.get_mut(predecessor) {
                    owners.retain(|(queued, of)| queued != owner || of != key);
                    if owners.is_empty() {
                        self.queued.remove(predecessor);
                    }
                }
            }
            Standing::Granted { .. } => {
                let container = parent(&node.path);
                if self.held.get(container).is_some_and(|(holder, _)| holder == owner) {
                    self.held.remove(container);
                }
            }
            Standing::New | Standing::Leaving { .. } => {}
        }
    }

    fn remove_if_over(&mut self, owner: &Owner) {
        let is_unused = |claim: &OwnerClaim| claim.users == 0 && claim.slots.is_empty();
        if self.by_owner.get(owner).is_some_and(is_unused)
            && let Some(claim) = self.by_owner.remove(owner)
        {
            self.deadlines.remove(&claim.deadline);
        }
    }

    fn set_deadline(&mut self, owner: &Owner, until: Instant) {
        if let Some(claim) = self.by_owner.get_mut(owner) {
            self.deadlines.remove(&claim.deadline);
            claim.deadline.0 = until;
            claim.is_over = false;
            self.deadlines.insert(claim.deadline, *owner);
        }
    }

    /// The key of the node at `path`, if it is one of this process.
    fn node_at(&self, path: &str) -> Option<(Owner, Key)> {
        let owner = owner_of(path)?;
        let slots = &self.by_owner.get(&owner)?.slots;
        let is_there = |slot: &Slot| matches!(slot, Slot::Node(node) if node.path == path && !node.is_leaving());
        let (key, _) = slots.iter().find(|(_, slot)| is_there(slot))?;
        Some((owner, key.clone()))
    }
}

impl SessionSink for ClaimTable {
    fn node_changed(&self, event: &NodeEvent) {
        let mut claims = self.claims();
        let queued = claims.queued.remove(&event.path).unwrap_or_default();
        let lost = match event.change {
            NodeChange::Deleted => claims.node_at(&event.path),
            NodeChange::Created | NodeChange::Data | NodeChange::Children => None,
        };
        let held = match event.change {
            NodeChange::Children => claims.held.get(&event.path).cloned(),
            // The watch of a node is used up.
            NodeChange::Data => claims.node_at(&event.path),
            NodeChange::Created | NodeChange::Deleted => None,
        };
        drop(claims);
        for (owner, key) in queued {
            self.events.head_of_queue(key.as_str(), owner, Duration::ZERO);
        }
        if let Some((owner, key)) = lost {
            self.lose(&owner, &key);
        }
        if let Some((owner, key)) = held {
            let _ = self.changed.send(ChangedHold { owner, key });
        }
    }

    fn disconnected(&self, session: u64, error: &BackendError) {
        let mut claims = self.claims();
        // Watches end with the connection. Waiters and holders ask again when there is another one.
        for claim in claims.by_owner.values_mut() {
            for (_, slot) in &mut claim.slots {
                if let Slot::Node(node) = slot
                    && node.session.number() == session
                    && let Standing::Granted { watched } = &mut node.standing
                {
                    *watched = WatchScope::None;
                }
            }
        }
        drop(claims);
        self.events.disconnected(error);
    }

    fn resumed(&self) {
        self.events.resync();
    }

    fn expired(&self, session: u64, incarnation: u64) {
        let mut claims = self.claims();
        let is_gone = |slot: &Slot| {
            let of = slot.session();
            of.number() == session && of.incarnation() <= incarnation
        };
        let gone: Vec<(Owner, Key)> = claims
            .by_owner
            .iter()
            .flat_map(|(owner, claim)| {
                claim.slots.iter().map(move |(key, slot)| (owner, key, slot))
            })
            .filter(|(_, _, slot)| is_gone(slot))
            .map(|(owner, key, _)| (*owner, key.clone()))
            .collect();
        for (owner, key) in &gone {
            claims.remove(owner, key);
        }
        drop(claims);
        for (_, key) in &gone {
            if let Some(notifier) = self.events.notifier() {
                notifier.key_changed(key.as_str());
            }
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
