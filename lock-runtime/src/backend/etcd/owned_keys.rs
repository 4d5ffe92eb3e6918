//! What each owner of this process has in the cluster, as far as is known.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::backend::Owner;
use crate::backend::coordination::owners::{OwnerTable, OwnerTurn, Owners};
use crate::backend::etcd::key_names::KeyNames;
use crate::backend::etcd::leases::PoolLease;
use crate::backend::etcd::member_task::LastRequests;
use crate::backend::etcd::owned_key::{KeyPlace, KeyState, OwnerKey, leases_of};
use crate::backend::etcd::protocol::watch::{KeyEvent, WatchedKeys};
use crate::backend::etcd::watches::{KeyWatches, WatchSink};
use crate::backend::queue_events::QueueEvents;
use crate::base::clock::{Clock, Instant};
use crate::base::key::Key;

/// A key that is held for longer than this is watched.
const UNWATCHED: Duration = Duration::from_millis(50);

/// The keys of a pool, and where watches lead.
pub(crate) struct OwnedKeys {
    pub(crate) owners: Arc<Owners<LockKeys, KeyIndex>>,
    pub(crate) events: Arc<QueueEvents>,
    pub(crate) names: KeyNames,
    watches: KeyWatches,
    missed: mpsc::UnboundedSender<MissedChanges>,
}

/// A key around which a watch may have missed changes.
pub(crate) enum MissedChanges {
    /// A held key. The watch has ended.
    OfHeld { owner: Owner, key: Key },
    /// The predecessor of a queued key, which was made by the revision `created`. The watch goes on.
    OfPredecessor { watch: i64, predecessor: Arc<[u8]>, created: i64 },
}

/// What an owner has for each of its locks.
type LockKeys = Vec<(Key, KeyState)>;

type KeyTable = OwnerTable<LockKeys, KeyIndex>;

pub(crate) type KeyTurn = OwnerTurn<LockKeys, KeyIndex>;

#[derive(Default)]
pub(crate) struct KeyIndex {
    by_watch: HashMap<i64, WatchedClaim>,
    /// Held keys that are not watched yet, and when they will be.
    unwatched: VecDeque<(Instant, Owner, Key)>,
}

/// What a watch is for.
#[derive(Clone)]
struct WatchedClaim {
    owner: Owner,
    key: Key,
    /// The name of the key that is watched for its deletion. `None` if the whole queue is.
    predecessor: Option<Arc<[u8]>>,
}

impl KeyTable {
    fn key(&mut self, owner: &Owner, key: &Key) -> Option<&mut KeyState> {
        let keys = self.state_mut(owner)?;
        keys.iter_mut().find(|(of, _)| of == key).map(|(_, state)| state)
    }

    fn known(&mut self, owner: &Owner, key: &Key) -> Option<&mut OwnerKey> {
        self.key(owner, key)?.known_mut()
    }

    /// Returns the watch that is no longer needed.
    fn remove(&mut self, owner: &Owner, key: &Key) -> Option<i64> {
        let (keys, index) = self.split_mut(owner)?;
        let at = keys.iter().position(|(of, _)| of == key)?;
        let (_, state) = keys.swap_remove(at);
        let watch = state.known().and_then(|known| known.watch);
        if let Some(watch) = watch {
            index.by_watch.remove(&watch);
        }
        self.forget_unused(owner);
        watch
    }
}

impl OwnedKeys {
    pub(crate) fn new(
        events: Arc<QueueEvents>,
        clock: Clock,
        names: KeyNames,
        watches: KeyWatches,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<MissedChanges>) {
        let (missed, misses) = mpsc::unbounded_channel();
        let owners = Owners::new(clock);
        (Arc::new(Self { owners, events, names, watches, missed }), misses)
    }

