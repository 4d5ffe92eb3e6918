//! What the permit of a key is used for.

use std::sync::Arc;

use crate::base::clock::Instant;
use crate::base::key::Key;
use crate::base::owner::Owner;
use crate::exec::timer_queue::TimerQueue;

/// What the permit of a key is used for. It is out in every state but `Free`.
///
/// An empty cell changes nothing. Each state is `Free` after the permit is dropped, and `Requesting` once requests begin.
///
/// | | permit goes out | lease has the lock | linger begins | linger ends | release begins |
/// |---|---|---|---|---|---|
/// | `Free` | `Requesting` | | | | |
/// | `Requesting` | | `Held` | | | |
/// | `Held` | | `Held`, by the next lease | `Lingering` | | `Releasing` |
/// | `Lingering` | | | | `Held` | `Releasing` |
/// | `Releasing` | | | | | |
#[derive(Debug, Default)]
pub(super) enum PermitState {
    #[default]
    Free,
    /// The lock is requested, under `owner`. A first request has no owner here. The permit has been in use since then.
    Requesting { since: Instant, owner: Option<Owner> },
    /// A lease of this process holds the lock.
    Held(Holder),
    /// The lease that holds the lock belongs to no task.
    Lingering(Holder, Box<Linger>),
    /// The release of the lease is under way. It may name the owner token of the next requests.
    Releasing { holder: Holder, successor: Option<Owner> },
}

/// A lease of this process, by its number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holder {
    pub(crate) lease: u64,
    pub(crate) owner: Owner,
    pub(crate) since: Instant,
}

/// The end of a linger. It has a timer, which is removed with it.
#[derive(Debug)]
pub(super) struct Linger {
    key: Key,
    until: Instant,
    /// Distinguishes its timer from others of the same moment.
    id: u64,
    timers: Arc<TimerQueue<Key>>,
}

impl Linger {
    pub(super) fn new(key: Key, until: Instant, id: u64, timers: Arc<TimerQueue<Key>>) -> Self {
        timers.insert(until, id, key.clone());
        Self { key, until, id, timers }
    }

    /// Makes its end due immediately.
    fn end(&mut self) {
        self.timers.remove(self.until, self.id);
        self.until = Instant::ORIGIN;
        self.timers.insert(self.until, self.id, self.key.clone());
    }
}

impl Drop for Linger {
    fn drop(&mut self) {
        self.timers.remove(self.until, self.id);
    }
}

impl PermitState {
    pub(super) fn is_free(&self) -> bool {
        matches!(self, Self::Free)
    }

    pub(super) fn is_requesting(&self) -> bool {
        matches!(self, Self::Requesting { .. })
    }

    /// Whether a lease of this process holds the lock, and no release of it has begun.
    pub(super) fn is_held(&self) -> bool {
        matches!(self, Self::Held(_) | Self::Lingering(..))
    }

    pub(super) fn is_releasing(&self) -> bool {
        matches!(self, Self::Releasing { .. })
    }

    /// Since when the permit has been in use, or the lease has held the lock.
    pub(super) fn out_since(&self) -> Option<Instant> {
        match self {
            Self::Requesting { since, .. } => Some(*since),
            _ => self.holder().map(|holder| holder.since),
        }
    }

    /// The lease that holds the lock, until its release is over.
    pub(super) fn holder(&self) -> Option<Holder> {
        match self {
            Self::Free | Self::Requesting { .. } => None,
            Self::Held(holder) | Self::Lingering(holder, _) | Self::Releasing { holder, .. } => {
                Some(*holder)
            }
        }
    }

    /// The owner token of the requests that are sent, or that follow the release.
    pub(super) fn requests_owner(&self) -> Option<Owner> {
        match self {
            Self::Requesting { owner, .. } | Self::Releasing { successor: owner, .. } => *owner,
            Self::Free | Self::Held(_) | Self::Lingering(..) => None,
        }
    }

    /// Whether a request can be due. While this process holds the lock, the release has to name the next owner first.
    pub(super) fn may_request(&self) -> bool {
        match self {
            Self::Free | Self::Requesting { .. } => true,
            Self::Held(_) | Self::Lingering(..) => false,
            Self::Releasing { successor, .. } => successor.is_some(),
        }
    }

