//! What each owner of this process has in the cluster, as far as is known.
//!
//! An owner is in this table before its first request is sent, and until its keys are known to be gone. So a key is found and
//! deleted at the owner's deadline at the latest, also if its answer was lost or its caller dropped.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedMutexGuard, mpsc};

use crate::backend::Owner;
use crate::backend::etcd::key_names::KeyNames;
use crate::backend::etcd::member_task::LastWishes;
use crate::backend::etcd::owned_key::{KeyPlace, KeyState, OwnerKey};
use crate::backend::etcd::protocol::watch::{KeyEvent, WatchedKeys};
use crate::backend::etcd::watches::{KeyWatches, WatchSink};
use crate::backend::queue_events::QueueEvents;
use crate::base::clock::{Clock, Instant};
use crate::base::key::Key;

/// A key that is held for longer than this is watched.
const UNWATCHED: Duration = Duration::from_millis(50);

/// The keys of a pool, and where watches lead.
pub(crate) struct OwnedKeys {
    pub(crate) events: Arc<QueueEvents>,
    pub(crate) clock: Clock,
    pub(crate) names: KeyNames,
    watches: KeyWatches,
    table: Mutex<KeyTable>,
    /// The first deadline may be earlier than before.
    pub(crate) earlier: Notify,
    missed: mpsc::UnboundedSender<MissedChanges>,
}

/// A held key, with a watch that has ended without all changes.
pub(crate) struct MissedChanges {
    pub(crate) owner: Owner,
    pub(crate) key: Key,
}

#[derive(Default)]
struct KeyTable {
    by_owner: HashMap<Owner, OwnerKeys>,
    by_watch: HashMap<i64, WatchedClaim>,
    /// Deadlines of owners, each with a number that makes it unique.
    deadlines: BTreeMap<(Instant, u64), Owner>,
    last_number: u64,
    /// Held keys that are not watched yet, and when they will be.
    unwatched: VecDeque<(Instant, Owner, Key)>,
}

/// What a watch is for.
#[derive(Clone)]
struct WatchedClaim {
    owner: Owner,
    key: Key,
    /// The name of the key that is watched for its deletion. `None` if all of the queue is.
    predecessor: Option<Arc<[u8]>>,
}

struct OwnerKeys {
    turn: Arc<tokio::sync::Mutex<()>>,
    /// How many requests are in progress.
    users: usize,
    keys: Vec<(Key, KeyState)>,
    deadline: (Instant, u64),
    /// The deadline has passed, and the keys are about to be deleted.
    is_over: bool,
    /// Released, with its keys locked until the deadline.
    is_kept: bool,
}

impl KeyTable {
    fn key(&mut self, owner: &Owner, key: &Key) -> Option<&mut KeyState> {
        let keys = &mut self.by_owner.get_mut(owner)?.keys;
        keys.iter_mut().find(|(of, _)| of == key).map(|(_, state)| state)
    }

    /// The watch that is not needed any more.
    fn remove(&mut self, owner: &Owner, key: &Key) -> Option<i64> {
        let of_owner = self.by_owner.get_mut(owner)?;
        let at = of_owner.keys.iter().position(|(of, _)| of == key)?;
        let (_, state) = of_owner.keys.swap_remove(at);
        let watch = match state {
            KeyState::Known(known) => known.watch,
            KeyState::Unanswered => None,
        };
        if let Some(watch) = watch {
            self.by_watch.remove(&watch);
        }
        self.remove_if_over(owner);
        watch
    }

    fn remove_if_over(&mut self, owner: &Owner) {
        let is_unused = |of: &OwnerKeys| of.users == 0 && of.keys.is_empty();
        if self.by_owner.get(owner).is_some_and(is_unused)
            && let Some(of_owner) = self.by_owner.remove(owner)
        {
            self.deadlines.remove(&of_owner.deadline);
        }
    }

    fn set_deadline(&mut self, owner: &Owner, until: Instant) {
        if let Some(of_owner) = self.by_owner.get_mut(owner) {
            self.deadlines.remove(&of_owner.deadline);
            of_owner.deadline.0 = until;
            of_owner.is_over = false;
            self.deadlines.insert(of_owner.deadline, *owner);
        }
    }
}

impl OwnedKeys {
    pub(crate) fn new(
        events: Arc<QueueEvents>,
        clock: Clock,
        names: KeyNames,
        watches: KeyWatches,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<MissedChanges>) {
        let (table, earlier) = (Mutex::default(), Notify::new());
        let (missed, misses) = mpsc::unbounded_channel();
        (Arc::new(Self { events, clock, names, watches, table, earlier, missed }), misses)
    }

