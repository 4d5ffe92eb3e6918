//! The conformance suite of stores. It stops at the first rule that is broken.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use crate::backend::notifier::NotifySink;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, FailureKind, LeaseRef, LeaseStatus,
    Notifier, Owner, ReleaseOutcome, ReleaseRequest, WaitMode,
};
use crate::base::clock::Clock;
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::owner_info::OwnerLabel;
use crate::exec::panic_boundary;

mod batches;
mod dropped;
mod expiry;
mod fences;
mod inspections;
mod keys;
mod min_hold;
mod races;
mod several_keys;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(300);
/// The ttl of a lock that is renewed in time, even on a busy machine.
const KEPT: Duration = Duration::from_millis(1_500);

/// The time limit of an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs the suite on `one` and `other`: two connections to the same, empty store. Takes a few seconds.
///
/// It checks that a store grants a key to one owner, renews and releases by owner, and expires leases in time. It also
/// checks that batches are answered in order, dropped calls are tolerated, and fencing tokens grow. Requests for one
/// key race from two connections, from one connection, and from two threads of tokio's blocking pool.
///
/// A store without the capability [`fencing`](crate::backend::Capabilities::fencing) has to reject requests for a
/// fence.
///
/// A request that fails with [`FailureKind::NotApplied`] or [`FailureKind::MaybeApplied`] is repeated. A release that
/// fails with `MaybeApplied` may have been applied, so [`ReleaseOutcome::NotHeld`] then counts as
/// [`ReleaseOutcome::Freed`].
///
/// Some keys have a hash tag, such as `{lost}:a`, so that a cluster keeps them at one server.
///
/// # Panics
/// With the broken rule and what was found; if an answer takes longer than 30 seconds; and outside of a tokio runtime.
pub async fn conformance<B: Backend>(one: B, other: B) {
    let fencing = one.capabilities().fencing;
    let suite = Arc::new(Suite::new(one, other));
    suite.all_but_fences().await;
    if fencing {
        suite.all_of_fences().await;
    } else {
        rules! { suite: fences_are_rejected, }
    }
}

/// The outcome of a request, which is repeated after a temporary error, as a pool does. No function: the future of one that
/// takes an async closure is not known to be `Send`.
macro_rules! retried {
    ($request:expr) => {
        answer(async {
            loop {
                match $request {
                    Ok(outcome) => break outcome,
                    Err(error) => assert_temporary(&error),
                }
                tokio::time::sleep(SHORT / 30).await;
            }
        })
        .await
    };
}
use retried;

/// Checks rules one after the other.
macro_rules! rules {
    ($suite:ident: $($name:ident,)*) => {
        $(rule(stringify!($name), $suite.$name()).await;)*
    };
}
use rules;

/// Checks rules at the same time.
macro_rules! rules_at_once {
    ($suite:ident: $($name:ident,)*) => {
        tokio::join!($(rule(stringify!($name), $suite.$name())),*)
    };
}

/// Checks one rule. Its name is in the message of the panic.
async fn rule(name: &str, check: impl Future<Output = ()>) {
    let checked = async {
        check.await;
        Ok(())
    };
    if let Err(panic) = panic_boundary::run(checked, Err).await {
        panic!("the store breaks the rule `{}`: {}", name.replace('_', " "), panic.message());
    }
}

struct Suite<B> {
    one: B,
    other: B,
    clock: Clock,
    changes: Arc<ChangeSignal>,
}

/// Counts the notifications of both connections about [`CHANGING`].
#[derive(Default)]
struct ChangeSignal(watch::Sender<u32>);

impl ChangeSignal {
    fn count(&self) {
        self.0.send_modify(|count| *count += 1);
    }
}

/// The key of the notifications that are checked.
const CHANGING: &str = "change";

impl NotifySink for Arc<ChangeSignal> {
    fn key_changed(&self, key: &str) {
        if key == CHANGING {
            self.count();
        }
    }

    fn disconnected(&self, _: &BackendError) {}