    fn table(&self) -> MutexGuard<'_, KeyTable> {
        self.owners.table()
    }

    /// What the owner has for `key`. Keys of leases that have ended do not count.
    pub(crate) fn known(&self, owner: &Owner, key: &Key) -> Option<OwnerKey> {
        let mut table = self.table();
        table.known(owner, key).filter(|known| known.lease.is_current()).cloned()
    }

    pub(crate) fn locks_of(&self, owner: &Owner) -> Vec<Key> {
        let table = self.table();
        let keys = table.state(owner).into_iter().flatten();
        keys.map(|(key, _)| key.clone()).collect()
    }

    /// A request that puts these keys is about to be sent. Returns the keys for which no other request was sent.
    pub(crate) fn expect_puts(&self, owner: &Owner, keys: &[Key]) -> Vec<Key> {
        let (mut table, mut expected) = (self.table(), Vec::new());
        let Some(known) = table.state_mut(owner) else { return expected };
        for key in keys {
            if known.iter().all(|(of, _)| of != key) {
                known.push((key.clone(), KeyState::Unanswered));
                expected.push(key.clone());
            }
        }
        expected
    }

    /// Records a key. `false` if its lease has ended meanwhile. Watches of the former state end.
    pub(crate) fn set(&self, owner: &Owner, key: &Key, mut known: OwnerKey) -> bool {
        let mut table = self.table();
        // The watch may have ended since it was read.
        known.watch = known.watch.filter(|watch| table.index.by_watch.contains_key(watch));
        let is_set = self.set_in(&mut table, owner, key, known);
        drop(table);
        if is_set {
            self.owners.earlier.notify_one();
        }
        is_set
    }

    fn set_in(&self, table: &mut KeyTable, owner: &Owner, key: &Key, known: OwnerKey) -> bool {
        if !known.lease.is_current() || table.state(owner).is_none() {
            return false;
        }
        let former = table.known(owner, key).and_then(|former| former.watch);
        let former = former.filter(|watch| known.watch != Some(*watch));
        if known.is_granted() && known.watch.is_none() {
            let due = self.owners.clock.now() + UNWATCHED;
            table.index.unwatched.push_back((due, *owner, key.clone()));
        }
        match table.key(owner, key) {
            Some(state) => *state = KeyState::Known(known),
            None => {
                if let Some(keys) = table.state_mut(owner) {
                    keys.push((key.clone(), KeyState::Known(known)));
                }
            }
        }
        if let Some(former) = former {
            table.index.by_watch.remove(&former);
            self.watches.cancel(former);
        }
        true
    }

    /// Records that the key waits behind `predecessor`, which is watched from the revision at which it was seen. If it is already
    /// watched, that watch continues.
    pub(crate) fn queue_behind(
        &self,
        owner: &Owner,
        key: &Key,
        own: &OwnerKey,
        predecessor: Vec<u8>,
    ) -> bool {
        let mut table = self.table();
        let queued = table.known(owner, key).filter(|known| known.place == KeyPlace::Queued);
        let present = queued.and_then(|known| known.watch);
        let is_same = |watch: &i64| {
            let watched = table.index.by_watch.get(watch).and_then(|it| it.predecessor.as_deref());
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
            table.index.by_watch.insert(watch, of);
            self.watches.create(watch, WatchedKeys::Deletion { key: predecessor }, seen + 1);
        }
        true
    }

    /// The key that this watch is for is gone.
    pub(crate) fn predecessor_gone(&self, watch: i64) {
        self.keys_changed(watch, &[]);
    }

    pub(crate) fn remove(&self, owner: &Owner, key: &Key) {
        if let Some(watch) = self.table().remove(owner, key) {
            self.watches.cancel(watch);
        }
    }

    /// When there is something to do without a request.
    pub(crate) fn first_due(&self) -> Option<Instant> {
        let deadline = self.owners.first_deadline();
        let unwatched = self.table().index.unwatched.front().map(|(due, ..)| *due);
        [deadline, unwatched].into_iter().flatten().min()
    }

    /// A held key was there at this revision. It is watched from there on, if it is not yet.
    pub(crate) fn on_seen(&self, owner: &Owner, key: &Key, created: i64, revision: i64) {
        let mut table = self.table();
        let Some(known) = table.known(owner, key) else { return };
        if known.created == created && known.is_granted() && known.watch.is_none() {
            known.seen = known.seen.max(revision);
            table.index.unwatched.push_back((self.owners.clock.now(), *owner, key.clone()));
            drop(table);
            self.owners.earlier.notify_one();
        }
    }

    /// Watches the queues of keys that have been held for a while.
    pub(crate) fn watch_held(&self, now: Instant) {
        let mut table = self.table();
        while let Some((due, ..)) = table.index.unwatched.front()
            && *due <= now
            && let Some((_, owner, key)) = table.index.unwatched.pop_front()
        {
            let Some(known) = table.known(&owner, &key) else { continue };
            if !known.is_granted() || known.watch.is_some() {
                continue;
            }
            let (watch, seen) = (self.watches.next_id(), known.seen);
            known.watch = Some(watch);
            let (from, to) = self.names.range(&key);
            table.index.by_watch.insert(watch, WatchedClaim { owner, key, predecessor: None });
            self.watches.create(watch, WatchedKeys::Range { from, to }, seen + 1);
        }
    }

    /// Forgets the keys of a lease that has ended, and tells their holders and waiters.
    pub(crate) fn lose_lease(&self, lease: i64) {
        let is_of = |state: &KeyState| state.known().is_some_and(|known| known.lease.id == lease);
        let mut table = self.table();
        let mut lost = Vec::new();
        for (owner, keys, _) in table.all() {
            let keys = keys.iter().filter(|(_, state)| is_of(state));
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

    /// Records that the keys of an owner could not be deleted when its time was over. Returns their leases.
    pub(crate) fn mark_refused(&self, owner: &Owner) -> Vec<Arc<PoolLease>> {
        let mut table = self.table();
        let keys = table.state_mut(owner).into_iter().flatten();
        let marked = keys.filter_map(|(_, state)| state.known_mut()).map(|known| {
            known.place = KeyPlace::Leaving;
            &*known
        });
        leases_of(marked)
    }

    /// Whether a key that is not about to be deleted ends with this lease.
    pub(crate) fn needs(&self, lease: &PoolLease) -> bool {
        let table = self.table();
        table.all().any(|(_, keys, _)| {
            let mut known = keys.iter().filter_map(|(_, state)| state.known());
            known.any(|known| known.lease.id == lease.id && !known.is_leaving())
        })
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

    /// What ends with the pool: `leases`, except the leases with released keys that stay for a while. There, all other keys end.
    pub(crate) fn last_requests(&self, leases: impl Iterator<Item = i64>) -> LastRequests {
        let table = self.table();
        let (mut staying, mut keys) = (HashSet::new(), Vec::new());
        for (owner, states, is_kept) in table.all() {
            for (key, state) in states {
                match state {
                    KeyState::Known(known) if is_kept && !known.is_leaving() => {
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
        LastRequests { leases, keys: keys.into_iter().map(|(_, key)| key).collect() }
    }
}

impl WatchSink for OwnedKeys {
    fn keys_changed(&self, watch: i64, events: &[KeyEvent]) {
        let mut table = self.table();
        let Some(of) = table.index.by_watch.get(&watch) else { return };
        let (owner, key) = (of.owner, of.key.clone());
        let Some(known) = table.known(&owner, &key) else { return };
        match known.place {
            KeyPlace::Queued => {
                known.watch = None;
                table.index.by_watch.remove(&watch);
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

    fn began_late(&self, watch: i64) {
        let mut table = self.table();
        let Some(of) = table.index.by_watch.get(&watch) else { return };
        let (owner, key, predecessor) = (of.owner, of.key.clone(), of.predecessor.clone());
        let Some(known) = table.known(&owner, &key) else { return };
        let created = known.created;
        drop(table);
        if let Some(predecessor) = predecessor {
            let _ = self.missed.send(MissedChanges::OfPredecessor { watch, predecessor, created });
        }
    }

    fn watch_ended(&self, watch: i64) {
        let mut table = self.table();
        let Some(of) = table.index.by_watch.remove(&watch) else { return };
        let WatchedClaim { owner, key, .. } = of;
        let Some(known) = table.known(&owner, &key) else { return };
        known.watch = None;
        let place = known.place;
        drop(table);
        match place {
            // The owner looks again, and its predecessor is watched again after that.
            KeyPlace::Queued => self.events.head_of_queue(key.as_str(), owner, Duration::ZERO),
            KeyPlace::Granted => drop(self.missed.send(MissedChanges::OfHeld { owner, key })),
            KeyPlace::New | KeyPlace::Leaving => {}
        }
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
        OwnerKey::new(7, seen, lease.clone())
    }

    #[tokio::test(start_paused = true)]
    async fn a_predecessor_that_is_watched_is_not_watched_anew() {
        let (keys, owner, key) = (owned_keys(), Owner::random().unwrap(), Key::from("order:1"));
        let lease = PoolLease::granted(1, Duration::from_secs(33), keys.owners.clock.now());
        let lease = Arc::new(lease);
        let _turn = keys.owners.begin(owner, Duration::from_secs(30)).await;
        let watch = |seen, predecessor: &str| {
            let queued = queued_key(seen, &lease);
            assert!(keys.queue_behind(&owner, &key, &queued, predecessor.as_bytes().to_vec()));
            keys.known(&owner, &key).unwrap().watch.unwrap()
        };
        let first = watch(7, "one");
        assert_eq!(watch(9, "one"), first);
        let second = watch(10, "other");
        assert_ne!(second, first);
        // The watch has reported the deletion, so none is left.
        keys.keys_changed(second, &[]);
        assert_ne!(watch(11, "other"), second);
    }

    #[tokio::test(start_paused = true)]
    async fn only_keys_of_which_nothing_is_known_are_expected() {
        let (keys, owner) = (owned_keys(), Owner::random().unwrap());
        let names = [Key::from("order:1"), Key::from("order:2")];
        let turn = keys.owners.begin(owner, Duration::from_secs(30)).await;
        assert_eq!(keys.expect_puts(&owner, &names[..1]), names[..1]);
        assert_eq!(keys.expect_puts(&owner, &names), names[1..]);
        names.iter().for_each(|name| keys.remove(&owner, name));
        drop(turn);
        assert_eq!(keys.first_due(), None, "nothing is left to be deleted");
    }
}
