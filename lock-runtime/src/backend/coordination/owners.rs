//! Which owners of this process have something in a store, and until when.
//!
//! An owner enters this table before its first request is sent, and stays until what it has is known to be gone. So what it has
//! is found and deleted no later than its deadline, even if an answer was lost or a caller dropped.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, OwnedMutexGuard};

use crate::backend::Owner;
use crate::base::clock::{Clock, Instant};
use crate::base::mutex::{Mutex, MutexGuard};

/// What one owner has in a store, as far as is known.
pub(crate) trait OwnedState: Default {
    fn is_empty(&self) -> bool;
}

impl<T> OwnedState for Vec<T> {
    fn is_empty(&self) -> bool {
        self.is_empty()
    }
}

/// The owners of a pool. `S` is what each has, and `I` leads to owners and changes together with them.
pub(crate) struct Owners<S, I> {
    pub(crate) clock: Clock,
    /// Notified when the first deadline may be earlier than before.
    pub(crate) earlier: Notify,
    table: Mutex<OwnerTable<S, I>>,
}

#[derive(Default)]
pub(crate) struct OwnerTable<S, I> {
    pub(crate) index: I,
    by_owner: HashMap<Owner, OwnerEntry<S>>,
    /// Deadlines of owners, each with a number that makes it unique.
    deadlines: BTreeMap<(Instant, u64), Owner>,
    last_number: u64,
}

struct OwnerEntry<S> {
    state: S,
    turn: Arc<tokio::sync::Mutex<()>>,
    /// How many requests are in progress.
    users: usize,
    deadline: (Instant, u64),
    /// The deadline has passed, and the state is about to be deleted.
    is_over: bool,
    /// Released, with its keys locked until the deadline.
    is_kept: bool,
}

impl<S: OwnedState, I> OwnerTable<S, I> {
    pub(crate) fn state(&self, owner: &Owner) -> Option<&S> {
        self.by_owner.get(owner).map(|entry| &entry.state)
    }

    pub(crate) fn state_mut(&mut self, owner: &Owner) -> Option<&mut S> {
        self.by_owner.get_mut(owner).map(|entry| &mut entry.state)
    }

    /// What the owner has, and the index, to be changed together.
    pub(crate) fn split_mut(&mut self, owner: &Owner) -> Option<(&mut S, &mut I)> {
        let entry = self.by_owner.get_mut(owner)?;
        Some((&mut entry.state, &mut self.index))
    }

    /// All owners. The flag says that an owner has released its keys, which stay locked until the deadline.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&Owner, &S, bool)> {
        self.by_owner.iter().map(|(owner, entry)| (owner, &entry.state, entry.is_kept))
    }

    #[cfg(feature = "zookeeper")]
    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut S> {
        self.by_owner.values_mut().map(|entry| &mut entry.state)
    }

    /// Forgets an owner that has nothing and requests nothing.
    pub(crate) fn forget_unused(&mut self, owner: &Owner) {
        let is_unused = |entry: &OwnerEntry<S>| entry.users == 0 && entry.state.is_empty();
        if self.by_owner.get(owner).is_some_and(is_unused)
            && let Some(entry) = self.by_owner.remove(owner)
        {
            self.deadlines.remove(&entry.deadline);
        }
    }

    /// The entry of `owner`, with this deadline if there was none.
    fn entry(&mut self, owner: Owner, until: Instant) -> &mut OwnerEntry<S> {
        let Self { by_owner, deadlines, last_number, .. } = self;
        by_owner.entry(owner).or_insert_with(|| {
            *last_number += 1;
            let deadline = (until, *last_number);
            deadlines.insert(deadline, owner);
            let (state, turn) = (S::default(), Arc::default());
            OwnerEntry { state, turn, users: 0, deadline, is_over: false, is_kept: false }
        })
    }

    fn set_deadline(&mut self, owner: &Owner, until: Instant) {
        if let Some(entry) = self.by_owner.get_mut(owner) {
            self.deadlines.remove(&entry.deadline);
            entry.deadline.0 = until;
            entry.is_over = false;
            self.deadlines.insert(entry.deadline, *owner);
        }
    }
}

