//! Signs of life without an answer, and what their age says about the stream and the member. Does no I/O.
//!
//! A member that is not the leader forwards signs of life to the leader that it knows, one after another. With a frozen leader,
//! the first of them has no answer for seven seconds, even if another leader is elected meanwhile. Signs on another stream go to
//! the new leader. So a sign has a time limit of its own, whatever else the member answers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::backend::BackendError;
use crate::backend::etcd::leases::{LifeSign, PoolLease};
use crate::backend::etcd::protocol::lease::LeaseAnswer;
use crate::backend::etcd::protocol::protobuf::MalformedMessage;
use crate::backend::etcd::server_error::{lease_denied, lease_ended};
use crate::base::clock::Instant;

/// The shortest time without an answer after which another stream is opened.
const SHORTEST_LIMIT: Duration = Duration::from_millis(250);

pub(crate) type SignReply = oneshot::Sender<Result<LifeSign, BackendError>>;

/// At most one sign of life for each lease. `C` is kept until the sign has an answer.
pub(crate) struct OpenSigns<C> {
    by_lease: HashMap<i64, OpenSign<C>>,
    /// The time limit of a request.
    limit: Duration,
    /// How long the last answered sign took, on its first stream or another one.
    round_trip: Duration,
}

struct OpenSign<C> {
    lease: Arc<PoolLease>,
    /// On the present stream.
    sent: Instant,
    /// On the first stream.
    first_sent: Instant,
    /// How many further streams there were.
    reopened: u32,
    call: C,
    replies: Vec<SignReply>,
    /// Requests since then: they want a sign that is sent later.
    next: Vec<SignReply>,
}

/// What the age of the open signs says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamVerdict {
    InTime,
    /// Another stream of the same member may have answers.
    Reopen,
    /// Other streams have had no answers either.
    Leave,
}

/// What the answer to a sign says.
pub(crate) enum SignOutcome {
    Taken,
    /// Taken. Further requests want another one.
    Wanted(Arc<PoolLease>, Vec<SignReply>),
    Ended(Arc<PoolLease>),
}

impl<C> OpenSigns<C> {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { by_lease: HashMap::new(), limit, round_trip: Duration::ZERO }
    }

    /// Whether a sign for `lease` has no answer yet.
    pub(crate) fn is_open(&self, lease: &PoolLease) -> bool {
        self.by_lease.contains_key(&lease.id)
    }

    /// Records a sign that is sent now. `false` if the previous one has no answer: then the sign is sent after that answer.
    pub(crate) fn add(
        &mut self,
        lease: Arc<PoolLease>,
        replies: Vec<SignReply>,
        now: Instant,
        call: impl FnOnce() -> C,
    ) -> bool {
        match self.by_lease.entry(lease.id) {
            Entry::Occupied(mut open) => {
                open.get_mut().next.extend(replies);
                false
            }
            Entry::Vacant(none) => {
                let (call, next) = (call(), Vec::new());
                let (sent, first_sent, reopened) = (now, now, 0);
                none.insert(OpenSign { lease, sent, first_sent, reopened, call, replies, next });
                true
            }
        }
    }

    /// Passes the answer on. `answered` receives what was kept for the sign.
    ///
    /// # Errors
    /// If no sign for this lease is open.
    pub(crate) fn on_answer(
        &mut self,
        answer: &LeaseAnswer,
        now: Instant,
        answered: impl FnOnce(C),
    ) -> Result<SignOutcome, MalformedMessage> {
        let open = self.by_lease.remove(&answer.id).ok_or(MalformedMessage)?;
        let OpenSign { lease, sent, call, replies, next, .. } = open;
        self.round_trip = now.since(sent);
        answered(call);
        if answer.seconds <= 0 {
            tell(replies.into_iter().chain(next), &Err(lease_ended()));
            return Ok(SignOutcome::Ended(lease));
        }
        let sign = LifeSign { sent, term: answer.origin.term };
        lease.on_sign(sign);
        tell(replies, &Ok(sign));
        Ok(if next.is_empty() { SignOutcome::Taken } else { SignOutcome::Wanted(lease, next) })
    }

    /// Forgets the signs for leases that take none any longer. Returns whether there were any.
    pub(crate) fn refuse_denied(&mut self) -> bool {
        let denied = self.by_lease.extract_if(|_, open| !open.lease.takes_signs());
        let mut has_denied = false;
        for (_, open) in denied {
            has_denied = true;
            tell(open.replies.into_iter().chain(open.next), &Err(lease_denied()));
        }
        has_denied
    }

    pub(crate) fn verdict(&self, now: Instant) -> StreamVerdict {
        let is_late = |open: &OpenSign<C>| now.since(open.sent) >= self.reopen_limit(open);
        let is_over =
            |open: &OpenSign<C>| now.since(open.first_sent) >= self.leave_limit(&open.lease);
        if self.by_lease.values().any(is_over) {
            StreamVerdict::Leave
        } else if self.by_lease.values().any(is_late) {
            StreamVerdict::Reopen
        } else {
            StreamVerdict::InTime
        }
    }

    /// The leases with signs that have to be sent again, on another stream. They serve all requests until now.
    pub(crate) fn begin_anew(&mut self, now: Instant) -> Vec<i64> {
        for open in self.by_lease.values_mut() {
            open.sent = now;
            open.reopened += 1;
            open.replies.append(&mut open.next);
        }
        self.by_lease.keys().copied().collect()
    }

    /// The connection has ended.
    pub(crate) fn fail(self, error: &BackendError) {
        for open in self.by_lease.into_values() {
            tell(open.replies.into_iter().chain(open.next), &Err(error.clone()));
        }
    }

    /// An answer takes a round trip, which may have become longer. So each further stream has twice the time.
    fn reopen_limit(&self, open: &OpenSign<C>) -> Duration {
        let limit = (open.lease.length / 8).max(SHORTEST_LIMIT).max(2 * self.round_trip);
        limit.saturating_mul(1 << open.reopened.min(4)).min(self.limit)
    }

    /// The rest of the lease is enough for another connection.
    fn leave_limit(&self, lease: &PoolLease) -> Duration {
        (lease.length / 2).min(2 * self.limit)
    }
}

