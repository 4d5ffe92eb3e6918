//! Bounds the acquires in flight at a paced store. Further ones wait here, in FIFO order.
//!
//! A request that is not sent uses up neither ttl nor timeout, and needs no undo. So the requests in flight are answered
//! before their timeout. Renewals and releases do not wait here, and precede new acquires.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::base::clock::{Clock, Instant};
use crate::base::sync::{Mutex, MutexGuard};

/// The number of acquires in flight at one store. It grows while the store answers promptly and acquires wait, and shrinks
/// when answers take long.
#[derive(Debug)]
pub(crate) struct Admission {
    /// One permit for each acquire in flight.
    room: Arc<Semaphore>,
    size: Mutex<Size>,
    clock: Clock,
    /// How much longer an answer may take than twice the shortest time.
    slack: Duration,
}

#[derive(Debug)]
struct Size {
    /// How many acquires may be in flight.
    requests: usize,
    /// The size does not become smaller than this.
    least: usize,
    /// How many more are in flight, after it shrank.
    debt: usize,
    /// About the shortest time of an answer.
    shortest: Option<Duration>,
    /// A call that was sent earlier has seen the size before the last change.
    shrunk_at: Option<Instant>,
}

/// Room for the acquires of one call. Dropped without an answer, a call that was sent counts as one that took long.
#[derive(Debug, Default)]
pub(crate) struct AdmissionSlot {
    /// `None` for a store that is not paced.
    room: Option<(Arc<Admission>, OwnedSemaphorePermit)>,
    /// When the call was sent. One that was not says nothing about the store.
    sent: Option<Instant>,
    is_answered: bool,
}

impl Admission {
    /// The maximum number of acquires in one call. There is room for at least as many, so that every call finds it.
    pub(crate) const LEAST: usize = 128;
    const FIRST: usize = 256;
    const MOST: usize = 4096;

    /// Room for at least `least` acquires. `request_timeout` is the time limit of a request.
    pub(crate) fn new(clock: Clock, request_timeout: Duration, least: usize) -> Arc<Self> {
        let least = least.clamp(Self::LEAST, Self::MOST);
        let requests = Self::FIRST.max(least);
        let size = Size { requests, least, debt: 0, shortest: None, shrunk_at: None };
        Arc::new(Self {
            room: Arc::new(Semaphore::new(requests)),
            size: Mutex::new(size),
            clock,
            slack: request_timeout / 16,
        })
    }

    /// Waits for room for `requests`, at most [`LEAST`](Self::LEAST). Dropping the future leaves the queue.
    pub(crate) async fn admit(self: &Arc<Self>, requests: usize) -> AdmissionSlot {
        let count = u32::try_from(requests.min(Self::LEAST)).unwrap_or(1);
        // The semaphore is never closed.
        let room = self.room.clone().acquire_many_owned(count).await.ok();
        AdmissionSlot { room: room.map(|room| (self.clone(), room)), ..AdmissionSlot::default() }
    }

    /// Returns `room`, after a call that was sent at `sent`, if it was.
    fn leave(&self, room: OwnedSemaphorePermit, sent: Option<Instant>, is_answered: bool) {
        let now = self.clock.now();
        let some_wait = self.room.available_permits() == 0;
        let mut size = self.size();
        let learned = sent.map(|sent| {
            size.learn(now, sent, is_answered, some_wait, room.num_permits(), self.slack)
        });
        let grown = learned.unwrap_or_default();
        let kept = size.pay(room);
        drop(size);
        self.room.add_permits(grown);
        // Wakes the next waiter.
        drop(kept);
    }

    fn size(&self) -> MutexGuard<'_, Size> {
        self.size.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Size {
    /// By how much the size grows after a call of `requests`.
    fn learn(
        &mut self,
        now: Instant,
        sent: Instant,
        is_answered: bool,
        some_wait: bool,
        requests: usize,
        slack: Duration,
    ) -> usize {
        let took = now.since(sent);
        if is_answered {
            self.shortest = Some(match self.shortest {
                // It rises slowly: the route to the store may have become longer.
                Some(shortest) => took.min(shortest + shortest / 4096),
                None => took,
            });
        }
        let base = self.shortest.unwrap_or_default().min(slack.saturating_mul(4));
        if is_answered && took <= base.saturating_mul(2).saturating_add(slack) {
            if !some_wait || self.debt > 0 {
                return 0;
            }
            let grown = requests.div_ceil(2).min(Admission::MOST - self.requests);
            self.requests += grown;
            return grown;
        }
        // Once for all calls in flight.
        if self.shrunk_at.is_none_or(|shrunk_at| sent >= shrunk_at) {
            let requests = (self.requests - self.requests / 4).max(self.least);
            self.debt += self.requests - requests;
            self.requests = requests;
            self.shrunk_at = Some(now);
        }
        0
    }

    /// What is left of `room` after the excess.
    fn pay(&mut self, mut room: OwnedSemaphorePermit) -> Option<OwnedSemaphorePermit> {
        let owed = self.debt.min(room.num_permits());
        self.debt -= owed;
        if let Some(owed) = room.split(owed) {
            owed.forget();
        }
        (room.num_permits() > 0).then_some(room)
    }
}

impl AdmissionSlot {
    /// The call is sent now.
    pub(crate) fn sent(&mut self, now: Instant) {
        self.sent = Some(now);
    }