impl<S: OwnedState, I> Owners<S, I> {
    pub(crate) fn new(clock: Clock) -> Arc<Self>
    where
        I: Default,
    {
        Arc::new(Self { clock, earlier: Notify::new(), table: Mutex::default() })
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, OwnerTable<S, I>> {
        self.table.lock()
    }

    /// The turn of a request for `owner`: requests of one owner run one after another. What they leave is deleted
    /// `kept_for` from now, unless the deadline is already later.
    pub(crate) async fn begin(
        self: &Arc<Self>,
        owner: Owner,
        kept_for: Duration,
    ) -> OwnerTurn<S, I> {
        let turn = self.turn(owner, kept_for).await;
        // Not before the turn: until then the deadline of an earlier request counts.
        let until = self.clock.now() + kept_for;
        let mut table = self.table();
        let is_earlier = |it: &OwnerEntry<S>| !it.is_kept && (it.is_over || it.deadline.0 < until);
        if table.by_owner.get(&owner).is_some_and(is_earlier) {
            table.set_deadline(&owner, until);
            drop(table);
            self.earlier.notify_one();
        }
        turn
    }

    /// Like [`begin`](Self::begin), for the deletion of what is over: a deadline that has passed is left unchanged.
    pub(crate) async fn turn(
        self: &Arc<Self>,
        owner: Owner,
        kept_for: Duration,
    ) -> OwnerTurn<S, I> {
        let until = self.clock.now() + kept_for;
        let (turn, user) = {
            let mut table = self.table();
            let entry = table.entry(owner, until);
            entry.users += 1;
            (entry.turn.clone(), OwnerUser { owners: self.clone(), owner })
        };
        self.earlier.notify_one();
        OwnerTurn { _turn: turn.lock_owned().await, user }
    }

    /// Extends the deadline.
    pub(crate) fn keep_until(&self, owner: &Owner, until: Instant) {
        let mut table = self.table();
        let extends = |entry: &OwnerEntry<S>| entry.deadline.0 < until || entry.is_over;
        if table.by_owner.get(owner).is_some_and(extends) {
            table.set_deadline(owner, until);
        }
    }

    /// Sets the deadline. `is_kept` says that the owner has released its keys.
    pub(crate) fn end_at(&self, owner: &Owner, until: Instant, is_kept: bool) {
        let mut table = self.table();
        table.set_deadline(owner, until);
        if let Some(entry) = table.by_owner.get_mut(owner) {
            entry.is_kept = is_kept;
        }
        drop(table);
        self.earlier.notify_one();
    }

    pub(crate) fn deadline(&self, owner: &Owner) -> Option<Instant> {
        self.table().by_owner.get(owner).map(|entry| entry.deadline.0)
    }

    /// Whether the deadline has passed, and no other one was set since.
    pub(crate) fn is_over(&self, owner: &Owner) -> bool {
        self.table().by_owner.get(owner).is_some_and(|entry| entry.is_over)
    }

    pub(crate) fn first_deadline(&self) -> Option<Instant> {
        self.table().deadlines.first_key_value().map(|((until, _), _)| *until)
    }

    /// The owners with something to delete. Each is returned once, until it has another deadline.
    pub(crate) fn take_due(&self, now: Instant) -> Vec<Owner> {
        let mut table = self.table();
        let mut due = Vec::new();
        while let Some(first) = table.deadlines.first_entry()
            && first.key().0 <= now
        {
            due.push(first.remove());
        }
        for owner in &due {
            if let Some(entry) = table.by_owner.get_mut(owner) {
                entry.is_over = true;
            }
        }
        due
    }
}

/// The right to send requests for an owner. Dropping it passes on the right, and forgets an owner that has nothing.
pub(crate) struct OwnerTurn<S: OwnedState, I> {
    _turn: OwnedMutexGuard<()>,
    user: OwnerUser<S, I>,
}

impl<S: OwnedState, I> OwnerTurn<S, I> {
    pub(crate) const fn owner(&self) -> &Owner {
        &self.user.owner
    }
}

struct OwnerUser<S: OwnedState, I> {
    owners: Arc<Owners<S, I>>,
    owner: Owner,
}

impl<S: OwnedState, I> Drop for OwnerUser<S, I> {
    fn drop(&mut self) {
        let mut table = self.owners.table();
        if let Some(entry) = table.by_owner.get_mut(&self.owner) {
            entry.users -= 1;
        }
        table.forget_unused(&self.owner);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_request_for_an_owner_whose_time_is_over_has_a_deadline_again() {
        let owners: Arc<Owners<Vec<u8>, ()>> = Owners::new(Clock::runtime());
        let (owner, short) = (Owner::random().unwrap(), Duration::from_millis(300));
        let first = owners.begin(owner, short).await;
        tokio::time::advance(short).await;
        assert_eq!(owners.take_due(owners.clock.now()), [owner]);
        assert!(owners.is_over(&owner));
        let deletion = timeout(Duration::ZERO, owners.turn(owner, short)).await;
        assert!(deletion.is_err() && owners.is_over(&owner), "a deletion leaves that as it is");
        // The owner is known as long as one of its requests is in progress.
        let second = {
            let next = owners.begin(owner, short);
            tokio::pin!(next);
            assert!(timeout(Duration::ZERO, &mut next).await.is_err());
            drop(first);
            next.await
        };
        owners.table().state_mut(&owner).unwrap().push(1);
        drop(second);
        assert!(!owners.is_over(&owner));
        assert_eq!(owners.first_deadline(), Some(owners.clock.now() + short));
    }

    #[tokio::test(start_paused = true)]
    async fn an_owner_with_nothing_is_forgotten_behind_its_last_request() {
        let owners: Arc<Owners<Vec<u8>, ()>> = Owners::new(Clock::runtime());
        let (owner, short) = (Owner::random().unwrap(), Duration::from_millis(300));
        let turn = owners.begin(owner, short).await;
        assert!(owners.table().state(&owner).is_some());
        drop(turn);
        assert!(owners.table().state(&owner).is_none());
        assert_eq!(owners.first_deadline(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_released_key_that_stays_locked_is_not_kept_longer_by_a_request() {
        let owners: Arc<Owners<Vec<u8>, ()>> = Owners::new(Clock::runtime());
        let (owner, second) = (Owner::random().unwrap(), Duration::from_secs(1));
        let turn = owners.begin(owner, second).await;
        owners.table().state_mut(&owner).unwrap().push(1);
        let until = owners.clock.now() + second * 2;
        owners.end_at(&owner, until, true);
        drop(turn);
        drop(owners.begin(owner, second * 9).await);
        assert_eq!(owners.deadline(&owner), Some(until));
        owners.keep_until(&owner, until + second);
        assert_eq!(owners.deadline(&owner), Some(until + second));
    }
}
