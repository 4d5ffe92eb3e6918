//! Acquires and releases that a connection has yet to send.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::backend::sql::job::{
    Acquires, Claim, PendingRequest, Releases, closed, fail_all, undone_before_sending,
};
use crate::backend::sql::renewal_queue::{LeaseId, id_of};
use crate::backend::sql::sender::CLAIMS;
use crate::backend::{
    AcquireOutcome, AcquireRequest, BackendError, Owner, ReleaseOutcome, ReleaseRequest,
};
use crate::base::clock::{Clock, Instant};
use crate::base::key::Key;

/// How many requests are looked at for one step. Requests for keys that the step already names are left for the next ones.
const LOOKED_AT: usize = 2 * CLAIMS;

/// What is sent together.
pub(crate) enum ClaimStep {
    /// At most [`CLAIMS`] releases, all keys different.
    Release(Releases),
    /// At most [`CLAIMS`] requests for one key each, all keys different.
    Single(Acquires),
    /// A request for several keys.
    Several(PendingRequest<AcquireRequest, AcquireOutcome>),
}

/// The acquires and releases of a connection. They are sent in turns, and other requests in between.
///
/// A turn sends releases first, because calls end with them, and a key that is free needs no queue. A turn has a time limit for
/// each kind, and sends one step of each at least: no request waits forever. For each key, each kind keeps its order.
pub(crate) struct ClaimQueue {
    releases: VecDeque<PendingRequest<ReleaseRequest, ReleaseOutcome>>,
    acquires: VecDeque<PendingRequest<AcquireRequest, AcquireOutcome>>,
    last: LastAcquire,
    clock: Clock,
    /// How long a turn sends requests of one kind.
    limit: Duration,
    turn: Turn,
}

/// The kind of the last step of acquires. Requests for one key and requests for several alternate: a step has many of the former,
/// and one of the latter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastAcquire {
    Single,
    Several,
}

/// What a turn sends, and when it sent the first step of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Releases(Option<Instant>),
    Acquires(Option<Instant>),
}