    fn resync(&self) {
        self.count();
    }

    fn head_of_queue(&self, key: &str, _owner: &Owner, _within: Duration) -> bool {
        self.key_changed(key);
        true
    }

    fn contended(&self, _key: &str) {}
}

impl<B: Backend> Suite<B> {
    fn new(one: B, other: B) -> Self {
        let changes = Arc::new(ChangeSignal::default());
        one.subscribe(Notifier::new(changes.clone()));
        other.subscribe(Notifier::new(changes.clone()));
        Self { one, other, clock: Clock::runtime(), changes }
    }

    async fn all_but_fences(self: &Arc<Self>) {
        rules! {
            self:
            it_is_healthy,
            one_owner_at_a_time,
            a_retry_by_the_owner_succeeds_again,
            only_the_owner_renews_and_releases,
            several_keys_are_taken_together_or_not_at_all,
            a_queued_owner_takes_several_keys_one_by_one,
            batches_answer_in_order,
            a_batch_of_acquires_answers_in_order,
            leases_of_different_sizes_are_renewed_together,
            one_of_a_batch_has_the_key,
            the_holder_of_a_key_is_shown,
            the_process_of_a_holder_is_shown,
            the_wait_queue_of_a_key_is_shown,
            a_change_is_notified_if_the_store_can,
            unusual_keys_are_distinct,
            a_hundred_owners_take_turns,
            a_dropped_call_disturbs_no_other,
            one_of_concurrent_requests_has_a_free_key,
            one_of_concurrent_requests_has_several_keys,
            one_of_two_threads_has_a_free_key,
            a_late_renewal_takes_nothing_from_the_next_owner,
            a_late_release_takes_nothing_from_the_next_owner,
        }
        // These mostly sleep, so they run at the same time.
        rules_at_once! {
            self:
            a_late_retry_for_less_time_shortens_nothing,
            a_grant_ends_with_its_ttl,
            a_grant_that_has_ended_stays_so,
            a_look_extends_nothing,
            a_renewal_counts_from_now,
            every_key_of_a_lease_is_renewed,
            one_of_several_keys_is_lost,
            a_kept_key_stays_taken_for_a_while,
            a_min_hold_needs_no_renewal,
            a_min_hold_keeps_the_keys_from_the_grant_on,
            several_keys_are_kept_past_their_ttl,
            only_the_owner_keeps,
            a_release_extends_nothing_that_has_expired,
            an_end_of_the_ttl_is_found_as_promised,
            one_of_concurrent_requests_has_an_expired_key,
        };
    }

    async fn it_is_healthy(&self) {
        for backend in [&self.one, &self.other] {
            let health = answer(backend.health()).await;
            assert!(health.is_ok(), "a store that serves is healthy: {health:?}");
        }
    }

    async fn one_owner_at_a_time(&self) {
        let mine = claim(["exclusive"], LONG);
        let theirs = claim(["exclusive"], LONG);
        granted(&self.one, &mine).await;
        for backend in [&self.one, &self.other] {
            let expires_in = contended(backend, &theirs).await;
            assert!(
                expires_in.is_none_or(|expires_in| expires_in <= LONG),
                "the lease of the holder is at most its ttl"
            );
        }
        assert_eq!(
            holds(&self.other, &mine).await,
            LeaseStatus::Held,
            "the owner is known to all connections"
        );
        assert_eq!(
            holds(&self.other, &theirs).await,
            LeaseStatus::NotHeld,
            "a contended request takes nothing"
        );
        assert_eq!(
            release(&self.one, &mine).await,
            ReleaseOutcome::Freed,
            "the owner frees its lock"
        );
        granted(&self.other, &theirs).await;
        assert_eq!(
            release(&self.other, &theirs).await,
            ReleaseOutcome::Freed,
            "the next owner frees its lock"
        );
    }