fn tell(replies: impl IntoIterator<Item = SignReply>, outcome: &Result<LifeSign, BackendError>) {
    for reply in replies {
        let _ = reply.send(outcome.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::FailureKind;
    use crate::backend::etcd::protocol::key_value::AnswerOrigin;

    const LIMIT: Duration = Duration::from_secs(1);

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(1_000_000_000_000 + millis * 1_000_000)
    }

    fn lease(id: i64, seconds: u64) -> Arc<PoolLease> {
        Arc::new(PoolLease::granted(id, Duration::from_secs(seconds), at(0)))
    }

    fn answer(id: i64, seconds: i64) -> LeaseAnswer {
        LeaseAnswer { origin: AnswerOrigin::default(), id, seconds }
    }

    fn sent(lease: &PoolLease) -> Instant {
        lease.last_sign().sent
    }

    #[test]
    fn a_lease_has_one_open_sign() {
        let (mut signs, lease) = (OpenSigns::new(LIMIT), lease(1, 5));
        let (reply, mut first) = oneshot::channel();
        assert!(signs.add(lease.clone(), vec![reply], at(10), || ()));
        let (reply, mut later) = oneshot::channel();
        assert!(!signs.add(lease.clone(), vec![reply], at(20), || ()), "one is open");
        let Ok(SignOutcome::Wanted(_, next)) = signs.on_answer(&answer(1, 5), at(40), drop) else {
            panic!("a sign that is sent later is wanted");
        };
        assert_eq!(first.try_recv().unwrap().unwrap().sent, at(10));
        assert!(later.try_recv().is_err(), "no sign was sent since its request");
        assert!(signs.add(lease, next, at(30), || ()));
        assert!(matches!(signs.on_answer(&answer(1, 5), at(40), drop), Ok(SignOutcome::Taken)));
        assert_eq!(later.try_recv().unwrap().unwrap().sent, at(30));
    }

    #[test]
    fn answers_belong_to_leases_in_any_order() {
        let (mut signs, leases) = (OpenSigns::new(LIMIT), [lease(1, 5), lease(2, 5)]);
        for (lease, now) in leases.iter().zip([10, 20]) {
            signs.add(lease.clone(), Vec::new(), at(now), || ());
        }
        assert!(matches!(signs.on_answer(&answer(2, 5), at(40), drop), Ok(SignOutcome::Taken)));
        assert_eq!((sent(&leases[0]), sent(&leases[1])), (at(0), at(20)));
        assert!(signs.on_answer(&answer(2, 5), at(40), drop).is_err(), "it has its answer");
        assert!(signs.on_answer(&answer(3, 5), at(40), drop).is_err(), "it is none of the pool");
        assert!(
            matches!(signs.on_answer(&answer(1, 0), at(40), drop), Ok(SignOutcome::Ended(it)) if it.id == 1)
        );
    }

    #[test]
    fn a_lease_that_is_refused_has_no_open_sign() {
        let (mut signs, leases) = (OpenSigns::new(LIMIT), [lease(1, 5), lease(2, 5)]);
        let (reply, mut refused) = oneshot::channel();
        signs.add(leases[0].clone(), vec![reply], at(10), || ());
        signs.add(leases[1].clone(), Vec::new(), at(10), || ());
        assert!(!signs.refuse_denied());
        leases[0].deny();
        assert!(signs.refuse_denied());
        assert_eq!(refused.try_recv().unwrap().unwrap_err().kind(), FailureKind::NotApplied);
        assert_eq!(signs.begin_anew(at(20)), [2]);
    }

    #[test]
    fn a_sign_without_an_answer_is_sent_on_another_stream_before_the_member_is_left() {
        let (mut signs, lease) = (OpenSigns::new(LIMIT), lease(1, 4));
        let (reply, mut known) = oneshot::channel();
        signs.add(lease.clone(), vec![reply], at(0), || ());
        assert_eq!(signs.verdict(at(499)), StreamVerdict::InTime);
        assert_eq!(signs.verdict(at(500)), StreamVerdict::Reopen);
        assert_eq!(signs.begin_anew(at(500)), [1]);
        assert_eq!(signs.verdict(at(1_499)), StreamVerdict::InTime, "twice the time");
        assert_eq!(signs.verdict(at(1_500)), StreamVerdict::Reopen);
        assert_eq!(signs.verdict(at(2_000)), StreamVerdict::Leave);
        // The sign counts from when it was sent on the stream that has answered.
        signs.on_answer(&answer(1, 4), at(1_100), drop).unwrap();
        assert_eq!(known.try_recv().unwrap().unwrap().sent, at(500));
        assert_eq!(signs.verdict(at(9_000)), StreamVerdict::InTime);
        // An answer takes 600 ms here.
        signs.add(lease, Vec::new(), at(9_000), || ());
        assert_eq!(signs.verdict(at(9_999)), StreamVerdict::InTime);
        assert_eq!(signs.verdict(at(10_000)), StreamVerdict::Reopen, "the time limit of a request");
    }
}