    fn table(&self) -> MutexGuard<'_, KeyTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The turn of a request for `owner`: requests of one owner run one after the other. What they leave is deleted
    /// `kept_for` from now, unless the deadline is later already.
    pub(crate) async fn begin(self: &Arc<Self>, owner: Owner, kept_for: Duration) -> OwnerTurn {
        let turn = self.turn(owner, kept_for).await;
        // Not before the turn: until then the deadline of an earlier request counts.
        let until = self.clock.now() + kept_for;
        let mut table = self.table();
        let is_earlier = |of: &OwnerKeys| !of.is_kept && (of.is_over || of.deadline.0 < until);
        if table.by_owner.get(&owner).is_some_and(is_earlier) {
            table.set_deadline(&owner, until);
            drop(table);
            self.earlier.notify_one();
        }
        turn
    }

    /// As [`begin`](Self::begin), for the deletion of what is over: a deadline that has passed stays so.
    pub(crate) async fn turn(self: &Arc<Self>, owner: Owner, kept_for: Duration) -> OwnerTurn {
        let until = self.clock.now() + kept_for;
        let (turn, user) = {
            let mut table = self.table();
            let KeyTable { by_owner, deadlines, last_number, .. } = &mut *table;
            let of_owner = by_owner.entry(owner).or_insert_with(|| {
                *last_number += 1;
                let deadline = (until, *last_number);
                deadlines.insert(deadline, owner);
                let (turn, keys) = (Arc::default(), Vec::new());
                OwnerKeys { turn, users: 0, keys, deadline, is_over: false, is_kept: false }
            });
            of_owner.users += 1;
            (of_owner.turn.clone(), OwnerUser { table: self.clone(), owner })
        };
        self.earlier.notify_one();
        OwnerTurn { _turn: turn.lock_owned().await, user }
    }

    /// What the owner has for `key`. Keys of leases that have ended are none.
    pub(crate) fn state(&self, owner: &Owner, key: &Key) -> Option<KeyState> {
        let mut table = self.table();
        let state = table.key(owner, key)?;
        match state {
            KeyState::Known(known) if !known.lease.is_current() => None,
            state => Some(state.clone()),
        }
    }

    pub(crate) fn known(&self, owner: &Owner, key: &Key) -> Option<OwnerKey> {
        match self.state(owner, key)? {
            KeyState::Known(known) => Some(known),
            KeyState::Unanswered => None,
        }
    }

    pub(crate) fn locks_of(&self, owner: &Owner) -> Vec<Key> {
        let table = self.table();
        let of_owner = table.by_owner.get(owner);
        of_owner.map_or_else(Vec::new, |it| it.keys.iter().map(|(key, _)| key.clone()).collect())
    }

    /// A request that puts these keys is about to be sent. Returns the keys for which no other one was.
    pub(crate) fn expect_puts(&self, owner: &Owner, keys: &[Key]) -> Vec<Key> {
        let (mut table, mut expected) = (self.table(), Vec::new());
        let Some(of_owner) = table.by_owner.get_mut(owner) else { return expected };
        for key in keys {
            if of_owner.keys.iter().all(|(of, _)| of != key) {
                of_owner.keys.push((key.clone(), KeyState::Unanswered));
                expected.push(key.clone());
            }
        }
        expected
    }

    /// Records a key. `false` if its lease has ended meanwhile. Watches of the former state end.
    pub(crate) fn set(&self, owner: &Owner, key: &Key, mut known: OwnerKey) -> bool {
        let mut table = self.table();
        // It may have ended since it was read.
        known.watch = known.watch.filter(|watch| table.by_watch.contains_key(watch));
        let is_set = self.set_in(&mut table, owner, key, known);
        drop(table);
        if is_set {
            self.earlier.notify_one();
        }
        is_set
    }

    fn set_in(&self, table: &mut KeyTable, owner: &Owner, key: &Key, known: OwnerKey) -> bool {
        if !known.lease.is_current() || !table.by_owner.contains_key(owner) {
            return false;
        }
        let former = match table.key(owner, key) {
            Some(KeyState::Known(former)) => {
                former.watch.filter(|watch| known.watch != Some(*watch))
            }
            Some(KeyState::Unanswered) | None => None,
        };
        if known.is_granted() && known.watch.is_none() {
            let due = self.clock.now() + UNWATCHED;
            table.unwatched.push_back((due, *owner, key.clone()));
        }
        match table.key(owner, key) {
            Some(state) => *state = KeyState::Known(known),
            None => {
                if let Some(of_owner) = table.by_owner.get_mut(owner) {
                    of_owner.keys.push((key.clone(), KeyState::Known(known)));
                }
            }
        }
        if let Some(former) = former {
            table.by_watch.remove(&former);
            self.watches.cancel(former);
        }
        true
    }

