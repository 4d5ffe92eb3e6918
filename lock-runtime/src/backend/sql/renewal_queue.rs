//! Renewals that a connection has yet to send.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::backend::sql::job::{Renewals, Reply, answer};
use crate::backend::{BackendError, LeaseRef, LeaseStatus, Owner};
use crate::base::key::Key;

/// The most leases that one statement renews. It locks their rows until its flush. Over a slow link, one or two round trips renew
/// as many.
pub(crate) const RENEWALS: usize = 4_096;

/// A lease by its owner and keys.
pub(crate) type LeaseId = (Owner, Arc<[Key]>);

pub(crate) fn id_of(lease: &LeaseRef) -> LeaseId {
    (lease.owner, lease.keys.clone())
}

/// The renewal of one lease, and where its answer goes: to all calls that have requested it.
pub(crate) struct QueuedRenewal {
    pub(crate) lease: LeaseRef,
    replies: Vec<Reply<LeaseStatus>>,
}

impl QueuedRenewal {
    pub(crate) fn answer(self, outcome: &Result<LeaseStatus, BackendError>) {
        for reply in self.replies {
            answer(reply, outcome.clone());
        }
    }
}

/// Each lease is queued once. If a connection is too slow for a time limit, all renewals are requested again. Sent several
/// times, they would take the time of others, and the queue would become longer and longer.
#[derive(Default)]
pub(crate) struct RenewalQueue {
    order: VecDeque<LeaseId>,
    by_lease: HashMap<LeaseId, QueuedRenewal>,
}

impl RenewalQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Adds `renewals`. A repeated one keeps the place of the first.
    pub(crate) fn add(&mut self, renewals: Renewals) {
        for (lease, reply) in renewals {
            let id = id_of(&lease);
            match self.by_lease.entry(id.clone()) {
                Entry::Vacant(entry) => {
                    entry.insert(QueuedRenewal { lease, replies: vec![reply] });
                    self.order.push_back(id);
                }
                Entry::Occupied(entry) => {
                    let queued = entry.into_mut();
                    queued.lease = lease;
                    queued.replies.push(reply);
                }
            }
        }
    }

    /// The next renewals, at most [`RENEWALS`]. Leaves out the ones that nothing waits for any more.
    pub(crate) fn next_part(&mut self) -> Vec<QueuedRenewal> {
        self.take(RENEWALS)
    }

    fn take(&mut self, most: usize) -> Vec<QueuedRenewal> {
        let mut taken = Vec::with_capacity(most.min(self.order.len()));
        while taken.len() < most
            && let Some(id) = self.order.pop_front()
        {
            let queued = self.by_lease.remove(&id);
            taken.extend(queued.filter(|it| it.replies.iter().any(|reply| !reply.is_closed())));
        }
        taken
    }

    /// Answers all with the error of the connection, which has not sent them.
    pub(crate) fn fail(&mut self, error: &BackendError) {
        let failed = Err(error.clone().before_sending());
        for renewal in self.take(usize::MAX) {
            renewal.answer(&failed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot::{self, Receiver};

    use super::*;

    type Answer = Receiver<Result<LeaseStatus, BackendError>>;

    /// Requests the renewal of a lease with this key.
    fn request(queue: &mut RenewalQueue, key: &str, ttl: u64) -> Answer {
        let (reply, answer) = oneshot::channel();
        let owner = Owner::from_text([b'0'; 32]);
        let lease = LeaseRef::new([Key::from(key)], owner, Duration::from_secs(ttl));
        queue.add(vec![(lease, reply)]);
        answer
    }

    fn keys(renewals: &[QueuedRenewal]) -> Vec<(&str, u64)> {
        renewals.iter().map(|it| (it.lease.keys[0].as_str(), it.lease.ttl.as_secs())).collect()
    }

    #[test]
    fn a_repeated_renewal_is_sent_once_in_the_place_of_the_first_and_answers_both() {
        let mut queue = RenewalQueue::default();
        let mut answers: Vec<Answer> = [("a", 1), ("b", 1), ("c", 1), ("a", 2)]
            .into_iter()
            .map(|(key, ttl)| request(&mut queue, key, ttl))
            .collect();
        let first = queue.take(2);
        assert_eq!(keys(&first), [("a", 2), ("b", 1)]);
        for renewal in first {
            renewal.answer(&Ok(LeaseStatus::Held));
        }
        let answered = |answer: &mut Answer| matches!(answer.try_recv(), Ok(Ok(LeaseStatus::Held)));
        assert_eq!([0, 1, 2, 3].map(|at| answered(&mut answers[at])), [true, true, false, true]);
        // While it is in flight, another request is a renewal of its own.
        let _again = request(&mut queue, "a", 3);
        assert_eq!(keys(&queue.take(9)), [("c", 1), ("a", 3)]);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_renewal_is_left_out_if_all_of_its_calls_are_given_up() {
        let mut queue = RenewalQueue::default();
        let answers = ["a", "b", "b"].map(|key| request(&mut queue, key, 1));
        let [a, first, second] = answers;
        drop((a, first));
        assert_eq!(keys(&queue.take(9)), [("b", 1)]);
        drop(second);
    }

    #[test]
    fn the_end_of_the_connection_fails_all() {
        let mut queue = RenewalQueue::default();
        let mut answer = request(&mut queue, "a", 1);
        queue.fail(&crate::backend::sql::job::no_answer());
        assert!(queue.is_empty() && matches!(answer.try_recv(), Ok(Err(_))));
    }
}
