//! The leases and wait queues of a memory store.

use std::collections::VecDeque;
use std::time::Duration;

use foldhash::HashMap;

use crate::backend::{
    AcquireOutcome, AcquireRequest, Inspection, LeaseRef, LeaseStatus, LockHolder, Owner,
    ReleaseOutcome, ReleaseRequest, WaitMode, WaitingOwner,
};
use crate::base::clock::Instant;
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::owner_info::OwnerLabel;

/// The connection of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectionId(pub(super) u64);

/// The state of all keys. A key that becomes free is granted to the head of its queue in the same step.
#[derive(Debug, Default)]
pub(super) struct LeaseTable {
    by_key: HashMap<Key, StoredLease>,
    /// The keys with waiting owners.
    queues: HashMap<Key, VecDeque<QueuedRequest>>,
    /// At this size, expired leases are removed.
    sweep_at: usize,
}

#[derive(Debug)]
struct StoredLease {
    owner: Owner,
    connection: ConnectionId,
    until: Instant,
    /// The first fence of the grant. `None` as well until the owner that was the head of the queue has sent its request.
    fence: Option<Fence>,
    label: OwnerLabel,
}

/// The request of an owner in a wait queue, until it is granted the key or released.
#[derive(Debug)]
struct QueuedRequest {
    owner: Owner,
    connection: ConnectionId,
    kept_for: Duration,
    label: OwnerLabel,
}

/// What pools are notified of.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TableEvent {
    /// All pools: the key is free, or is held by force no longer.
    Changed(Key),
    /// The pool of the head of a queue: it was granted the key.
    Granted { key: Key, owner: Owner, connection: ConnectionId },
    /// The pool of the holder: the first owner waits for the key.
    Contended { key: Key, connection: ConnectionId },
}

impl LeaseTable {
    /// Why `request` is refused. `None`: nothing is in the way of [`grant`](Self::grant). With `has_queue` its owner may enter the
    /// queue.
    pub(super) fn refuse_or_enqueue(
        &mut self,
        request: &AcquireRequest,
        connection: ConnectionId,
        has_queue: bool,
        now: Instant,
        events: &mut Vec<TableEvent>,
    ) -> Option<AcquireOutcome> {
        for key in request.keys.iter() {
            self.advance(key, now, events);
        }
        let others = request.keys.iter().filter_map(|key| self.holder(key, now));
        let others = others.filter(|stored| stored.owner != request.owner);
        let expires_in = others.map(|stored| stored.until.since(now)).max()?;
        // A release notifies; the end of a ttl does not.
        let retry_after = expires_in + Duration::from_millis(1);
        let wait_mode = match &*request.keys {
            // Its pool does not know the owner before the answer, so a grant of the queue could come too early.
            [_] if has_queue && request.enqueue && request.attempt == 0 => {
                WaitMode::Watch { retry_after: Duration::ZERO }
            }
            [key] if has_queue && request.enqueue => {
                self.enqueue(key, request, connection, events);
                WaitMode::Queued { retry_after }
            }
            _ => WaitMode::Watch { retry_after },
        };
        Some(AcquireOutcome::Contended { expires_in: Some(expires_in), wait_mode })
    }

    /// Grants all keys. Returns whether other owners wait for one of them.
    pub(super) fn grant(
        &mut self,
        request: &AcquireRequest,
        connection: ConnectionId,
        fence: Option<Fence>,
        now: Instant,
    ) -> bool {
        self.sweep(now);
        let mut is_contended = false;
        for key in request.keys.iter() {
            self.leave_queue(key, request.owner);
            is_contended |= self.queues.contains_key(key);
            // Never shortens the lease: this may be a late request with a shorter ttl.
            let until = self.holder(key, now).map_or(now, |stored| stored.until);
            let until = until.max(now + request.kept_for());
            let (owner, label) = (request.owner, request.label);
            self.by_key.insert(key.clone(), StoredLease { owner, connection, until, fence, label });
        }
        is_contended
    }