    async fn a_retry_by_the_owner_succeeds_again(&self) {
        let mut mine = claim(["retry"], LONG);
        granted(&self.one, &mine).await;
        mine.attempt = 1;
        granted(&self.one, &mine).await;
        mine.attempt = 2;
        granted(&self.other, &mine).await;
        assert_eq!(
            release(&self.one, &mine).await,
            ReleaseOutcome::Freed,
            "one release ends all its retries"
        );
        assert_eq!(
            release(&self.one, &mine).await,
            ReleaseOutcome::NotHeld,
            "a second release finds nothing"
        );
        let theirs = claim(["retry"], LONG);
        granted(&self.one, &theirs).await;
        release(&self.one, &theirs).await;
    }

    async fn only_the_owner_renews_and_releases(&self) {
        let mine = claim(["owner"], LONG);
        let theirs = claim(["owner"], LONG);
        granted(&self.one, &mine).await;
        assert_eq!(
            release(&self.other, &theirs).await,
            ReleaseOutcome::NotHeld,
            "another owner frees nothing"
        );
        assert_eq!(
            renew(&self.other, &theirs).await,
            LeaseStatus::NotHeld,
            "another owner renews nothing"
        );
        assert_eq!(
            holds(&self.one, &mine).await,
            LeaseStatus::Held,
            "a renewal and a release by another owner change no lease"
        );
        release(&self.one, &mine).await;
        assert_eq!(
            renew(&self.one, &mine).await,
            LeaseStatus::NotHeld,
            "what is freed cannot be renewed"
        );
        let theirs = claim(["owner"], LONG);
        granted(&self.other, &theirs).await;
        release(&self.other, &theirs).await;
    }

    async fn batches_answer_in_order(&self) {
        let claims: Vec<_> = (0..10).map(|n| claim([format!("batch:{n}")], LONG)).collect();
        for claim in claims.iter().step_by(2) {
            granted(&self.one, claim).await;
        }
        let leases: Vec<_> = claims.iter().map(lease).collect();
        let releases: Vec<_> = claims.iter().map(release_of).collect();
        let expected: Vec<_> = (0..10)
            .map(|n| if n % 2 == 0 { LeaseStatus::Held } else { LeaseStatus::NotHeld })
            .collect();
        assert_eq!(
            renewed(&self.one, &leases).await,
            expected,
            "a batch of renewals answers in order"
        );
        let expected: Vec<_> = (0..10)
            .map(|n| if n % 2 == 0 { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld })
            .collect();
        assert_eq!(
            released(&self.one, &releases).await,
            expected,
            "a batch of releases answers in order"
        );
        assert!(answer(self.one.acquire(&[])).await.is_empty(), "an empty batch has no answers");
        assert!(answer(self.one.renew(&[])).await.is_empty(), "an empty batch has no answers");
        assert!(answer(self.one.release(&[])).await.is_empty(), "an empty batch has no answers");
    }

    async fn a_change_is_notified_if_the_store_can(&self) {
        let mine = claim([CHANGING], LONG);
        granted(&self.one, &mine).await;
        let theirs = claim([CHANGING], LONG);
        let mut request = theirs.clone();
        loop {
            match attempt(&self.other, &request).await {
                AcquireOutcome::Contended { wait_mode: WaitMode::Poll, .. } => {
                    release(&self.one, &mine).await;
                    return;
                }
                // The first answer may be for a single attempt, and a zero `retry_after` asks for another request.
                AcquireOutcome::Contended {
                    wait_mode: WaitMode::Watch { retry_after }, ..
                } if request.attempt == 0 || (retry_after.is_zero() && request.attempt < 10) => {
                    request.attempt += 1;
                }
                AcquireOutcome::Contended { .. } => break,
                AcquireOutcome::Acquired { .. } => panic!("two owners at once"),
            }
        }
        // Notifications of before do not count.
        let mut changes = self.changes.0.subscribe();
        release(&self.one, &mine).await;
        let notified = timeout(Duration::from_secs(5), changes.changed()).await;
        assert!(notified.is_ok(), "a release sends the promised notification");
        self.granted_within(&self.other, &theirs, SHORT * 20).await;
        release(&self.other, &theirs).await;
    }

