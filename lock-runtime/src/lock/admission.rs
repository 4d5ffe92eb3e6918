//! Bounds the acquires in flight at a paced store. Further ones wait here, in FIFO order.
//!
//! A request that is not sent uses up neither ttl nor timeout, and needs no undo. So the requests in flight are answered
//! before their timeout. Renewals and releases do not wait here, and precede new acquires.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::base::clock::{Clock, Instant};
use crate::base::sync::Mutex;
use crate::exec::batcher::BATCH;

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
    excess: usize,
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
    call: CallState,
}

/// How far the call of a slot got.
#[derive(Clone, Copy, Debug, Default)]
enum CallState {
    /// It says nothing about the store.
    #[default]
    NotSent,
    /// Sent at this time, without an answer.
    Sent(Instant),
    /// Sent at this time, and answered.
    Answered(Instant),
}

const _: () = assert!(BATCH <= Admission::MOST_PER_CALL);

impl Admission {
    /// The maximum number of acquires in one call, and the smallest room: so every call finds room.
    pub(crate) const MOST_PER_CALL: usize = 128;
    const FIRST: usize = 256;
    const MOST: usize = 4096;

    /// Room for at least `least` acquires. `request_timeout` is the time limit of a request.
    pub(crate) fn new(clock: Clock, request_timeout: Duration, least: usize) -> Arc<Self> {
        let least = least.clamp(Self::MOST_PER_CALL, Self::MOST);
        let requests = Self::FIRST.max(least);
        let size = Size { requests, least, excess: 0, shortest: None, shrunk_at: None };
        Arc::new(Self {
            room: Arc::new(Semaphore::new(requests)),
            size: Mutex::new(size),
            clock,
            slack: request_timeout / 16,
        })
    }

    /// Waits for room for `requests`, at most [`MOST_PER_CALL`](Self::MOST_PER_CALL). Dropping the future leaves the queue.
    pub(crate) async fn admit(self: &Arc<Self>, requests: usize) -> AdmissionSlot {
        let count = u32::try_from(requests.min(Self::MOST_PER_CALL)).unwrap_or(1);
        // The semaphore is never closed.
        let room = self.room.clone().acquire_many_owned(count).await.ok();
        AdmissionSlot { room: room.map(|room| (self.clone(), room)), ..AdmissionSlot::default() }
    }

    /// Returns `room` after its call.
    fn leave(&self, room: OwnedSemaphorePermit, call: CallState) {
        let now = self.clock.now();
        let is_full = self.room.available_permits() == 0;
        let mut size = self.size.lock();
        let grown = match call {
            CallState::Answered(sent) if size.on_answer(now.since(sent), self.slack) => {
                if is_full {
                    size.grow(room.num_permits())
                } else {
                    0
                }
            }
            CallState::Answered(sent) | CallState::Sent(sent) => {
                size.shrink(sent, now);
                0
            }
            CallState::NotSent => 0,
        };
        let kept = size.without_excess(room);
        drop(size);
        self.room.add_permits(grown);
        // Wakes the next waiter.
        drop(kept);
    }
}

impl Size {
    /// An answer after `took`. Returns whether that is prompt, compared with about the shortest time.
    fn on_answer(&mut self, took: Duration, slack: Duration) -> bool {
        let shortest = match self.shortest {
            // It rises slowly: the route to the store may have become longer.
            Some(shortest) => took.min(shortest + shortest / 4096),
            None => took,
        };
        self.shortest = Some(shortest);
        let base = shortest.min(slack.saturating_mul(4));
        took <= base.saturating_mul(2).saturating_add(slack)
    }

    /// Grows after a prompt call of `requests`, while others wait. Returns by how much.
    fn grow(&mut self, requests: usize) -> usize {
        if self.excess > 0 {
            return 0;
        }
        let grown = requests.div_ceil(2).min(Admission::MOST - self.requests);
        self.requests += grown;
        grown
    }

    /// Shrinks after a call that was sent at `sent` and took long. Once for all calls in flight.
    fn shrink(&mut self, sent: Instant, now: Instant) {
        if self.shrunk_at.is_none_or(|shrunk_at| sent >= shrunk_at) {
            let requests = (self.requests - self.requests / 4).max(self.least);
            self.excess += self.requests - requests;
            self.requests = requests;
            self.shrunk_at = Some(now);
        }
    }

    /// What is left of `room` without the excess.
    fn without_excess(&mut self, mut room: OwnedSemaphorePermit) -> Option<OwnedSemaphorePermit> {
        let excess = self.excess.min(room.num_permits());
        self.excess -= excess;
        if let Some(excess) = room.split(excess) {
            excess.forget();
        }
        (room.num_permits() > 0).then_some(room)
    }
}

impl AdmissionSlot {
    /// The call is sent now.
    pub(crate) fn sent(&mut self, now: Instant) {
        self.call = CallState::Sent(now);
    }

    /// The store has answered.
    pub(crate) fn answered(mut self) {
        if let CallState::Sent(sent) = self.call {
            self.call = CallState::Answered(sent);
        }
    }
}

impl Drop for AdmissionSlot {
    fn drop(&mut self) {
        if let Some((admission, room)) = self.room.take() {
            admission.leave(room, self.call);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn under_way(admission: &Admission) -> (usize, usize) {
        let size = admission.size.lock();
        (size.requests, size.excess)
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
        while admission.room.available_permits() >= Admission::MOST_PER_CALL {
            permits.push(send(admission, Admission::MOST_PER_CALL).await);
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
        assert_eq!(under_way(&admission), (Admission::MOST_PER_CALL, 0));
        assert_eq!(admission.room.available_permits(), Admission::MOST_PER_CALL);
        // Calls that are given up count as well, and return their room.
        drop(fill(&admission).await);
        assert_eq!(admission.room.available_permits(), Admission::MOST_PER_CALL);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_not_sent_changes_nothing() {
        let admission = admission();
        send(&admission, 1).await.answered();
        for requests in [1, Admission::MOST_PER_CALL] {
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