    /// Records that the key waits behind `predecessor`, which is watched from the revision on at which it was seen. If it is watched
    /// already, that goes on.
    pub(crate) fn queue_behind(
        &self,
        owner: &Owner,
        key: &Key,
        own: &OwnerKey,
        predecessor: Vec<u8>,
    ) -> bool {
        let mut table = self.table();
        let present = match table.key(owner, key) {
            Some(KeyState::Known(known)) if known.place == KeyPlace::Queued => known.watch,
            _ => None,
        };
        let is_same = |watch: &i64| {
            let watched = table.by_watch.get(watch).and_then(|it| it.predecessor.as_deref());
            watched == Some(predecessor.as_slice())
        };
        let present = present.filter(is_same);
        let watch = present.unwrap_or_else(|| self.watches.next_id());
        let queued = OwnerKey { place: KeyPlace::Queued, watch: Some(watch), ..own.clone() };
        let seen = queued.seen;
        if !self.set_in(&mut table, owner, key, queued) {
            return false;
        }
        if present.is_none() {
            let (owner, key) = (*owner, key.clone());
            let of = WatchedClaim { owner, key, predecessor: Some(predecessor.as_slice().into()) };
            table.by_watch.insert(watch, of);
            self.watches.create(watch, WatchedKeys::Deletion { key: predecessor }, seen + 1);
        }
        true
    }

    pub(crate) fn remove(&self, owner: &Owner, key: &Key) {
        if let Some(watch) = self.table().remove(owner, key) {
            self.watches.cancel(watch);
        }
    }

    /// Extends the deadline.
    pub(crate) fn keep_until(&self, owner: &Owner, until: Instant) {
        let mut table = self.table();
        let extends = |of: &OwnerKeys| of.deadline.0 < until || of.is_over;
        if table.by_owner.get(owner).is_some_and(extends) {
            table.set_deadline(owner, until);
        }
    }

    /// Sets the deadline. `is_kept` says that the owner has released its keys.
    pub(crate) fn end_at(&self, owner: &Owner, until: Instant, is_kept: bool) {
        let mut table = self.table();
        table.set_deadline(owner, until);
        if let Some(of_owner) = table.by_owner.get_mut(owner) {
            of_owner.is_kept = is_kept;
        }
        drop(table);
        self.earlier.notify_one();
    }

    pub(crate) fn deadline(&self, owner: &Owner) -> Option<Instant> {
        self.table().by_owner.get(owner).map(|of_owner| of_owner.deadline.0)
    }

    /// Whether the deadline has passed, and there is no other one.
    pub(crate) fn is_over(&self, owner: &Owner) -> bool {
        self.table().by_owner.get(owner).is_some_and(|of_owner| of_owner.is_over)
    }

    /// When there is something to do without a request.
    pub(crate) fn first_due(&self) -> Option<Instant> {
        let table = self.table();
        let deadline = table.deadlines.first_key_value().map(|((until, _), _)| *until);
        let unwatched = table.unwatched.front().map(|(due, ..)| *due);
        [deadline, unwatched].into_iter().flatten().min()
    }

    /// The owners with keys that are to be deleted. Each is returned once, until it has another deadline.
    pub(crate) fn take_due(&self, now: Instant) -> Vec<Owner> {
        let mut table = self.table();
        let mut due = Vec::new();
        while let Some(first) = table.deadlines.first_entry()
            && first.key().0 <= now
        {
            due.push(first.remove());
        }
        for owner in &due {
            if let Some(of_owner) = table.by_owner.get_mut(owner) {
                of_owner.is_over = true;
            }
        }
        due
    }

    /// A held key was there at this revision. It is watched from there on, if it is not yet.
    pub(crate) fn on_seen(&self, owner: &Owner, key: &Key, created: i64, revision: i64) {
        let mut table = self.table();
        let Some(KeyState::Known(known)) = table.key(owner, key) else { return };
        if known.created == created && known.is_granted() && known.watch.is_none() {
            known.seen = known.seen.max(revision);
            table.unwatched.push_back((self.clock.now(), *owner, key.clone()));
            drop(table);
            self.earlier.notify_one();
        }
    }