    async fn a_hundred_owners_take_turns(&self) {
        let inside = std::cell::Cell::new(0);
        for n in 0..100 {
            let backend = if n % 2 == 0 { &self.one } else { &self.other };
            let mine = claim(["turns"], LONG);
            granted(backend, &mine).await;
            let (rival, next) = (claim(["turns"], LONG), claim(["turns"], LONG));
            let (rival, next) =
                tokio::join!(attempt(&self.one, &rival), attempt(&self.other, &next));
            for attempt in [rival, next] {
                assert!(
                    matches!(attempt, AcquireOutcome::Contended { .. }),
                    "two owners at once: {attempt:?}"
                );
            }
            inside.set(inside.get() + 1);
            release(backend, &mine).await;
        }
        assert_eq!(inside.get(), 100);
    }

    /// Retries until granted, and returns the fencing token if one was requested.
    async fn granted_within(
        &self,
        backend: &B,
        claim: &AcquireRequest,
        limit: Duration,
    ) -> Option<Fence> {
        let mut claim = claim.clone();
        let deadline = self.clock.now() + limit;
        loop {
            match one(answer(backend.acquire(std::slice::from_ref(&claim))).await) {
                Ok(AcquireOutcome::Acquired { fence, .. }) => return fence,
                // Servers of one store may disagree for a moment when a lock ends.
                Ok(AcquireOutcome::Contended { .. }) => {}
                Err(error) => assert_temporary(&error),
            }
            assert!(self.clock.now() < deadline, "{:?} is not free after {limit:?}", claim.keys);
            claim.attempt += 1;
            tokio::time::sleep(SHORT / 30).await;
        }
    }
}

fn claim<K: Into<Key>>(keys: impl IntoIterator<Item = K>, ttl: Duration) -> AcquireRequest {
    let keys: Arc<[Key]> = keys.into_iter().map(Into::into).collect();
    let owner = Owner::random().unwrap();
    let min_hold = Duration::ZERO;
    AcquireRequest {
        keys,
        owner,
        ttl,
        min_hold,
        fencing: false,
        extra_fences: 0,
        attempt: 0,
        enqueue: false,
        label: OwnerLabel::of_process(None),
    }
}

fn lease(claim: &AcquireRequest) -> LeaseRef {
    let AcquireRequest { keys, owner, ttl, min_hold, .. } = claim.clone();
    LeaseRef { keys, owner, ttl, min_hold }
}

fn release_of(claim: &AcquireRequest) -> ReleaseRequest {
    ReleaseRequest {
        lease: lease(claim),
        free_after: Duration::ZERO,
        successor: None,
        barging_window: Duration::ZERO,
        forced: None,
    }
}

/// The outcome of one request. A temporary failure is retried, as a pool does.
async fn attempt<B: Backend>(backend: &B, claim: &AcquireRequest) -> AcquireOutcome {
    let mut claim = claim.clone();
    retried!({
        let outcome = one(backend.acquire(std::slice::from_ref(&claim)).await);
        claim.attempt += 1;
        outcome
    })
}

/// Expects a grant. Servers of one store may disagree for a moment when a lock ends, so it retries.
async fn granted<B: Backend>(backend: &B, claim: &AcquireRequest) -> Option<Fence> {
    let mut claim = claim.clone();
    for _ in 0..60 {
        if let AcquireOutcome::Acquired { fence, .. } = attempt(backend, &claim).await {
            return fence;
        }
        claim.attempt += 1;
        tokio::time::sleep(SHORT / 30).await;
    }
    panic!("the owner did not get {:?}, which no other owner holds", claim.keys);
}

async fn contended<B: Backend>(backend: &B, claim: &AcquireRequest) -> Option<Duration> {
    match attempt(backend, claim).await {
        AcquireOutcome::Contended { expires_in, .. } => expires_in,
        AcquireOutcome::Acquired { .. } => {
            panic!("{:?} was granted although another owner holds it", claim.keys)
        }
    }
}

