//! What this process looks at, because the server sends no notifications.

use std::collections::HashMap;
use std::time::Duration;

use crate::backend::Owner;
use crate::backend::mysql::held_grants::HeldGrants;
use crate::base::clock::Instant;
use crate::base::jitter;
use crate::base::key::Key;

/// A key, and an owner of this process.
pub(crate) type Place = (Key, Owner);

/// The queued owners of this process, and the keys that it holds. Entries without a request for a while are forgotten.
#[derive(Debug, Default)]
pub(crate) struct WatchList {
    queued: HashMap<Place, QueuedOwner>,
    /// Owners with an entry of a connection that has ended, and when the entry was left. A grant removes the entry.
    left: HashMap<Place, Instant>,
    held: HeldGrants,
    /// When grants that are over were last forgotten.
    pruned: Option<Instant>,
}

#[derive(Debug)]
struct QueuedOwner {
    /// How many owners are before it.
    rank: i64,
    /// When the server has last seen a request.
    seen: Instant,
    /// When its pool was last told that it may request the key.
    told: Option<Instant>,
}

/// What a look has found about a queued owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The owner holds the key.
    Granted,
    /// It is in the queue behind `rank` others. The key is free, or will be after `free_in`, if known.
    Queued { rank: i64, free_in: Option<Duration> },
    /// It is in no queue.
    Missing,
}

impl WatchList {
    /// How long an entry in the queue is fresh: a request within this time does not need to enter the queue again.
    const FRESH: Duration = Duration::from_secs(4);
    /// A queued owner without a request for this long has been given up.
    const FORGOTTEN: Duration = Duration::from_secs(10);
    /// There may be many grants.
    const PRUNED_EVERY: Duration = Duration::from_secs(1);
    /// How long a pool has for a request before it is told again.
    const REMINDER: Duration = Duration::from_millis(200);
    /// The time between two looks: for an owner at the head of a queue or behind it, for one further behind, and for a holder.
    const AT_HEAD: Duration = Duration::from_millis(20);
    const BEHIND: Duration = Duration::from_millis(100);
    const HOLDING: Duration = Duration::from_millis(100);

    /// The owner is in the queue.
    pub(crate) fn queued(&mut self, key: &Key, owner: Owner, rank: i64, now: Instant) {
        self.held.remove(key, owner);
        let place = (key.clone(), owner);
        self.left.remove(&place);
        self.queued.insert(place, QueuedOwner { rank, seen: now, told: None });
    }

    /// The rank of an owner that is in the queue, unless that was long ago.
    pub(crate) fn rank(&self, key: &Key, owner: Owner, now: Instant) -> Option<i64> {
        let entry = self.queued.get(&(key.clone(), owner))?;
        (now.since(entry.seen) < Self::FRESH).then_some(entry.rank)
    }

    /// The owner holds the key until this time. Returns whether it was queued.
    pub(crate) fn granted(
        &mut self,
        key: &Key,
        owner: Owner,
        until: Instant,
        contended: bool,
    ) -> bool {
        self.held.add(key, owner, until, contended);
        let place = (key.clone(), owner);
        let had_left = self.left.remove(&place).is_some();
        self.queued.remove(&place).is_some() || had_left
    }

    /// The owner neither holds the key nor waits for it.
    pub(crate) fn ended(&mut self, key: &Key, owner: Owner) {
        let place = (key.clone(), owner);
        self.queued.remove(&place);
        self.left.remove(&place);
        self.held.remove(key, owner);
    }

    /// The lease was renewed.
    pub(crate) fn renewed(&mut self, key: &Key, owner: Owner, until: Instant) {
        self.held.renewed(key, owner, until);
    }

    /// Whether its pool did not know yet that other owners are queued for this key.
    pub(crate) fn contended(&mut self, key: &Key) -> bool {
        self.held.contended(key)
    }

    /// Entries of the queue name a connection that has ended.
    pub(crate) fn leave_queues(&mut self, now: Instant) {
        self.left.extend(self.queued.drain().map(|(place, _)| (place, now)));
    }

    /// How long to wait between two looks; `None` if there is nothing to look at.
    pub(crate) fn interval(&self) -> Option<Duration> {
        if self.queued.values().any(|entry| entry.rank < 2) {
            return Some(jitter::below(Self::AT_HEAD));
        }
        if !self.queued.is_empty() {
            return Some(jitter::below(Self::BEHIND));
        }
        self.looks_at_held().then(|| jitter::below(Self::HOLDING))
    }

    /// The queued owners to look at. Forgets those that are over.
    pub(crate) fn places(&mut self, now: Instant) -> Vec<Place> {
        self.queued.retain(|_, entry| now.since(entry.seen) < Self::FORGOTTEN);
        self.prune(now);
        self.queued.keys().cloned().collect()
    }

