//! Acquires that a connection has yet to send.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use crate::backend::sql::job::{Acquires, PendingRequest, Releases, fail_all, no_answer};
use crate::backend::sql::sender::CLAIMS;
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, Owner};
use crate::base::clock::{Clock, Instant};
use crate::base::key::Key;

/// Acquires that are sent without another request in between.
pub(crate) enum AcquireStep {
    /// Requests for one key each, all keys different.
    Single(Acquires),
    /// A request for several keys.
    Several(PendingRequest<AcquireRequest, AcquireOutcome>),
}

/// The acquires of a connection, in the order in which they were requested.
///
/// They wait here, and not where requests arrive: a release is sent before all acquires that wait.
pub(crate) struct AcquireSteps {
    pending: VecDeque<PendingRequest<AcquireRequest, AcquireOutcome>>,
    clock: Clock,
    /// How long a turn sends acquires.
    limit: Duration,
    /// When the turn sent the first one.
    began: Option<Instant>,
}

impl AcquireSteps {
    /// A turn sends acquires for a sixteenth of `request_timeout`. Requests of other kinds wait as long, and for one statement.
    pub(crate) fn new(clock: Clock, request_timeout: Duration) -> Self {
        Self { pending: VecDeque::new(), clock, limit: request_timeout / 16, began: None }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Adds `requests` after the others.
    pub(crate) fn add(&mut self, requests: Acquires) {
        self.pending.extend(requests);
    }

    /// Begins with the acquires of another turn.
    pub(crate) fn begin(&mut self) {
        self.began = None;
    }

    /// What is sent next. Also `None` after the limit, except for the first step of a turn, so that no acquire waits forever.
    pub(crate) fn next_step(&mut self) -> Option<AcquireStep> {
        let now = self.clock.now();
        if now.since(*self.began.get_or_insert(now)) > self.limit {
            return None;
        }
        // Nothing waits for the others any more.
        self.pending.retain(|(_, reply)| !reply.is_closed());
        match self.pending.front()? {
            (first, _) if first.keys.len() > 1 => {
                self.pending.pop_front().map(AcquireStep::Several)
            }
            _ => Some(AcquireStep::Single(self.single())),
        }
    }

    /// The next requests for one key each, at most [`CLAIMS`]. No request overtakes another one for its key.
    fn single(&mut self) -> Acquires {
        let mut step = Acquires::new();
        let mut taken: HashSet<Key> = HashSet::new();
        let mut kept = VecDeque::new();
        while step.len() < CLAIMS
            && let Some(pending) = self.pending.pop_front()
        {
            let keys = &pending.0.keys;
            let is_next = keys.len() == 1 && !taken.contains(&keys[0]);
            taken.extend(keys.iter().cloned());
            if is_next {
                step.push(pending);
            } else {
                kept.push_back(pending);
            }
        }
        kept.append(&mut self.pending);
        self.pending = kept;
        step
    }

    /// Fails the acquires that one of `releases` undoes. They are not sent.
    pub(crate) fn withdraw(&mut self, releases: &Releases) {
        if self.is_empty() || releases.is_empty() {
            return;
        }
        let owners: HashSet<Owner> = releases.iter().map(|(it, _)| it.lease.owner).collect();
        let is_undone = |(request, _): &PendingRequest<AcquireRequest, AcquireOutcome>| {
            owners.contains(&request.owner)
        };
        let (undone, kept): (Acquires, Acquires) = self.pending.drain(..).partition(is_undone);
        self.pending = kept.into();
        fail_all(undone, &no_answer().before_sending());
    }

    /// Fails all acquires, because of `error`. They are not sent.
    pub(crate) fn fail(&mut self, error: &BackendError) {
        fail_all(self.pending.drain(..), &error.clone().before_sending());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::oneshot::{self, Receiver};

    use super::*;
    use crate::backend::{FailureKind, LeaseRef, ReleaseRequest};

    const TTL: Duration = Duration::from_secs(30);

    type Answer = Receiver<Result<AcquireOutcome, BackendError>>;

    fn acquire(owner: Owner, keys: &[&str]) -> (Acquires, Answer) {
        let (reply, answer) = oneshot::channel();
        let keys: Arc<[Key]> = keys.iter().copied().map(Key::from).collect();
        (vec![(AcquireRequest::new(keys, owner, TTL), reply)], answer)
    }

    fn releases(owners: &[Owner]) -> Releases {
        let keys: Arc<[Key]> = [Key::from("a")].into();
        let lease = |owner| LeaseRef::new(keys.clone(), owner, TTL);
        let requests = owners.iter().map(|owner| ReleaseRequest::new(lease(*owner)));
        requests.map(|request| (request, oneshot::channel().0)).collect()
    }

    fn no_steps() -> AcquireSteps {
        AcquireSteps::new(Clock::runtime(), Duration::from_secs(1))
    }

    fn owners(step: AcquireStep) -> Vec<Owner> {
        let requests = match step {
            AcquireStep::Single(requests) => requests,
            AcquireStep::Several(request) => vec![request],
        };
        requests.iter().map(|(request, _)| request.owner).collect()
    }

    fn all(steps: &mut AcquireSteps) -> Vec<Vec<Owner>> {
        steps.begin();
        std::iter::from_fn(|| steps.next_step()).map(owners).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn no_request_overtakes_another_one_for_its_key() {
        let [one, two, three, four, five] = [(); 5].map(|()| Owner::random().unwrap());
        let mut steps = no_steps();
        let mut answers = Vec::new();
        let requests = [
            (one, &["a"][..]),
            (two, &["a"]),
            (three, &["b", "c"]),
            (four, &["c"]),
            (five, &["d"]),
        ];
        for (owner, keys) in requests {
            let (request, answer) = acquire(owner, keys);
            steps.add(request);
            answers.push(answer);
        }
        assert_eq!(all(&mut steps), [vec![one, five], vec![two], vec![three], vec![four]]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_step_is_no_longer_than_a_statement() {
        let mut steps = no_steps();
        let mut answers = Vec::new();
        for n in 0..=CLAIMS {
            let (request, answer) = acquire(Owner::random().unwrap(), &[&format!("order:{n}")]);
            steps.add(request);
            answers.push(answer);
        }
        let counts: Vec<usize> = all(&mut steps).iter().map(Vec::len).collect();
        assert_eq!(counts, [CLAIMS, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_ends_after_its_limit() {
        let mut steps = no_steps();
        let (mut expected, mut answers) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let owner = Owner::random().unwrap();
            let (request, answer) = acquire(owner, &["a"]);
            steps.add(request);
            expected.push(owner);
            answers.push(answer);
        }
        for expected in expected {
            steps.begin();
            tokio::time::advance(Duration::from_secs(1)).await;
            assert_eq!(steps.next_step().map(owners), Some(vec![expected]));
            tokio::time::advance(Duration::from_millis(63)).await;
            assert!(steps.next_step().is_none());
        }
        assert!(steps.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_given_up_or_undone_is_not_sent() {
        let [undone, given_up, kept] = [(); 3].map(|()| Owner::random().unwrap());
        for keys in [&["a"][..], &["a", "b"]] {
            let mut steps = no_steps();
            let mut answers = Vec::new();
            for owner in [undone, given_up, kept] {
                let (request, answer) = acquire(owner, keys);
                steps.add(request);
                answers.push(answer);
            }
            steps.withdraw(&releases(&[undone]));
            let error = answers[0].try_recv().unwrap().unwrap_err();
            assert_eq!(error.kind(), FailureKind::NotApplied);
            answers.remove(1);
            assert_eq!(all(&mut steps).concat(), [kept]);
        }
    }
}