    /// The permit, which was free, goes out.
    pub(super) fn go_out(&mut self, now: Instant) {
        *self = Self::Requesting { since: now, owner: None };
    }

    /// A lease has the lock, by the requests of this permit or by a hand-off. `false` for any other lease: it was lost in this
    /// instant, and has passed its permit on.
    pub(super) fn hold(&mut self, holder: Holder) -> bool {
        let is_holder = match self {
            Self::Requesting { owner, .. } => owner.is_none_or(|owner| owner == holder.owner),
            // The grant, and so the owner token, is the same.
            Self::Held(former) => former.owner == holder.owner,
            Self::Free | Self::Lingering(..) | Self::Releasing { .. } => false,
        };
        if is_holder {
            *self = Self::Held(holder);
        }
        is_holder
    }

    /// Requests are sent under `owner` from now on, and none was granted.
    pub(super) fn request_as(&mut self, owner: Owner, now: impl FnOnce() -> Instant) {
        let since = self.out_since().unwrap_or_else(now);
        *self = Self::Requesting { since, owner: Some(owner) };
    }

    /// The release of the lease of this number begins, or has begun. `false` if another lease, or none, holds the lock.
    pub(super) fn begin_release(&mut self, lease: u64) -> bool {
        let is_holder = self.holder().is_some_and(|holder| holder.lease == lease);
        if let Self::Held(holder) | Self::Lingering(holder, _) = self
            && is_holder
        {
            *self = Self::Releasing { holder: *holder, successor: None };
        }
        is_holder
    }

    /// The release that has begun names `owner` as the next one.
    pub(super) fn name_successor(&mut self, owner: Owner) {
        match self {
            Self::Requesting { owner: next, .. } | Self::Releasing { successor: next, .. } => {
                *next = Some(owner);
            }
            Self::Free | Self::Held(_) | Self::Lingering(..) => {}
        }
    }

    /// Whether the lease of this number holds the lock, which does not linger.
    pub(super) fn is_held_by(&self, lease: u64) -> bool {
        matches!(self, Self::Held(holder) if holder.lease == lease)
    }

    /// The lock lingers, if a lease holds it.
    pub(super) fn begin_linger(&mut self, linger: Linger) {
        if let Self::Held(holder) = self {
            *self = Self::Lingering(*holder, Box::new(linger));
        }
    }

    /// Whether the lock lingers, and its linger is over at `now`.
    pub(super) fn has_lingered(&self, now: Instant) -> bool {
        matches!(self, Self::Lingering(_, linger) if linger.until <= now)
    }

    /// Ends the linger, if the lock lingers. Returns the number of its lease.
    pub(super) fn take_linger(&mut self) -> Option<u64> {
        let Self::Lingering(holder, _) = self else { return None };
        let holder = *holder;
        *self = Self::Held(holder);
        Some(holder.lease)
    }