    pub(super) fn renew(&mut self, lease: &LeaseRef, now: Instant) -> LeaseStatus {
        let held = self.is_held(lease, now);
        if held {
            for key in lease.keys.iter() {
                if let Some(stored) = self.by_key.get_mut(key) {
                    stored.until = now + lease.kept_for();
                }
            }
        }
        LeaseStatus::of(held)
    }

    pub(super) fn release(
        &mut self,
        request: &ReleaseRequest,
        now: Instant,
        events: &mut Vec<TableEvent>,
    ) -> ReleaseOutcome {
        let ReleaseRequest { lease, free_after, forced, .. } = request;
        let held = self.is_held(lease, now);
        for key in lease.keys.iter() {
            self.leave_queue(key, lease.owner);
            match self.by_key.get_mut(key) {
                Some(stored) if stored.owner != lease.owner => continue,
                Some(stored) if stored.until > now && !free_after.is_zero() => {
                    stored.until = now + *free_after;
                }
                _ => drop(self.by_key.remove(key)),
            }
            // The head of the queue has a notification of its own. The owner of a lease that ends by force has none.
            if !self.advance(key, now, events) || forced.is_some() {
                events.push(TableEvent::Changed(key.clone()));
            }
        }
        if held { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld }
    }

    /// Passes `key` on if it was granted to `owner`, which its pool does not know.
    pub(super) fn pass_on(
        &mut self,
        key: &Key,
        owner: Owner,
        now: Instant,
        events: &mut Vec<TableEvent>,
    ) {
        if self.by_key.get(key).is_some_and(|stored| stored.owner == owner) {
            self.by_key.remove(key);
            if !self.advance(key, now, events) {
                events.push(TableEvent::Changed(key.clone()));
            }
        }
    }

    /// No owner of `connection` waits any more. Its leases last until they expire.
    pub(super) fn disconnect(&mut self, connection: ConnectionId) {
        self.queues.retain(|_, queue| {
            queue.retain(|waiting| waiting.connection != connection);
            !queue.is_empty()
        });
    }

    pub(super) fn is_held(&self, lease: &LeaseRef, now: Instant) -> bool {
        let is_holder =
            |key| self.holder(key, now).is_some_and(|stored| stored.owner == lease.owner);
        lease.keys.iter().all(is_holder)
    }

    /// `shows_queue`: the answer has the waiting owners.
    pub(super) fn inspect(&self, key: &Key, shows_queue: bool, now: Instant) -> Inspection {
        let holder = self.holder(key, now).map(|stored| {
            LockHolder::new(Some(stored.owner.tag()))
                .with_token(Some(stored.owner))
                .with_expiry(Some(stored.until.since(now)))
                .with_fence(stored.fence)
                .with_info(stored.label.info())
        });
        let inspection = Inspection::new(holder);
        if !shows_queue {
            return inspection;
        }
        let queue = self.queues.get(key);
        let waiters = queue.into_iter().flatten();
        let waiters = waiters.map(|waiting| WaitingOwner::new(Some(waiting.owner.tag())));
        inspection.with_queue(waiters, queue.map_or(0, VecDeque::len))
    }

    /// The keys that are held.
    pub(super) fn held(&self, now: Instant) -> impl Iterator<Item = &Key> {
        self.by_key.iter().filter(move |(_, stored)| stored.until > now).map(|(key, _)| key)
    }

    fn holder(&self, key: &Key, now: Instant) -> Option<&StoredLease> {
        self.by_key.get(key).filter(|stored| stored.until > now)
    }

    /// Grants a free `key` to the head of its queue. Returns whether it did.
    fn advance(&mut self, key: &Key, now: Instant, events: &mut Vec<TableEvent>) -> bool {
        if self.queues.is_empty() || self.holder(key, now).is_some() {
            return false;
        }
        let Some(queue) = self.queues.get_mut(key) else { return false };
        let head = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        let Some(QueuedRequest { owner, connection, kept_for, label }) = head else { return false };
        let lease = StoredLease { owner, connection, until: now + kept_for, fence: None, label };
        self.by_key.insert(key.clone(), lease);
        events.push(TableEvent::Granted { key: key.clone(), owner, connection });
        true
    }