    /// Watches the queues of keys that have been held for a while.
    pub(crate) fn watch_held(&self, now: Instant) {
        let mut table = self.table();
        while let Some((due, ..)) = table.unwatched.front()
            && *due <= now
            && let Some((_, owner, key)) = table.unwatched.pop_front()
        {
            let Some(KeyState::Known(known)) = table.key(&owner, &key) else { continue };
            if !known.is_granted() || known.watch.is_some() {
                continue;
            }
            let (watch, seen) = (self.watches.next_id(), known.seen);
            known.watch = Some(watch);
            let (from, to) = self.names.range(&key);
            table.by_watch.insert(watch, WatchedClaim { owner, key, predecessor: None });
            self.watches.create(watch, WatchedKeys::Range { from, to }, seen + 1);
        }
    }

    /// Forgets the keys of a lease that has ended, and tells their holders and waiters.
    pub(crate) fn lose_lease(&self, lease: i64) {
        let is_of =
            |state: &KeyState| matches!(state, KeyState::Known(known) if known.lease.id == lease);
        let mut table = self.table();
        let mut lost = Vec::new();
        for (owner, of_owner) in &table.by_owner {
            let keys = of_owner.keys.iter().filter(|(_, state)| is_of(state));
            lost.extend(keys.map(|(key, _)| (*owner, key.clone())));
        }
        for (owner, key) in &lost {
            if let Some(watch) = table.remove(owner, key) {
                self.watches.cancel(watch);
            }
        }
        drop(table);
        for (_, key) in lost {
            self.tell_of_change(&key);
        }
    }

    /// The key is gone without a release.
    pub(crate) fn lose(&self, owner: &Owner, key: &Key) {
        self.remove(owner, key);
        self.tell_of_change(key);
    }

    fn tell_of_change(&self, key: &Key) {
        if let Some(notifier) = self.events.notifier() {
            notifier.key_changed(key.as_str());
        }
    }

    /// What ends with the pool: `leases`, unless released keys are to stay for a while. Then all other keys.
    pub(crate) fn last_wishes(&self, leases: impl Iterator<Item = i64>) -> LastWishes {
        let table = self.table();
        let (mut staying, mut keys) = (HashSet::new(), Vec::new());
        for (owner, of_owner) in &table.by_owner {
            for (key, state) in &of_owner.keys {
                match state {
                    KeyState::Known(known) if of_owner.is_kept && !known.is_leaving() => {
                        staying.insert(known.lease.id);
                    }
                    KeyState::Known(known) => {
                        keys.push((Some(known.lease.id), self.names.of_owner(key, owner)));
                    }
                    KeyState::Unanswered => keys.push((None, self.names.of_owner(key, owner))),
                }
            }
        }
        let leases = leases.filter(|lease| !staying.contains(lease)).collect();
        let is_left = |lease: &Option<i64>| lease.is_none_or(|lease| staying.contains(&lease));
        keys.retain(|(lease, _)| is_left(lease));
        LastWishes { leases, keys: keys.into_iter().map(|(_, key)| key).collect() }
    }
}

impl WatchSink for OwnedKeys {
    fn keys_changed(&self, watch: i64, events: &[KeyEvent]) {
        let mut table = self.table();
        let Some(of) = table.by_watch.get(&watch) else { return };
        let (owner, key) = (of.owner, of.key.clone());
        let Some(KeyState::Known(known)) = table.key(&owner, &key) else { return };
        match known.place {
            KeyPlace::Queued => {
                known.watch = None;
                table.by_watch.remove(&watch);
                drop(table);
                self.watches.cancel(watch);
                self.events.head_of_queue(key.as_str(), owner, Duration::ZERO);
            }
            KeyPlace::Granted => {
                let own = self.names.of_owner(&key, &owner);
                let is_own = |event: &&KeyEvent| event.key.key == own;
                let is_lost = events.iter().filter(is_own).any(|event| event.is_deletion);
                let is_other = |event: &KeyEvent| !event.is_deletion && event.key.key != own;
                let is_contended = events.iter().any(is_other);
                drop(table);
                if is_lost {
                    self.lose(&owner, &key);
                } else if is_contended {
                    self.events.contended(key.as_str());
                }
            }
            KeyPlace::New | KeyPlace::Leaving => {}
        }
    }