impl ClaimQueue {
    /// A turn sends requests of one kind for a sixteenth of `request_timeout`. The last step may take longer.
    pub(crate) fn new(clock: Clock, request_timeout: Duration) -> Self {
        Self {
            releases: VecDeque::new(),
            acquires: VecDeque::new(),
            last: LastAcquire::Several,
            clock,
            limit: request_timeout / 16,
            turn: Turn::Releases(None),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.releases.is_empty() && self.acquires.is_empty()
    }

    /// Adds requests after the others of their kind. An acquire fails, and is not sent, if a later release of its owner undoes it.
    pub(crate) fn add(&mut self, claims: Vec<Claim>) {
        // By the owner of a release, the number of acquires before it.
        let mut undone: HashMap<Owner, usize> = HashMap::new();
        let mut repeated: HashSet<LeaseId> = HashSet::new();
        let present = self.releases.len();
        for claim in claims {
            match claim {
                Claim::Acquire(pending) => self.acquires.push_back(pending),
                Claim::Release(pending) => {
                    undone.insert(pending.0.lease.owner, self.acquires.len());
                    repeated.insert(id_of(&pending.0.lease));
                    self.releases.push_back(pending);
                }
            }
        }
        if undone.is_empty() {
            return;
        }
        for (at, pending) in std::mem::take(&mut self.acquires).into_iter().enumerate() {
            if undone.get(&pending.0.owner).is_some_and(|before| at < *before) {
                fail_all([pending], &undone_before_sending());
            } else {
                self.acquires.push_back(pending);
            }
        }
        // Repeated, after its time limit: the former one needs no answer any more.
        let mut at = 0;
        self.releases.retain(|(it, reply)| {
            at += 1;
            at > present || !reply.is_closed() || !repeated.contains(&id_of(&it.lease))
        });
    }

    /// Begins a turn.
    pub(crate) fn begin(&mut self) {
        self.turn = Turn::Releases(None);
    }

    /// What the turn sends next.
    pub(crate) fn next_step(&mut self) -> Option<ClaimStep> {
        if let Turn::Releases(_) = self.turn {
            if !self.releases.is_empty() && !self.is_over() {
                let step = distinct(&mut self.releases, |it| &it.lease.keys, |_| true);
                return Some(ClaimStep::Release(step));
            }
            self.turn = Turn::Acquires(None);
        }
        if self.is_over() { None } else { self.next_acquires() }
    }

    /// Whether the turn has sent requests of the present kind for long enough.
    pub(crate) fn is_over(&mut self) -> bool {
        let now = self.clock.now();
        let (Turn::Releases(began) | Turn::Acquires(began)) = &mut self.turn;
        now.since(*began.get_or_insert(now)) > self.limit
    }

    fn next_acquires(&mut self) -> Option<ClaimStep> {
        self.acquires.retain(|(_, reply)| !reply.is_closed());
        let is_single = |request: &AcquireRequest| request.keys.len() == 1;
        let (first, _) = self.acquires.front()?;
        if is_single(first) || self.last == LastAcquire::Several {
            let step = distinct(&mut self.acquires, |it| &it.keys, is_single);
            if !step.is_empty() {
                self.last = LastAcquire::Single;
                return Some(ClaimStep::Single(step));
            }
        }
        self.last = LastAcquire::Several;
        self.acquires.pop_front().map(ClaimStep::Several)
    }

    /// Puts requests back, of which nothing was applied. They are the next ones.
    pub(crate) fn put_back(&mut self, requests: Acquires) {
        for pending in requests.into_iter().rev() {
            self.acquires.push_front(pending);
        }
    }

    /// [`put_back`](Self::put_back) for releases.
    #[cfg(feature = "postgres")]
    pub(crate) fn put_back_releases(&mut self, requests: Releases) {
        for pending in requests.into_iter().rev() {
            self.releases.push_front(pending);
        }
    }

    /// Fails all acquires. The next turn sends all releases.
    pub(crate) fn close(&mut self) {
        fail_all(self.acquires.drain(..), &closed());
        self.limit = Duration::MAX;
    }

    /// Fails all requests, because of `error`. They are not sent.
    pub(crate) fn fail(&mut self, error: &BackendError) {
        let error = error.clone().before_sending();
        fail_all(self.releases.drain(..), &error);
        fail_all(self.acquires.drain(..), &error);
    }
}

/// Takes the next requests that `takes` accepts, at most [`CLAIMS`], no two of them for one key. No request overtakes another
/// one for its keys.
fn distinct<R, T>(
    pending: &mut VecDeque<PendingRequest<R, T>>,
    keys: impl Fn(&R) -> &Arc<[Key]>,
    takes: impl Fn(&R) -> bool,
) -> Vec<PendingRequest<R, T>> {
    let (mut step, mut kept) = (Vec::new(), Vec::new());
    let mut named: HashSet<Key> = HashSet::new();
    for _ in 0..LOOKED_AT {
        let Some((request, reply)) = pending.pop_front() else { break };
        let is_next = takes(&request) && !keys(&request).iter().any(|key| named.contains(key));
        named.extend(keys(&request).iter().cloned());
        if is_next {
            step.push((request, reply));
        } else {
            kept.push((request, reply));
        }
        if step.len() == CLAIMS {
            break;
        }
    }
    for request in kept.into_iter().rev() {
        pending.push_front(request);
    }
    step
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot::{self, Receiver};

    use super::*;
    use crate::backend::{FailureKind, LeaseRef};

    const TTL: Duration = Duration::from_secs(30);

    type Answer = Receiver<Result<AcquireOutcome, BackendError>>;

    fn keys_of(names: &[&str]) -> Arc<[Key]> {
        names.iter().copied().map(Key::from).collect()
    }

    /// A queue with a limit of 62.5 ms, and the answers to its acquires.
    struct Scene {
        queue: ClaimQueue,
        answers: Vec<Answer>,
    }

    impl Scene {
        fn new() -> Self {
            let queue = ClaimQueue::new(Clock::runtime(), Duration::from_secs(1));
            Self { queue, answers: Vec::new() }
        }

        fn acquire(&mut self, names: &[&str]) -> Owner {
            let owner = Owner::random().unwrap();
            let (reply, answer) = oneshot::channel();
            let request = AcquireRequest::new(keys_of(names), owner, TTL);
            self.queue.add(vec![Claim::Acquire((request, reply))]);
            self.answers.push(answer);
            owner
        }

        /// A release that nothing waits for.
        fn release(&mut self, owner: Owner, names: &[&str]) {
            let request = ReleaseRequest::new(LeaseRef::new(keys_of(names), owner, TTL));
            self.queue.add(vec![Claim::Release((request, oneshot::channel().0))]);
        }

        /// The kind of the next step, and its owners.
        fn next(&mut self) -> Option<(&'static str, Vec<Owner>)> {
            let owners =
                |requests: Acquires| requests.iter().map(|(request, _)| request.owner).collect();
            self.queue.next_step().map(|step| match step {
                ClaimStep::Release(requests) => {
                    ("release", requests.iter().map(|(request, _)| request.lease.owner).collect())
                }
                ClaimStep::Single(requests) => ("single", owners(requests)),
                ClaimStep::Several(request) => ("several", owners(vec![request])),
            })
        }

        fn turn(&mut self) -> Vec<(&'static str, Vec<Owner>)> {
            self.queue.begin();
            std::iter::from_fn(|| self.next()).collect()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn releases_are_first_and_no_request_overtakes_another_one_for_its_key() {
        let mut scene = Scene::new();
        let [one, two] = [["a"], ["a"]].map(|names| scene.acquire(&names));
        let three = scene.acquire(&["b", "c"]);
        let [four, five] = [["c"], ["d"]].map(|names| scene.acquire(&names));
        let [other, next] = [(); 2].map(|()| Owner::random().unwrap());
        scene.release(other, &["a", "b"]);
        scene.release(next, &["b"]);
        let expected = [
            ("release", vec![other]),
            ("release", vec![next]),
            ("single", vec![one, five]),
            ("single", vec![two]),
            ("several", vec![three]),
            ("single", vec![four]),
        ];
        assert_eq!(scene.turn(), expected);
        assert!(scene.queue.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn requests_for_several_keys_do_not_delay_all_others() {
        let mut scene = Scene::new();
        for names in [["a", "b"], ["c", "d"], ["e", "f"]] {
            scene.acquire(&names);
        }
        scene.acquire(&["g"]);
        scene.acquire(&["e"]);
        let kinds: Vec<_> = scene.turn().into_iter().map(|(kind, _)| kind).collect();
        assert_eq!(kinds, ["single", "several", "several", "several", "single"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_for_no_key_is_sent() {
        let mut scene = Scene::new();
        let owner = scene.acquire(&[]);
        assert_eq!(scene.turn(), [("several", vec![owner])]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_step_is_no_longer_than_a_statement() {
        let mut scene = Scene::new();
        for n in 0..=CLAIMS {
            scene.acquire(&[&format!("order:{n}")]);
            scene.release(Owner::random().unwrap(), &[&format!("held:{n}")]);
        }
        let counts: Vec<_> =
            scene.turn().iter().map(|(kind, owners)| (*kind, owners.len())).collect();
        assert_eq!(
            counts,
            [("release", CLAIMS), ("release", 1), ("single", CLAIMS), ("single", 1)]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_sends_requests_of_each_kind_for_as_long_as_its_limit() {
        let mut scene = Scene::new();
        for _ in 0..2 {
            scene.acquire(&["a"]);
            scene.release(Owner::random().unwrap(), &["b"]);
        }
        for _ in 0..2 {
            scene.queue.begin();
            for kind in ["release", "single"] {
                assert_eq!(scene.next().map(|(kind, _)| kind), Some(kind));
                tokio::time::advance(Duration::from_millis(63)).await;
            }
            assert_eq!(scene.next(), None);
        }
        assert!(scene.queue.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_are_put_back_are_the_next_ones() {
        let mut scene = Scene::new();
        let [one, two] = [["a"], ["b"]].map(|names| scene.acquire(&names));
        scene.queue.begin();
        let Some(ClaimStep::Single(requests)) = scene.queue.next_step() else {
            panic!("no step");
        };
        let later = scene.acquire(&["a"]);
        scene.queue.put_back(requests);
        assert_eq!(scene.turn(), [("single", vec![one, two]), ("single", vec![later])]);
    }

    #[cfg(feature = "postgres")]
    #[tokio::test(start_paused = true)]
    async fn releases_that_are_put_back_are_the_next_ones() {
        let mut scene = Scene::new();
        let [one, two, later] = [(); 3].map(|()| Owner::random().unwrap());
        scene.release(one, &["a"]);
        scene.release(two, &["b"]);
        scene.queue.begin();
        let Some(ClaimStep::Release(requests)) = scene.queue.next_step() else {
            panic!("no step");
        };
        scene.release(later, &["a"]);
        scene.queue.put_back_releases(requests);
        assert_eq!(scene.turn(), [("release", vec![one, two]), ("release", vec![later])]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_acquire_that_is_given_up_or_undone_is_not_sent() {
        for names in [&["a"][..], &["a", "b"]] {
            let mut scene = Scene::new();
            let [undone, _, kept] = [(); 3].map(|()| scene.acquire(names));
            scene.release(undone, names);
            let error = scene.answers[0].try_recv().unwrap().unwrap_err();
            assert_eq!(error.kind(), FailureKind::NotApplied);
            scene.answers.remove(1);
            let owners: Vec<_> = scene.turn().into_iter().map(|(_, owners)| owners).collect();
            assert_eq!(owners, [[undone], [kept]]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_withdraws_the_acquires_of_its_owner_before_it() {
        let [undone, other] = [(); 2].map(|()| Owner::random().unwrap());
        let acquire = |owner| {
            let (reply, answer) = oneshot::channel();
            (Claim::Acquire((AcquireRequest::new(keys_of(&["a"]), owner, TTL), reply)), answer)
        };
        let release = ReleaseRequest::new(LeaseRef::new(keys_of(&["a"]), undone, TTL));
        let release = Claim::Release((release, oneshot::channel().0));
        let (before, mut withdrawn) = acquire(undone);
        let (unrelated, _unrelated) = acquire(other);
        let (after, _after) = acquire(undone);
        let mut scene = Scene::new();
        scene.queue.add(vec![before, unrelated, release, after]);
        let expected = [("release", undone), ("single", other), ("single", undone)];
        assert_eq!(scene.turn(), expected.map(|(kind, owner)| (kind, vec![owner])));
        let error = withdrawn.try_recv().unwrap().unwrap_err();
        assert_eq!(error.kind(), FailureKind::NotApplied);
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_that_is_repeated_is_sent_once() {
        let mut scene = Scene::new();
        let owner = Owner::random().unwrap();
        scene.release(owner, &["a"]);
        scene.release(owner, &["b"]);
        scene.release(owner, &["a"]);
        assert_eq!(scene.turn(), [("release", vec![owner, owner])]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_queue_that_is_closed_sends_its_releases_in_one_turn() {
        let mut scene = Scene::new();
        scene.acquire(&["b"]);
        for _ in 0..2 {
            scene.release(Owner::random().unwrap(), &["a"]);
        }
        scene.queue.close();
        scene.queue.begin();
        for _ in 0..2 {
            assert_eq!(scene.next().map(|(kind, _)| kind), Some("release"));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(scene.next(), None);
        let error = scene.answers[0].try_recv().unwrap().unwrap_err();
        assert_eq!(error.kind(), FailureKind::NotApplied);
    }
}