/// Sends one request. A temporary failure counts as no grant.
async fn takes<B: Backend>(backend: &B, claim: &AcquireRequest) -> bool {
    match one(answer(backend.acquire(std::slice::from_ref(claim))).await) {
        Ok(attempt) => matches!(attempt, AcquireOutcome::Acquired { .. }),
        Err(error) => {
            assert_temporary(&error);
            false
        }
    }
}

async fn renew<B: Backend>(backend: &B, claim: &AcquireRequest) -> LeaseStatus {
    one(renewed(backend, &[lease(claim)]).await)
}

async fn renewed<B: Backend>(backend: &B, leases: &[LeaseRef]) -> Vec<LeaseStatus> {
    retried!({
        let outcomes = backend.renew(leases).await;
        assert_eq!(outcomes.len(), leases.len(), "one outcome for each lease");
        outcomes.into_iter().collect()
    })
}

/// The outcome of a release that may have been repeated.
#[derive(Clone, Copy, Debug, Default)]
struct Released {
    /// `None` while all answers are failures.
    outcome: Option<ReleaseOutcome>,
    /// Whether an earlier request for the same release may have been applied, in whole or in part.
    is_ambiguous: bool,
}

impl PartialEq<ReleaseOutcome> for Released {
    fn eq(&self, expected: &ReleaseOutcome) -> bool {
        // Where the earlier request was applied, the repeated one finds nothing.
        let is_freed_before = self.is_ambiguous && self.outcome == Some(ReleaseOutcome::NotHeld);
        is_freed_before || self.outcome == Some(*expected)
    }
}

async fn release<B: Backend>(backend: &B, claim: &AcquireRequest) -> Released {
    one(released(backend, &[release_of(claim)]).await)
}

/// Repeats only the releases that fail: an answer is final.
async fn released<B: Backend>(backend: &B, releases: &[ReleaseRequest]) -> Vec<Released> {
    let mut answers = vec![Released::default(); releases.len()];
    retried!({
        let is_open = |at: &usize| answers[*at].outcome.is_none();
        let open: Vec<_> = (0..releases.len()).filter(is_open).collect();
        let requests: Vec<_> = open.iter().map(|at| releases[*at].clone()).collect();
        let outcomes = backend.release(&requests).await;
        assert_eq!(outcomes.len(), requests.len(), "one outcome for each release");
        let mut failure = None;
        for (at, outcome) in open.into_iter().zip(outcomes) {
            match outcome {
                Ok(outcome) => answers[at].outcome = Some(outcome),
                Err(error) => {
                    assert_temporary(&error);
                    answers[at].is_ambiguous |= error.kind() == FailureKind::MaybeApplied;
                    failure = Some(error);
                }
            }
        }
        failure.map_or(Ok(()), Err)
    });
    answers
}

async fn holds<B: Backend>(backend: &B, claim: &AcquireRequest) -> LeaseStatus {
    retried!(backend.is_held(&lease(claim)).await)
}

/// Frees what a race has left. Each of its outcomes is correct.
async fn free_all<B: Backend>(backend: &B, claims: &[AcquireRequest]) {
    let releases: Vec<_> = claims.iter().map(release_of).collect();
    released(backend, &releases).await;
}

async fn answer<T>(call: impl Future<Output = T>) -> T {
    match timeout(ANSWER_TIMEOUT, call).await {
        Ok(answer) => answer,
        Err(_) => panic!("the store has not answered within {ANSWER_TIMEOUT:?}"),
    }
}

/// # Panics
/// If `error` is permanent.
fn assert_temporary(error: &BackendError) {
    assert!(error.kind() != FailureKind::Rejected, "the store rejects the request: {error}");
}

fn one<T>(mut outcomes: Vec<T>) -> T {
    assert_eq!(outcomes.len(), 1, "one outcome for each entry");
    outcomes.remove(0)
}