    /// The store has answered.
    pub(crate) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for AdmissionSlot {
    fn drop(&mut self) {
        if let Some((admission, room)) = self.room.take() {
            admission.leave(room, self.sent, self.is_answered);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn under_way(admission: &Admission) -> (usize, usize) {
        let size = admission.size();
        (size.requests, size.debt)
    }

    async fn pause(span: Duration) {
        tokio::time::sleep(span).await;
    }

    fn admission() -> Arc<Admission> {
        Admission::new(Clock::runtime(), Duration::from_secs(1), 0)
    }

    async fn send(admission: &Arc<Admission>, requests: usize) -> AdmissionSlot {
        let mut slot = admission.admit(requests).await;
        slot.sent(admission.clock.now());
        slot
    }

    /// All the room, in permits of one call each.
    async fn fill(admission: &Arc<Admission>) -> Vec<AdmissionSlot> {
        let mut permits = Vec::new();
        while admission.room.available_permits() >= Admission::LEAST {
            permits.push(send(admission, Admission::LEAST).await);
        }
        permits
    }

    #[tokio::test(start_paused = true)]
    async fn the_room_grows_while_answers_are_prompt_and_claims_wait() {
        let admission = admission();
        for _ in 0..200 {
            let mut permits = fill(&admission).await;
            let rest = admission.room.available_permits();
            permits.push(send(&admission, rest).await);
            pause(Duration::from_millis(5)).await;
            permits.into_iter().for_each(AdmissionSlot::answered);
        }
        assert_eq!(under_way(&admission), (Admission::MOST, 0));
        // With spare room it stays.
        send(&admission, 1).await.answered();
        assert_eq!(under_way(&admission).0, Admission::MOST);
    }

    #[tokio::test(start_paused = true)]
    async fn the_room_shrinks_when_answers_take_long_and_no_claim_is_shut_out() {
        let admission = admission();
        send(&admission, 1).await.answered();
        for _ in 0..20 {
            let permits = fill(&admission).await;
            assert!(!permits.is_empty(), "a whole call always finds room");
            pause(Duration::from_millis(300)).await;
            let before = under_way(&admission).0;
            permits.into_iter().for_each(AdmissionSlot::answered);
            let after = under_way(&admission).0;
            assert!(after >= before - before / 4, "once for all that are under way: {after}");
        }
        assert_eq!(under_way(&admission), (Admission::LEAST, 0));
        assert_eq!(admission.room.available_permits(), Admission::LEAST);
        // Calls that are given up count as well, and return their room.
        drop(fill(&admission).await);
        assert_eq!(admission.room.available_permits(), Admission::LEAST);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_not_sent_changes_nothing() {
        let admission = admission();
        send(&admission, 1).await.answered();
        for requests in [1, Admission::LEAST] {
            pause(Duration::from_secs(1)).await;
            drop(admission.admit(requests).await);
        }
        assert_eq!(under_way(&admission), (Admission::FIRST, 0));
        assert_eq!(admission.room.available_permits(), Admission::FIRST);
    }

    #[tokio::test(start_paused = true)]
    async fn claims_are_admitted_in_the_order_in_which_they_came() {
        let admission = admission();
        let held = fill(&admission).await;
        let order = Arc::new(std::sync::Mutex::new(Vec::new()));
        let waiting: Vec<_> = [100, 1, 128, 2]
            .into_iter()
            .map(|count| {
                let (admission, order) = (admission.clone(), order.clone());
                tokio::spawn(async move {
                    let permit = send(&admission, count).await;
                    order.lock().unwrap().push(count);
                    permit.answered();
                })
            })
            .collect();
        pause(Duration::from_millis(1)).await;
        assert!(order.lock().unwrap().is_empty());
        held.into_iter().for_each(AdmissionSlot::answered);
        for one in waiting {
            one.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), [100, 1, 128, 2]);
    }
}