    /// Makes the end of the linger due immediately, if the lock lingers.
    pub(super) fn end_linger(&mut self) {
        if let Self::Lingering(_, linger) = self {
            linger.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const KEY: Key = Key::from_static("k");

    fn holder(lease: u64) -> Holder {
        let since = Instant::ORIGIN + Duration::from_secs(lease);
        Holder { lease, owner: Owner::random().unwrap(), since }
    }

    fn requesting() -> PermitState {
        let mut state = PermitState::Free;
        state.go_out(Instant::ORIGIN + Duration::from_secs(1));
        state
    }

    fn held(lease: u64) -> PermitState {
        let mut state = requesting();
        assert!(state.hold(holder(lease)));
        state
    }

    fn lingering(lease: u64, timers: &Arc<TimerQueue<Key>>) -> PermitState {
        let mut state = held(lease);
        state.begin_linger(Linger::new(KEY, Instant::NEVER, 1, timers.clone()));
        state
    }

    /// A shutdown, or a forced release, ends a lease before the queues know it.
    #[test]
    fn a_lease_that_has_passed_its_permit_on_is_no_holder() {
        let timers = Arc::<TimerQueue<Key>>::default();
        let mut requesting = requesting();
        requesting.request_as(Owner::random().unwrap(), || unreachable!());
        let (lingering, mut releasing) = (lingering(8, &timers), held(8));
        assert!(!releasing.begin_release(7) && !releasing.is_releasing());
        assert!(releasing.begin_release(8) && releasing.begin_release(8));
        for mut state in [requesting, held(8), lingering, releasing] {
            let (former, owner) = (state.holder().map(|it| it.lease), state.requests_owner());
            assert!(!state.hold(holder(7)) && !state.begin_release(7));
            assert_eq!(
                (state.holder().map(|it| it.lease), state.requests_owner()),
                (former, owner)
            );
        }
        let mut state = PermitState::Free;
        assert!(!state.hold(holder(7)));
        assert!(state.is_free() && state.holder().is_none() && state.out_since().is_none());
    }

    #[test]
    fn the_lease_is_the_holder_until_its_release_is_over() {
        let mut state = held(7);
        assert!(!state.may_request() && state.requests_owner().is_none());
        let since = state.out_since();
        assert!(state.begin_release(7));
        assert!(state.is_releasing() && !state.may_request());
        let next = Owner::random().unwrap();
        state.name_successor(next);
        assert_eq!(
            (state.holder().map(|it| it.lease), state.requests_owner()),
            (Some(7), Some(next))
        );
        assert!(state.may_request() && state.out_since() == since);
        state.request_as(next, || unreachable!());
        assert!(state.holder().is_none() && !state.is_releasing());
        assert_eq!((state.requests_owner(), state.out_since()), (Some(next), since));
    }

    #[test]
    fn the_requests_of_a_permit_have_the_owner_that_was_set_last() {
        let mut state = requesting();
        let since = state.out_since();
        assert_eq!(state.requests_owner(), None);
        for owner in [(); 2].map(|()| Owner::random().unwrap()) {
            state.request_as(owner, || unreachable!());
            assert_eq!((state.requests_owner(), state.out_since()), (Some(owner), since));
        }
        let named = Owner::random().unwrap();
        state.name_successor(named);
        assert_eq!((state.requests_owner(), state.out_since()), (Some(named), since));
        let mut free = PermitState::Free;
        free.request_as(named, || Instant::NEVER);
        assert_eq!((free.requests_owner(), free.out_since()), (Some(named), Some(Instant::NEVER)));
    }

    #[test]
    fn a_linger_begins_for_the_lease_that_holds_the_lock_and_its_timer_ends_with_it() {
        let timers = Arc::<TimerQueue<Key>>::default();
        let mut state = lingering(7, &timers);
        assert!(!held(8).is_held_by(7) && held(7).is_held_by(7) && !state.is_held_by(7));
        assert!(!state.may_request() && !state.has_lingered(Instant::ORIGIN));
        state.end_linger();
        assert!(state.has_lingered(Instant::ORIGIN));
        assert_eq!((state.take_linger(), state.take_linger()), (Some(7), None));
        assert!(state.is_held_by(7) && timers.take_until(Instant::NEVER).is_empty());
        // Of a lock in another state there is none, and its timer is not kept either.
        let mut free = PermitState::Free;
        free.begin_linger(Linger::new(KEY, Instant::NEVER, 2, timers.clone()));
        free.end_linger();
        assert!(free.is_free() && timers.take_until(Instant::NEVER).is_empty());
    }

    #[test]
    fn a_release_or_another_request_ends_a_linger() {
        let timers = Arc::<TimerQueue<Key>>::default();
        let ends: [fn(&mut PermitState); 2] = [
            |state| assert!(state.begin_release(7)),
            |state| state.request_as(Owner::random().unwrap(), || Instant::ORIGIN),
        ];
        for end in ends {
            let mut state = lingering(7, &timers);
            end(&mut state);
            assert_eq!(state.take_linger(), None);
            assert!(timers.take_until(Instant::NEVER).is_empty());
        }
    }
}