    /// Appends the owner of `request`, unless it is in the queue.
    fn enqueue(
        &mut self,
        key: &Key,
        request: &AcquireRequest,
        connection: ConnectionId,
        events: &mut Vec<TableEvent>,
    ) {
        let queue = self.queues.entry(key.clone()).or_default();
        let (owner, kept_for, label) = (request.owner, request.kept_for(), request.label);
        let is_first = queue.is_empty();
        match queue.iter_mut().find(|waiting| waiting.owner == owner) {
            Some(waiting) => waiting.kept_for = kept_for,
            None => queue.push_back(QueuedRequest { owner, connection, kept_for, label }),
        }
        if is_first && let Some(holder) = self.by_key.get(key) {
            events.push(TableEvent::Contended { key: key.clone(), connection: holder.connection });
        }
    }

    fn leave_queue(&mut self, key: &Key, owner: Owner) {
        if let Some(queue) = self.queues.get_mut(key) {
            queue.retain(|waiting| waiting.owner != owner);
            if queue.is_empty() {
                self.queues.remove(key);
            }
        }
    }

    /// Removes expired leases when there are many. The key of a queue is granted to its head at the next request.
    fn sweep(&mut self, now: Instant) {
        if self.by_key.len() < self.sweep_at {
            return;
        }
        self.by_key.retain(|_, stored| stored.until > now);
        self.sweep_at = (2 * self.by_key.len()).max(1024);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key::from_static("order:42");
    const TTL: Duration = Duration::from_secs(5);
    const A: ConnectionId = ConnectionId(1);
    const B: ConnectionId = ConnectionId(2);

    fn at(seconds: u64) -> Instant {
        Instant::from_nanos(seconds * 1_000_000_000)
    }

    fn request(owner: Owner) -> AcquireRequest {
        AcquireRequest { enqueue: true, attempt: 1, ..AcquireRequest::new([KEY], owner, TTL) }
    }

    fn owners<const N: usize>() -> [Owner; N] {
        std::array::from_fn(|_| Owner::random().unwrap())
    }

    fn granted(owner: Owner, connection: ConnectionId) -> TableEvent {
        TableEvent::Granted { key: KEY, owner, connection }
    }

    /// A table and the events since the last check.
    #[derive(Default)]
    struct Tested {
        table: LeaseTable,
        events: Vec<TableEvent>,
    }

    impl Tested {
        fn acquire(
            &mut self,
            request: &AcquireRequest,
            connection: ConnectionId,
            now: Instant,
        ) -> Result<bool, WaitMode> {
            let refusal =
                self.table.refuse_or_enqueue(request, connection, true, now, &mut self.events);
            match refusal {
                None => Ok(self.table.grant(request, connection, None, now)),
                Some(AcquireOutcome::Contended { wait_mode, .. }) => Err(wait_mode),
                Some(other) => unreachable!("{other:?}"),
            }
        }

        fn release(&mut self, owner: Owner, now: Instant) -> ReleaseOutcome {
            let request = ReleaseRequest::new(LeaseRef::new([KEY], owner, TTL));
            self.table.release(&request, now, &mut self.events)
        }

        #[track_caller]
        fn notifies(&mut self, expected: &[TableEvent]) {
            assert_eq!(std::mem::take(&mut self.events), expected);
        }

        fn waiting(&self) -> Vec<WaitingOwner> {
            self.table.inspect(&KEY, true, at(0)).waiters
        }
    }

    fn queued(seconds: u64) -> Result<bool, WaitMode> {
        let retry_after = Duration::from_secs(seconds) + Duration::from_millis(1);
        Err(WaitMode::Queued { retry_after })
    }

    #[test]
    fn a_release_grants_the_key_to_the_owner_that_has_waited_longest() {
        let mut tested = Tested::default();
        let [holder, first, second] = owners();
        assert_eq!(tested.acquire(&request(holder), A, at(0)), Ok(false));
        assert_eq!(tested.acquire(&request(first), B, at(1)), queued(4));
        tested.notifies(&[TableEvent::Contended { key: KEY, connection: A }]);
        assert_eq!(tested.acquire(&request(second), A, at(1)), queued(4));
        // A repeated request keeps the place.
        assert_eq!(tested.acquire(&request(first), B, at(2)), queued(3));
        assert_eq!(tested.waiting(), [first, second].map(|it| WaitingOwner::new(Some(it.tag()))));
        tested.notifies(&[]);

        assert_eq!(tested.release(holder, at(3)), ReleaseOutcome::Freed);
        tested.notifies(&[granted(first, B)]);
        assert_eq!(tested.acquire(&request(holder), A, at(3)), queued(5));
        assert_eq!(tested.acquire(&request(first), B, at(4)), Ok(true), "others wait");
        assert_eq!(tested.release(first, at(5)), ReleaseOutcome::Freed);
        tested.notifies(&[granted(second, A)]);
        assert_eq!(tested.release(second, at(5)), ReleaseOutcome::Freed);
        tested.notifies(&[granted(holder, A)]);
        assert_eq!(tested.acquire(&request(holder), A, at(5)), Ok(false));
        assert_eq!(tested.release(holder, at(6)), ReleaseOutcome::Freed);
        tested.notifies(&[TableEvent::Changed(KEY)]);
        assert!(tested.table.queues.is_empty());
    }

    /// Its pool knows it from the second request on.
    #[test]
    fn a_first_request_does_not_enter_the_queue() {
        let mut tested = Tested::default();
        let [holder, other] = owners();
        assert_eq!(tested.acquire(&request(holder), A, at(0)), Ok(false));
        let first = AcquireRequest { attempt: 0, ..request(other) };
        let again = Err(WaitMode::Watch { retry_after: Duration::ZERO });
        assert_eq!(tested.acquire(&first, B, at(0)), again);
        let single = AcquireRequest { enqueue: false, ..request(other) };
        let watch = Err(WaitMode::Watch { retry_after: TTL + Duration::from_millis(1) });
        assert_eq!(tested.acquire(&single, B, at(0)), watch);
        assert!(tested.waiting().is_empty());
        tested.notifies(&[]);
    }

    #[test]
    fn an_expired_lease_goes_to_the_head_of_the_queue_at_the_next_request() {
        let mut tested = Tested::default();
        let [holder, head, other] = owners();
        assert_eq!(tested.acquire(&request(holder), A, at(0)), Ok(false));
        assert_eq!(tested.acquire(&request(head), A, at(0)), queued(5));
        tested.events.clear();
        assert_eq!(tested.acquire(&request(other), B, at(5)), queued(5));
        tested.notifies(&[granted(head, A), TableEvent::Contended { key: KEY, connection: A }]);
        assert_eq!(tested.release(holder, at(5)), ReleaseOutcome::NotHeld);
        tested.notifies(&[]);
        assert_eq!(tested.acquire(&request(head), A, at(6)), Ok(true));
    }

    #[test]
    fn a_waiting_owner_that_is_released_leaves_the_queue() {
        let mut tested = Tested::default();
        let [holder, gone, other] = owners();
        assert_eq!(tested.acquire(&request(holder), A, at(0)), Ok(false));
        assert_eq!(tested.acquire(&request(gone), A, at(0)), queued(5));
        assert_eq!(tested.acquire(&request(other), B, at(0)), queued(5));
        tested.events.clear();
        assert_eq!(tested.release(gone, at(1)), ReleaseOutcome::NotHeld);
        tested.notifies(&[]);
        assert_eq!(tested.release(holder, at(1)), ReleaseOutcome::Freed);
        tested.notifies(&[granted(other, B)]);
        // Released before it has sent its request.
        assert_eq!(tested.release(other, at(1)), ReleaseOutcome::Freed);
        tested.notifies(&[TableEvent::Changed(KEY)]);
    }

    #[test]
    fn a_grant_that_its_pool_does_not_know_goes_to_the_next_owner() {
        let mut tested = Tested::default();
        let [holder, unknown, next] = owners();
        assert_eq!(tested.acquire(&request(holder), A, at(0)), Ok(false));
        assert_eq!(tested.acquire(&request(unknown), A, at(0)), queued(5));
        assert_eq!(tested.acquire(&request(next), B, at(0)), queued(5));
        assert_eq!(tested.release(holder, at(1)), ReleaseOutcome::Freed);
        tested.events.clear();
        tested.table.pass_on(&KEY, unknown, at(1), &mut tested.events);
        tested.notifies(&[granted(next, B)]);
        tested.table.pass_on(&KEY, unknown, at(1), &mut tested.events);
        tested.notifies(&[]);
        tested.table.pass_on(&KEY, next, at(1), &mut tested.events);
        tested.notifies(&[TableEvent::Changed(KEY)]);
    }

    #[test]
    fn the_owners_of_a_dropped_pool_do_not_wait() {
        let mut tested = Tested::default();
        let [holder, dropped, other] = owners();
        assert_eq!(tested.acquire(&request(holder), A, at(0)), Ok(false));
        assert_eq!(tested.acquire(&request(dropped), B, at(0)), queued(5));
        assert_eq!(tested.acquire(&request(other), A, at(0)), queued(5));
        tested.events.clear();
        tested.table.disconnect(B);
        assert_eq!(tested.release(holder, at(1)), ReleaseOutcome::Freed);
        tested.notifies(&[granted(other, A)]);
        tested.table.disconnect(A);
        assert_eq!(tested.acquire(&request(other), A, at(1)), Ok(false), "a lease stays");
    }

    /// All waiters learn of the new end. The holder learns of a release by force.
    #[test]
    fn a_release_that_keeps_the_key_and_a_release_by_force_notify_all_pools() {
        let mut tested = Tested::default();
        let [holder, waiting] = owners();
        assert_eq!(tested.acquire(&request(holder), A, at(0)), Ok(false));
        assert_eq!(tested.acquire(&request(waiting), B, at(0)), queued(5));
        tested.events.clear();
        let mut release = ReleaseRequest::new(LeaseRef::new([KEY], holder, TTL));
        release.free_after = Duration::from_secs(2);
        tested.table.release(&release, at(1), &mut tested.events);
        tested.notifies(&[TableEvent::Changed(KEY)]);
        assert_eq!(tested.acquire(&request(waiting), B, at(1)), queued(2));
        let inspected = tested.table.inspect(&KEY, true, at(1)).holder.unwrap();
        let forced = ReleaseRequest::by_force(KEY, inspected).unwrap();
        tested.table.release(&forced, at(1), &mut tested.events);
        tested.notifies(&[granted(waiting, B), TableEvent::Changed(KEY)]);
    }

    #[test]
    fn a_release_that_keeps_the_key_extends_no_expired_lease() {
        let mut tested = Tested::default();
        let [holder, next] = owners();
        assert_eq!(tested.acquire(&request(holder), A, at(0)), Ok(false));
        let mut release = ReleaseRequest::new(LeaseRef::new([KEY], holder, TTL));
        release.free_after = Duration::from_secs(2);
        let outcome = tested.table.release(&release, at(5), &mut tested.events);
        assert_eq!(outcome, ReleaseOutcome::NotHeld);
        assert_eq!(tested.acquire(&request(next), A, at(5)), Ok(false));
    }

    /// An acquire of several keys waits for them one by one, and requests all of them at the end.
    #[test]
    fn a_release_of_several_keys_leaves_all_queues() {
        const OTHER: Key = Key::from_static("order:43");
        let mut tested = Tested::default();
        let [holder, several, next] = owners();
        let of = |key: Key, owner| AcquireRequest { keys: [key].into(), ..request(owner) };
        assert_eq!(tested.acquire(&of(OTHER, holder), A, at(0)), Ok(false));
        assert_eq!(tested.acquire(&of(KEY, several), B, at(0)), Ok(false));
        assert_eq!(tested.acquire(&of(KEY, next), A, at(0)), queued(5));
        assert_eq!(tested.acquire(&of(OTHER, several), B, at(0)), queued(5));
        tested.events.clear();
        let lease = LeaseRef::new([KEY, OTHER], several, TTL);
        tested.table.release(&ReleaseRequest::new(lease), at(1), &mut tested.events);
        tested.notifies(&[granted(next, A)]);
        assert_eq!(tested.release(holder, at(1)), ReleaseOutcome::NotHeld);
        assert!(tested.table.queues.is_empty());
    }
}
