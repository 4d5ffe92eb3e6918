//! Acquires that a connection has yet to send.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use crate::backend::sql::job::{Acquires, PendingRequest, Releases, fail_all, no_answer};
use crate::backend::sql::parts::by_distinct_keys;
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, Owner};
use crate::base::clock::{Clock, Instant};

/// Acquires that are sent without a release in between.
pub(crate) enum AcquireStep {
    /// Requests for one key each, all keys different.
    Single(Acquires),
    /// A request for several keys.
    Several(PendingRequest<AcquireRequest, AcquireOutcome>),
}

impl AcquireStep {
    fn requests(&self) -> &[PendingRequest<AcquireRequest, AcquireOutcome>] {
        match self {
            Self::Single(requests) => requests,
            Self::Several(request) => std::slice::from_ref(request),
        }
    }

    fn into_requests(self) -> Acquires {
        match self {
            Self::Single(requests) => requests,
            Self::Several(request) => vec![request],
        }
    }
}

/// The acquires of a connection, in the order in which they are sent.
pub(crate) struct AcquireSteps {
    pending: VecDeque<AcquireStep>,
    clock: Clock,
    /// How long one batch sends acquires.
    limit: Duration,
    batch: AcquireBatch,
}

/// What is known about the acquires of the last batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AcquireBatch {
    /// None was sent yet.
    Fresh,
    /// The first one was sent at that time.
    Begun(Instant),
    /// They took longer than the limit, as for a row that another session has locked.
    Slow,
}

impl AcquireSteps {
    /// One batch sends acquires for a quarter of `request_timeout`. A release has twice that timeout.
    pub(crate) fn new(clock: Clock, request_timeout: Duration) -> Self {
        let (pending, batch) = (VecDeque::new(), AcquireBatch::Fresh);
        Self { pending, clock, limit: request_timeout / 4, batch }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Adds `requests` after the others.
    pub(crate) fn add(&mut self, requests: Acquires) {
        let (single, several): (Acquires, Acquires) =
            requests.into_iter().partition(|(request, _)| request.keys.len() == 1);
        let single = by_distinct_keys(single, |(request, _)| &request.keys);
        self.pending.extend(single.into_iter().map(AcquireStep::Single));
        self.pending.extend(several.into_iter().map(AcquireStep::Several));
    }

    /// The releases of a batch: the ones before its acquires, and the ones after them.
    ///
    /// Acquires go first, so that a release finds their owners in the queue. After a slow batch the releases go first,
    /// except those that undo one of these acquires.
    pub(crate) fn split(&self, releases: Releases) -> (Releases, Releases) {
        match self.batch {
            AcquireBatch::Slow => self.overtaken_by(releases),
            AcquireBatch::Fresh | AcquireBatch::Begun(_) => (Vec::new(), releases),
        }
    }

    /// Begins with the acquires of another batch.
    pub(crate) fn begin(&mut self) {
        self.batch = AcquireBatch::Fresh;
    }

    /// What is sent next. Also `None` after the limit, except for the first step of a batch, so that no acquire waits forever.
    pub(crate) fn next_step(&mut self) -> Option<AcquireStep> {
        let now = self.clock.now();
        match self.batch {
            AcquireBatch::Fresh => self.batch = AcquireBatch::Begun(now),
            AcquireBatch::Begun(began) if now.since(began) < self.limit => {}
            AcquireBatch::Begun(_) | AcquireBatch::Slow => {
                self.batch = AcquireBatch::Slow;
                return None;
            }
        }
        self.pending.pop_front()
    }

    /// Splits `releases` into those that may overtake these acquires, and those that undo one of them.
    fn overtaken_by(&self, releases: Releases) -> (Releases, Releases) {
        let requests = self.pending.iter().flat_map(AcquireStep::requests);
        let owners: HashSet<Owner> = requests.map(|(request, _)| request.owner).collect();
        releases.into_iter().partition(|(request, _)| !owners.contains(&request.lease.owner))
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
        let mut kept = VecDeque::with_capacity(self.pending.len());
        for step in self.pending.drain(..) {
            match step {
                AcquireStep::Single(requests) => {
                    let (undone, others): (Acquires, Acquires) =
                        requests.into_iter().partition(is_undone);
                    fail_all(undone, &no_answer().before_sending());
                    kept.push_back(AcquireStep::Single(others));
                }
                AcquireStep::Several(request) if is_undone(&request) => {
                    fail_all([request], &no_answer().before_sending());
                }
                step @ AcquireStep::Several(_) => kept.push_back(step),
            }
        }
        self.pending = kept;
    }

    /// Fails all acquires, because of `error`. They are not sent.
    pub(crate) fn fail(&mut self, error: &BackendError) {
        let error = error.clone().before_sending();
        fail_all(self.pending.drain(..).flat_map(AcquireStep::into_requests), &error);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::oneshot::{self, Receiver};

    use super::*;
    use crate::backend::{LeaseRef, ReleaseRequest};
    use crate::base::key::Key;

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

    fn owners_of(steps: &mut AcquireSteps) -> Vec<Vec<Owner>> {
        steps.begin();
        let steps = std::iter::from_fn(|| steps.next_step());
        steps
            .map(|step| step.requests().iter().map(|(request, _)| request.owner).collect())
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_left_is_sent_before_what_is_added() {
        let [one, other, third] = [(); 3].map(|()| Owner::random().unwrap());
        let mut steps = no_steps();
        let (several, _several) = acquire(one, &["a", "b"]);
        let (single, _single) = acquire(other, &["a"]);
        let (same, _same) = acquire(third, &["a"]);
        steps.add(several);
        steps.add(single.into_iter().chain(same).collect());
        assert_eq!(owners_of(&mut steps), [[one], [other], [third]]);
    }

    #[tokio::test(start_paused = true)]
    async fn behind_slow_acquires_releases_overtake_others_and_withdraw_those_of_their_own() {
        let [slow, undone, kept] = [(); 3].map(|()| Owner::random().unwrap());
        for keys in [&["a"][..], &["a", "b"]] {
            let mut steps = no_steps();
            let mut answers = Vec::new();
            for owner in [slow, undone, kept] {
                let (request, answer) = acquire(owner, keys);
                steps.add(request);
                answers.push(answer);
            }
            assert!(steps.split(releases(&[slow])).0.is_empty());
            steps.begin();
            assert_eq!(steps.next_step().map(|step| step.requests()[0].0.owner), Some(slow));
            tokio::time::advance(Duration::from_millis(250)).await;
            assert!(steps.next_step().is_none());
            let (first, behind) = steps.split(releases(&[undone, slow]));
            let owner = |releases: &Releases| releases[0].0.lease.owner;
            assert_eq!((first.len(), owner(&first)), (1, slow));
            assert_eq!((behind.len(), owner(&behind)), (1, undone));
            steps.withdraw(&behind);
            assert!(answers[1].try_recv().unwrap().is_err());
            assert!(answers[2].try_recv().is_err(), "not answered");
            assert_eq!(owners_of(&mut steps).concat(), [kept]);
        }
    }
}