    fn watch_ended(&self, watch: i64) {
        let mut table = self.table();
        let Some(of) = table.by_watch.remove(&watch) else { return };
        let WatchedClaim { owner, key, .. } = of;
        let Some(KeyState::Known(known)) = table.key(&owner, &key) else { return };
        known.watch = None;
        let place = known.place;
        drop(table);
        match place {
            // It looks again, and is watched again behind that.
            KeyPlace::Queued => self.events.head_of_queue(key.as_str(), owner, Duration::ZERO),
            KeyPlace::Granted => drop(self.missed.send(MissedChanges { owner, key })),
            KeyPlace::New | KeyPlace::Leaving => {}
        }
    }
}

/// The right to send requests for an owner. Dropping it passes the right on, and forgets an owner without keys.
pub(crate) struct OwnerTurn {
    _turn: OwnedMutexGuard<()>,
    user: OwnerUser,
}

impl OwnerTurn {
    pub(crate) const fn owner(&self) -> &Owner {
        &self.user.owner
    }
}

struct OwnerUser {
    table: Arc<OwnedKeys>,
    owner: Owner,
}

impl Drop for OwnerUser {
    fn drop(&mut self) {
        let mut table = self.table.table();
        if let Some(of_owner) = table.by_owner.get_mut(&self.owner) {
            of_owner.users -= 1;
        }
        table.remove_if_over(&self.owner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::etcd::leases::PoolLease;

    fn owned_keys() -> Arc<OwnedKeys> {
        let (watches, _inbox) = KeyWatches::new();
        let events = QueueEvents::new(mpsc::unbounded_channel().0);
        OwnedKeys::new(events, Clock::runtime(), KeyNames::new("/locks"), watches).0
    }

    fn queued_key(seen: i64, lease: &Arc<PoolLease>) -> OwnerKey {
        let place = KeyPlace::New;
        OwnerKey { created: 7, seen, lease: lease.clone(), place, fence: None, watch: None }
    }

    #[tokio::test(start_paused = true)]
    async fn a_predecessor_that_is_watched_is_not_watched_anew() {
        let (keys, owner, key) = (owned_keys(), Owner::random().unwrap(), Key::from("order:1"));
        let lease = PoolLease::granted(1, Duration::from_secs(33), keys.clock.now());
        let lease = Arc::new(lease);
        let _turn = keys.begin(owner, Duration::from_secs(30)).await;
        let watch = |seen, predecessor: &str| {
            let queued = queued_key(seen, &lease);
            assert!(keys.queue_behind(&owner, &key, &queued, predecessor.as_bytes().to_vec()));
            keys.known(&owner, &key).unwrap().watch.unwrap()
        };
        let first = watch(7, "one");
        assert_eq!(watch(9, "one"), first);
        let second = watch(10, "other");
        assert_ne!(second, first);
        // The watch has told of the deletion, so there is none.
        keys.keys_changed(second, &[]);
        assert_ne!(watch(11, "other"), second);
    }

    #[tokio::test(start_paused = true)]
    async fn only_keys_of_which_nothing_is_known_are_expected() {
        let (keys, owner) = (owned_keys(), Owner::random().unwrap());
        let names = [Key::from("order:1"), Key::from("order:2")];
        let turn = keys.begin(owner, Duration::from_secs(30)).await;
        assert_eq!(keys.expect_puts(&owner, &names[..1]), names[..1]);
        assert_eq!(keys.expect_puts(&owner, &names), names[1..]);
        names.iter().for_each(|name| keys.remove(&owner, name));
        drop(turn);
        assert_eq!(keys.first_due(), None, "nothing is left to be deleted");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_for_an_owner_whose_time_is_over_has_a_deadline_again() {
        let (keys, owner) = (owned_keys(), Owner::random().unwrap());
        let short = Duration::from_millis(300);
        let first = keys.begin(owner, short).await;
        tokio::time::advance(short).await;
        assert_eq!(keys.take_due(keys.clock.now()), [owner]);
        assert!(keys.is_over(&owner));
        let deletion = tokio::time::timeout(Duration::ZERO, keys.turn(owner, short)).await;
        assert!(deletion.is_err() && keys.is_over(&owner), "a deletion leaves that as it is");
        // The owner is known as long as one request of it goes on.
        let second = {
            let next = keys.begin(owner, short);
            tokio::pin!(next);
            assert!(tokio::time::timeout(Duration::ZERO, &mut next).await.is_err());
            drop(first);
            next.await
        };
        keys.expect_puts(&owner, &[Key::from("order:1")]);
        drop(second);
        assert!(!keys.is_over(&owner));
        assert_eq!(keys.first_due(), Some(keys.clock.now() + short));
    }
}