    /// Occasionally forgets grants that are over.
    pub(crate) fn prune(&mut self, now: Instant) {
        if self.pruned.is_none_or(|pruned| now.since(pruned) >= Self::PRUNED_EVERY) {
            self.pruned = Some(now);
            self.held.prune(now);
            self.left.retain(|_, since| now.since(*since) < Self::FORGOTTEN);
        }
    }

    /// Whether a pool needs to learn of owners that queue for a key that it holds.
    pub(crate) fn looks_at_held(&self) -> bool {
        self.held.has_quiet()
    }

    /// Records what a look has found. If its pool has to be told, returns after what time the owner may request the key: zero for
    /// a grant.
    pub(crate) fn found(&mut self, place: &Place, found: Found, now: Instant) -> Option<Duration> {
        /// Not granted yet.
        const AT_ONCE: Duration = Duration::from_millis(1);
        let entry = self.queued.get_mut(place)?;
        let available_in = match found {
            Found::Granted => Duration::ZERO,
            Found::Missing => {
                self.queued.remove(place);
                return Some(AT_ONCE);
            }
            Found::Queued { rank, free_in } => {
                entry.rank = rank;
                free_in.filter(|_| rank == 0)?.max(AT_ONCE)
            }
        };
        if entry.told.is_some_and(|told| now.since(told) < Self::REMINDER) {
            return None;
        }
        entry.told = Some(now);
        Some(available_in)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Instant = Instant::from_nanos(1_000_000_000_000);
    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn place() -> Place {
        (Key::from("k"), Owner::random().unwrap())
    }

    #[test]
    fn an_owner_is_told_once_that_it_has_the_key() {
        let (mut list, place) = (WatchList::default(), place());
        assert_eq!(list.interval(), None);
        list.queued(&place.0, place.1, 1, T);
        assert!(list.interval().is_some_and(|it| it <= MS(20)));
        let waits = Found::Queued { rank: 1, free_in: Some(MS(0)) };
        assert_eq!(list.found(&place, waits, T), None);
        assert_eq!(list.found(&place, Found::Granted, T), Some(MS(0)));
        assert_eq!(list.found(&place, Found::Granted, T + MS(10)), None);
        // Its request may have been lost.
        assert_eq!(list.found(&place, Found::Granted, T + MS(300)), Some(MS(0)));
        assert!(list.granted(&place.0, place.1, T + MS(5_000), false));
        assert_eq!(list.found(&place, Found::Granted, T + MS(900)), None);
    }

    #[test]
    fn the_head_of_the_queue_is_told_of_a_free_key_and_others_are_not() {
        let (mut list, place) = (WatchList::default(), place());
        list.queued(&place.0, place.1, 2, T);
        let free = |rank| Found::Queued { rank, free_in: Some(MS(0)) };
        assert_eq!(list.found(&place, free(1), T), None);
        assert_eq!(list.found(&place, free(0), T), Some(MS(1)));
        assert_eq!(list.rank(&place.0, place.1, T + MS(3_999)), Some(0));
        assert_eq!(list.rank(&place.0, place.1, T + MS(4_000)), None);
        assert_eq!(list.found(&place, Found::Missing, T), Some(MS(1)));
        assert_eq!(list.rank(&place.0, place.1, T), None);
    }

    #[test]
    fn an_entry_of_a_lost_connection_is_removed_by_a_grant() {
        let (mut list, place) = (WatchList::default(), place());
        list.queued(&place.0, place.1, 0, T);
        list.leave_queues(T);
        assert_eq!(list.rank(&place.0, place.1, T), None);
        assert_eq!((list.interval(), list.places(T)), (None, vec![]));
        assert!(list.granted(&place.0, place.1, T + MS(5_000), false));
        assert!(!list.granted(&place.0, place.1, T + MS(5_000), false));
        // An owner that was given up makes no request.
        list.queued(&place.0, place.1, 0, T);
        list.leave_queues(T);
        list.prune(T + MS(10_000));
        assert!(list.left.is_empty());
    }

    #[test]
    fn nothing_is_kept_for_owners_that_are_gone() {
        let (mut list, place) = (WatchList::default(), place());
        list.queued(&place.0, place.1, 0, T);
        assert_eq!(list.places(T + MS(9_000)), std::slice::from_ref(&place));
        assert_eq!(list.places(T + MS(10_000)), []);
        list.granted(&place.0, place.1, T + MS(11_000), false);
        assert!(list.looks_at_held());
        assert!(list.contended(&place.0));
        assert!(!list.contended(&place.0) && !list.looks_at_held());
        assert_eq!(list.places(T + MS(11_000)), []);
        list.granted(&place.0, place.1, T + MS(13_000), false);
        list.prune(T + MS(13_000));
        assert!(!list.looks_at_held());
    }
}
