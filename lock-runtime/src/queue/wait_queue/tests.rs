use std::future::Future;
use std::panic::Location;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use tokio::sync::oneshot;

use super::*;
use crate::base::call_site::LockLabel;
use crate::base::options::Wait;
use crate::base::options::{Defaults, LockOptions};
use crate::base::policy::Policy;

/// The lease of `key`, which is woken.
fn woken(queues: &WaitQueues<TestWaiter>, key: &str) -> Option<u64> {
    let (woken, lease) = queues.wake(key)?;
    assert_eq!(woken.as_str(), key);
    Some(lease)
}

fn held_by(held: Vec<(Key, u64)>) -> Vec<u64> {
    held.into_iter().map(|(_, lease)| lease).collect()
}

/// A waiter that records how its wait ended.
#[derive(Clone, Debug)]
pub(in crate::queue) struct TestWaiter {
    spec: Arc<LockSpec>,
    is_cancelled: Arc<AtomicBool>,
    rejected: Arc<std::sync::Mutex<Option<ErrorKind>>>,
}

impl Waiter for TestWaiter {
    fn spec(&self) -> &Arc<LockSpec> {
        &self.spec
    }

    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::SeqCst)
    }

    fn reject(self, error: LockError) {
        let before = self.rejected.lock().unwrap().replace(error.kind());
        assert_eq!(before, None, "a waiter is rejected once");
    }
}

impl TestWaiter {
    pub(in crate::queue) fn new(key: &'static str, fencing: bool) -> Self {
        let keys: Arc<[Key]> = [Key::from_static(key)].into();
        let options = LockOptions::new().fencing(fencing);
        let policy = Policy::new(&options, &Defaults::default()).unwrap();
        let spec =
            LockSpec::new(LockLabel::Key(keys[0].clone(), Location::caller()), keys, policy, "");
        let (is_cancelled, rejected) = (Arc::default(), Arc::default());
        Self { spec: Arc::new(spec), is_cancelled, rejected }
    }

    fn rejected(&self) -> Option<ErrorKind> {
        *self.rejected.lock().unwrap()
    }
}

pub(in crate::queue) const KEY: Key = Key::from_static("k");

fn queues(max_waiters: usize) -> WaitQueues<TestWaiter> {
    WaitQueues::new(max_waiters, Clock::Boot)
}

pub(in crate::queue) fn forever() -> WaitParams {
    WaitParams::new(Clock::Boot.now(), Wait::Forever)
}

/// The rank of `waiter` behind others.
pub(in crate::queue) fn enqueued(queues: &WaitQueues<TestWaiter>, waiter: &TestWaiter) -> u64 {
    let (id, position) = queues.enqueue(&KEY, &forever(), waiter.clone()).unwrap();
    assert!(matches!(position, Enqueued::Queued), "{position:?}");
    id
}

/// Queues whose permit for `KEY` is out.
pub(in crate::queue) fn with_permit_out(max_waiters: usize) -> WaitQueues<TestWaiter> {
    let queues = queues(max_waiters);
    let first = queues.enqueue(&KEY, &forever(), TestWaiter::new("k", false)).unwrap();
    assert!(matches!(first.1, Enqueued::Head(_)));
    queues
}

fn next_queue(after: &[AfterPass]) -> Option<&Key> {
    match after {
        [] => None,
        [AfterPass::Queue(keys)] => Some(&keys[0]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_permit_passes_in_order_of_arrival_and_the_queue_vanishes() {
    let queues = with_permit_out(10);
    let waiters = [(); 3].map(|()| TestWaiter::new("k", false));
    let ids = waiters.each_ref().map(|waiter| enqueued(&queues, waiter));
    assert!(ids.is_sorted());
    for id in ids {
        let after = queues.pass(&[KEY]);
        assert_eq!(next_queue(&after), Some(&KEY));
        let head = queues.begin_request(&KEY).unwrap();
        assert_eq!(head.id, id);
        assert!(queues.take_head(&KEY, id, |_| false).is_some());
    }
    assert!(queues.pass(&[KEY]).is_empty() && queues.is_empty());
    assert!(waiters.iter().all(|waiter| waiter.rejected().is_none()));
}

#[test]
fn a_key_has_one_permit_and_other_keys_have_their_own() {
    let queues = with_permit_out(10);
    enqueued(&queues, &TestWaiter::new("k", false));
    let other = Key::from_static("other");
    let first = queues.enqueue(&other, &forever(), TestWaiter::new("other", false)).unwrap();
    assert!(matches!(first.1, Enqueued::Head(_)));
    assert!(queues.pass(&[other]).is_empty());
}

#[test]
fn a_full_queue_and_a_closed_one_reject() {
    let queues = with_permit_out(2);
    let waiters = [(); 2].map(|()| TestWaiter::new("k", false));
    for waiter in &waiters {
        enqueued(&queues, waiter);
    }
    let full = queues.enqueue(&KEY, &forever(), TestWaiter::new("k", false)).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::QueueFull);
    queues.close();
    assert!(waiters.iter().all(|waiter| waiter.rejected() == Some(ErrorKind::PoolClosed)));
    let closed = queues.enqueue(&KEY, &forever(), TestWaiter::new("k", false)).unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::PoolClosed);
    assert!(queues.pass(&[KEY]).is_empty() && queues.is_empty());
}

#[test]
fn a_wait_that_is_over_is_rejected_at_once_but_not_at_an_empty_queue() {
    let queues = queues(10);
    let single = WaitParams::new(Clock::Boot.now(), Wait::For(Duration::ZERO));
    let waiter = || TestWaiter::new("k", false);
    assert!(matches!(queues.enqueue(&KEY, &single, waiter()).unwrap().1, Enqueued::Head(_)));
    queues.record_answer(&[KEY], &LastAnswer::Held { expires_in: None });
    let over = queues.enqueue(&KEY, &single, waiter()).unwrap_err();
    assert_eq!(over.kind(), ErrorKind::Conflict);
}

#[test]
fn a_refused_waiter_keeps_its_rank_unless_it_is_cancelled() {
    let queues = with_permit_out(10);
    let later = TestWaiter::new("k", false);
    enqueued(&queues, &later);
    let entry = |waiter: &TestWaiter| QueueEntry {
        id: 1,
        since: Clock::Boot.now(),
        deadline: None,
        attempts: 1,
        wait_for: WaitFor::Lock(waiter.clone()),
    };
    let cancelled = TestWaiter::new("k", false);
    cancelled.is_cancelled.store(true, Ordering::SeqCst);
    queues.insert_at_rank(&KEY, entry(&cancelled));
    assert_eq!(queues.begin_request(&KEY).unwrap().successors, 0);
    let refused = TestWaiter::new("k", false);
    queues.insert_at_rank(&KEY, entry(&refused));
    let head = queues.begin_request(&KEY).unwrap();
    assert_eq!((head.id, head.successors), (1, 1));
    queues.close();
    queues.insert_at_rank(&KEY, entry(&TestWaiter { rejected: Arc::default(), ..refused.clone() }));
    assert_eq!(refused.rejected(), Some(ErrorKind::PoolClosed));
    assert_eq!(cancelled.rejected(), None);
}

#[test]
fn a_grant_goes_to_its_waiter_or_to_the_next_one_that_it_fits() {
    let queues = with_permit_out(10);
    let waiters = [false, true].map(|fencing| TestWaiter::new("k", fencing));
    let [first, second] = waiters.each_ref().map(|waiter| enqueued(&queues, waiter));
    queues.cancel(&KEY, first);
    let fits = |fencing: bool| move |spec: &LockSpec| spec.policy.fencing == fencing;
    assert!(queues.take_head(&KEY, first, fits(false)).is_none());
    assert_eq!(queues.take_head(&KEY, first, fits(true)).unwrap().id, second);
    assert!(queues.take_head(&KEY, second, fits(true)).is_none());
}

fn holder() -> Holder {
    Holder { lease: 7, owner: Owner::random().unwrap(), since: Clock::Boot.now() }
}

#[test]
fn a_hand_off_is_one_step_and_sees_contention() {
    let queues = with_permit_out(10);
    let (now, holder) = (Clock::Boot.now(), holder());
    let id = enqueued(&queues, &TestWaiter::new("k", false));
    assert!(
        queues
            .hand_off(&KEY, None, || now, |_, contended, _| contended.then_some((holder, ())))
            .is_none()
    );
    assert_eq!(queues.begin_request(&KEY).unwrap().id, id, "a refused hand-off changes nothing");
    assert_eq!(woken(&queues, KEY.as_str()), None);
    queues.mark_contended(KEY.as_str());
    let (entry, _, contended) =
        queues.hand_off(&KEY, None, || now, |_, contended, _| Some((holder, contended))).unwrap();
    assert_eq!((entry.id, contended), (id, true));
    assert_eq!(woken(&queues, KEY.as_str()), Some(holder.lease));
    assert!(queues.hand_off(&KEY, None, || now, |_, _, _| Some((holder, ()))).is_none());
}

#[test]
fn notifications_reach_the_owner_of_the_requests_and_the_holder() {
    let queues = with_permit_out(10);
    let (asking, holding) = (Owner::random().unwrap(), Owner::random().unwrap());
    let now = Clock::Boot.now();
    let wake = queues.request_as(&KEY, asking);
    assert!(!queues.promote(KEY.as_str(), &holding, now), "another owner token");
    assert_eq!(wake.take_due(), None);
    assert!(queues.promote(KEY.as_str(), &asking, now));
    assert_eq!((wake.take_due(), wake.take_due()), (Some(now), None));
    assert_eq!(woken(&queues, KEY.as_str()), None, "no holder");
    assert_eq!(wake.take_due(), Some(Instant::ORIGIN));
    let mut notified = pin!(wake.notified());
    assert!(notified.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    let holder = Holder { lease: 7, owner: holding, since: now };
    queues.set_holder(&[KEY], holder, Contention::None);
    assert_eq!(queues.holder(&KEY), None, "a lease that has passed its permit on");
    queues.request_as(&KEY, holding);
    queues.set_holder(&[KEY], holder, Contention::None);
    assert_eq!((woken(&queues, KEY.as_str()), held_by(queues.wake_all())), (Some(7), vec![7]));
    assert!(queues.promote(KEY.as_str(), &holding, now), "the holder keeps the lock");
    assert!(!queues.promote(KEY.as_str(), &asking, now), "its requests are over");
    queues.pass(&[KEY]);
    assert!(!queues.promote(KEY.as_str(), &holding, now) && queues.wake_all().is_empty());
}

/// A message of the store about one of its keys is for the lease, and a wait for one of them ends with a conflict.
#[test]
fn a_lease_of_several_keys_is_the_holder_of_each() {
    const OTHER: Key = Key::from_static("other");
    let queues = with_permit_out(10);
    assert_eq!(queues.take_free(&[OTHER]), [OTHER]);
    let now = Clock::Boot.now();
    queues.record_answer(&[KEY, OTHER], &LastAnswer::Pending(now));
    let holder = Holder { lease: 7, owner: Owner::random().unwrap(), since: now };
    queues.set_holder(&[KEY, OTHER], holder, Contention::None);
    for key in [&KEY, &OTHER] {
        assert!(queues.promote(key.as_str(), &holder.owner, now));
        assert_eq!(woken(&queues, key.as_str()), Some(7));
        let late = now + Duration::from_secs(60);
        assert_eq!(
            queues.wait_error(key, WaitEnd::Wait(Wait::Forever), late).kind(),
            ErrorKind::Conflict
        );
    }
    queues.pass(&[KEY, OTHER]);
    assert!(!queues.promote(OTHER.as_str(), &holder.owner, now) && queues.wake_all().is_empty());
}

#[test]
fn a_notification_is_kept_for_a_request_in_flight_but_not_for_a_held_lock() {
    let owner = Owner::random().unwrap();
    let in_flight = with_permit_out(10);
    assert_eq!(woken(&in_flight, KEY.as_str()), None, "no holder");
    assert_eq!(in_flight.request_as(&KEY, owner).take_due(), Some(Instant::ORIGIN));
    let held = with_permit_out(10);
    // Of the request that is granted.
    assert_eq!(woken(&held, KEY.as_str()), None);
    let holder = Holder { lease: 7, owner, since: Clock::Boot.now() };
    held.set_holder(&[KEY], holder, Contention::None);
    let ids = [(); 2].map(|()| enqueued(&held, &TestWaiter::new("k", false)));
    assert_eq!(woken(&held, KEY.as_str()), Some(7));
    held.cancel(&KEY, ids[0]);
    held.begin_release(&KEY, 7, None, holder.since, ExpectedHolders::default);
    assert_eq!(
        held.name_successor(&KEY, owner).take_due(),
        None,
        "its request is sent after the release"
    );
}

/// A release that goes on with the requests of the next waiter keeps the permit.
#[test]
fn a_lease_is_the_holder_until_its_release_is_over() {
    let queues = with_permit_out(10);
    let [former, next] = [(); 2].map(|()| Owner::random().unwrap());
    let now = Clock::Boot.now();
    queues.set_holder(&[KEY], Holder { lease: 7, owner: former, since: now }, Contention::None);
    assert_eq!((queues.holder(&KEY), woken(&queues, KEY.as_str())), (Some(7), Some(7)));
    queues.begin_release(&KEY, 7, None, now, ExpectedHolders::default);
    let wake = queues.name_successor(&KEY, next);
    assert_eq!(wake.take_due(), None);
    assert!(
        queues.promote(KEY.as_str(), &former, now),
        "a late message is no reason to release it"
    );
    assert_eq!((woken(&queues, KEY.as_str()), wake.take_due()), (Some(7), Some(Instant::ORIGIN)));
    assert!(Arc::ptr_eq(&wake, &queues.request_as(&KEY, next)));
    assert_eq!((queues.holder(&KEY), woken(&queues, KEY.as_str())), (None, None));
    assert!(!queues.promote(KEY.as_str(), &former, now));
}

#[test]
fn a_barging_window_is_due_after_its_interval() {
    let queues = with_permit_out(10);
    let now = Clock::Boot.now();
    let later = now + INTERVAL + INTERVAL;
    let plan = |at| queues.begin_release(&KEY, 7, Some(INTERVAL), at, ExpectedHolders::default);
    assert!(matches!(plan(now), AfterRelease::NoWaiter));
    let id = enqueued(&queues, &TestWaiter::new("k", false));
    assert!(matches!(plan(now), AfterRelease::Successor(_)));
    assert!(matches!(
        queues.begin_release(&KEY, 7, None, later, ExpectedHolders::default),
        AfterRelease::Successor(_)
    ));
    let hand_off =
        |at| queues.hand_off(&KEY, Some(INTERVAL), || at, |_, _, _| Some((holder(), ())));
    assert!(hand_off(later).is_none(), "a hand-off would not leave the lock free");
    assert!(matches!(plan(later), AfterRelease::BargingWindow));
    assert!(matches!(plan(later), AfterRelease::Successor(_)), "the window has begun");
    assert!(matches!(plan(later + INTERVAL), AfterRelease::BargingWindow));
    assert_eq!(hand_off(later + INTERVAL).unwrap().0.id, id);
    let other = Key::from_static("other");
    assert!(matches!(
        queues.begin_release(&other, 7, Some(INTERVAL), later, ExpectedHolders::default),
        AfterRelease::NoWaiter
    ));
}

const INTERVAL: Duration = Duration::from_secs(3_600);

#[test]
fn the_next_grant_is_expected_to_have_as_many_holders_as_the_last_one_unless_that_ran_out_of_fences()
 {
    let queues = with_permit_out(10);
    let now = Clock::Boot.now();
    let successors = || queues.begin_request(&KEY).unwrap().successors;
    for _ in 0..3 {
        enqueued(&queues, &TestWaiter::new("k", false));
    }
    assert_eq!(successors(), 2);
    use ExpectedHolders::{AtLeast, Exactly};
    for (holders, expected) in
        [(AtLeast(8), 7), (AtLeast(2), 2), (Exactly(2), 1), (Exactly(8), 7), (Exactly(0), 0)]
    {
        queues.begin_release(&KEY, 7, None, now, || holders);
        assert_eq!(successors(), expected, "after {holders:?}");
    }
}

#[test]
fn expired_waiters_are_rejected_with_the_last_answer() {
    let queues = with_permit_out(10);
    let waiters = [(); 3].map(|()| TestWaiter::new("k", false));
    for waiter in &waiters {
        enqueued(&queues, waiter);
    }
    let rejected = BackendError::new(FailureKind::Rejected, "planned");
    queues.record_answer(&[KEY], &LastAnswer::Failed(rejected));
    assert!(queues.last_failure().is_none(), "a rejection may be about this key alone");
    let now = Clock::Boot.now();
    let after = queues.reject_expired(&KEY, now, |in_front, _| in_front == 1);
    assert!(after.is_empty());
    let kinds = waiters.each_ref().map(TestWaiter::rejected);
    assert_eq!(kinds, [None, Some(ErrorKind::Backend), None]);
    let down = BackendError::new(FailureKind::NotApplied, "planned");
    queues.record_answer(&[KEY], &LastAnswer::Failed(down));
    assert!(queues.last_failure().is_some());
    let error = LockError::pool_closed();
    assert!(queues.reject_all(&[KEY], &error).is_empty() && queues.is_empty());
    let kinds = waiters.each_ref().map(TestWaiter::rejected);
    let closed = Some(ErrorKind::PoolClosed);
    assert_eq!(kinds, [closed, Some(ErrorKind::Backend), closed]);
}

fn far() -> Instant {
    Instant::NEVER
}

#[test]
fn several_permits_pass_on_in_order_of_arrival() {
    let queues = queues(10);
    let keys = [KEY, Key::from_static("other")];
    let enqueue =
        |key: &Key, name| queues.enqueue(key, &forever(), TestWaiter::new(name, false)).unwrap().1;
    for (key, name) in keys.iter().zip(["k", "other"]) {
        assert!(matches!(enqueue(key, name), Enqueued::Head(_)));
    }
    assert!(matches!(enqueue(&keys[1], "other"), Enqueued::Queued));
    assert!(matches!(enqueue(&keys[0], "k"), Enqueued::Queued));
    let after = queues.pass(&keys);
    let [AfterPass::Queue(first), AfterPass::Queue(second)] = &after[..] else {
        panic!("{after:?}");
    };
    assert_eq!((&first[0], &second[0]), (&keys[1], &keys[0]));
    assert!(!queues.is_empty());
    // One of them has a waiter, and the other has none.
    let head = queues.begin_request(&KEY).unwrap();
    assert!(queues.take_head(&KEY, head.id, |_| false).is_some());
    assert_eq!(next_queue(&queues.pass(&keys)), Some(&keys[1]));
    assert!(!queues.has_waiter(&KEY) && queues.has_waiter(&keys[1]));
}

#[test]
fn the_head_is_what_its_caller_asks_for_and_counts_its_requests() {
    let queues = with_permit_out(10);
    assert!(queues.begin_request(&KEY).is_none() && !queues.has_waiter(&KEY));
    let waiter = TestWaiter::new("k", true);
    let id = enqueued(&queues, &waiter);
    assert!(queues.has_waiter(&KEY));
    for _ in 0..2 {
        let head = queues.begin_request(&KEY).unwrap();
        assert!(Arc::ptr_eq(&head.spec, &waiter.spec));
    }
    assert_eq!(queues.take_head(&KEY, id, |_| false).unwrap().attempts, 2);
}

#[test]
fn the_next_request_is_sent_at_once_when_the_first_waiter_leaves() {
    let queues = with_permit_out(10);
    let wake = queues.request_as(&KEY, Owner::random().unwrap());
    let ids = [(); 3].map(|()| enqueued(&queues, &TestWaiter::new("k", false)));
    queues.cancel(&KEY, ids[1]);
    assert_eq!(wake.take_due(), None, "it was not the first");
    queues.cancel(&KEY, ids[0]);
    assert_eq!(wake.take_due(), Some(Instant::ORIGIN));
    assert_eq!(queues.begin_request(&KEY).unwrap().id, ids[2]);
}

#[test]
fn contention_is_known_from_the_grant_and_stays_until_the_next_owner() {
    let queues = with_permit_out(10);
    let owner = Owner::random().unwrap();
    let now = Clock::Boot.now();
    let holder = Holder { lease: 7, owner, since: now };
    let is_contended = || {
        enqueued(&queues, &TestWaiter::new("k", false));
        queues.hand_off(&KEY, None, || now, |_, contended, _| Some((holder, contended))).unwrap().2
    };
    for (answer, expected) in [
        (Contention::None, false),
        (Contention::of_answer(Some(false)), false),
        (Contention::of_answer(None), true),
        (Contention::of_answer(Some(true)), true),
        // A notification is newer than the answer.
        (Contention::None, true),
    ] {
        queues.set_holder(&[KEY], holder, answer);
        assert_eq!(is_contended(), expected, "{answer:?}");
    }
    queues.request_as(&KEY, owner);
    assert!(!is_contended());
}

#[test]
fn a_promotion_wakes_the_request_for_several_keys_that_has_the_token() {
    let queues = with_permit_out(10);
    let owners = [(); 2].map(|()| Owner::random().unwrap());
    let wakes = [(); 2].map(|()| Arc::<WakeSignal>::default());
    for (id, owner) in owners.iter().enumerate() {
        queues.register(&[KEY], id as u64, *owner, &wakes[id]);
    }
    let now = Clock::Boot.now();
    assert!(queues.promote(KEY.as_str(), &owners[1], now));
    assert_eq!(wakes.each_ref().map(|wake| wake.take_due()), [None, Some(now)]);
    assert!(!queues.promote(KEY.as_str(), &Owner::random().unwrap(), now));
    assert_eq!(wakes.each_ref().map(|wake| wake.take_due()), [None, None]);
}

#[test]
fn a_transferred_lock_has_another_holder_and_an_answer_ends_a_failure() {
    let (queues, holder) = (with_permit_out(10), holder());
    queues.set_holder(&[KEY], holder, Contention::None);
    queues.transfer_holder(&KEY, Holder { lease: holder.lease + 1, ..holder });
    assert_eq!(woken(&queues, KEY.as_str()), Some(holder.lease + 1));
    let down = BackendError::new(FailureKind::NotApplied, "planned");
    queues.record_answer(&[KEY], &LastAnswer::Failed(down));
    assert!(queues.last_failure().is_some());
    queues.clear_failure();
    assert!(queues.last_failure().is_none());
}

#[test]
fn the_last_failure_is_forgotten_when_the_store_answers() {
    let queues = with_permit_out(10);
    let down = || BackendError::new(FailureKind::NotApplied, "planned");
    let other = Key::from_static("other");
    let kind =
        |key: &Key| queues.wait_error(key, WaitEnd::Wait(Wait::Forever), Clock::Boot.now()).kind();
    queues.record_answer(&[KEY], &LastAnswer::Failed(down()));
    assert_eq!((kind(&KEY), kind(&other)), (ErrorKind::Backend, ErrorKind::Backend));
    queues.record_answer(&[KEY], &LastAnswer::None);
    assert!(queues.last_failure().is_some(), "no answer");
    queues.record_answer(&[KEY], &LastAnswer::Held { expires_in: None });
    assert!(queues.last_failure().is_none());
    assert_eq!((kind(&KEY), kind(&other)), (ErrorKind::Conflict, ErrorKind::Conflict));
    queues.record_answer(&[other], &LastAnswer::Failed(down()));
    let holder = holder();
    queues.set_holder(&[KEY], holder, Contention::None);
    assert!(queues.last_failure().is_none(), "a grant is an answer");
}

#[test]
fn a_wait_behind_a_release_ends_with_what_became_of_the_release() {
    let queues = with_permit_out(10);
    let error =
        || queues.wait_error(&KEY, WaitEnd::Wait(Wait::For(Duration::ZERO)), Clock::Boot.now());
    let expect = |kind, text: &str| {
        let error = error();
        assert_eq!(error.kind(), kind);
        assert!(error.to_string().contains(text), "{error}");
    };
    let plan = || queues.begin_release(&KEY, 7, None, Clock::Boot.now(), ExpectedHolders::default);
    for mark in [&|| queues.mark_releasing(&[KEY], 7), &|| drop(plan())] as [&dyn Fn(); 2] {
        queues.set_holder(&[KEY], holder(), Contention::None);
        expect(ErrorKind::Conflict, "another call or guard of this process");
        // Of a lease that has passed its permit on.
        queues.mark_releasing(&[KEY], 6);
        expect(ErrorKind::Conflict, "a guard that the caller itself holds counts");
        mark();
        expect(ErrorKind::Conflict, "this process is still releasing the lock");
        let down = BackendError::new(FailureKind::MaybeApplied, "planned");
        queues.record_answer(&[KEY], &LastAnswer::Failed(down));
        expect(ErrorKind::Backend, "planned");
        queues.pass(&[KEY]);
        assert_eq!(queues.take_free(&[KEY]), [KEY]);
    }
    // The next waiter sends a request when the release has passed the permit on.
    queues.set_holder(&[KEY], holder(), Contention::None);
    enqueued(&queues, &TestWaiter::new("k", false));
    queues.mark_releasing(&[KEY], 7);
    assert!(matches!(queues.pass(&[KEY])[..], [AfterPass::Queue(_)]));
    queues.clear_failure();
    expect(ErrorKind::Conflict, "this process is still requesting the lock");
    queues.record_answer(&[KEY], &LastAnswer::Held { expires_in: None });
    expect(ErrorKind::Conflict, "the lock is held by another owner");
}

/// A request for several keys is registered at each while its lease is held.
#[test]
fn the_lease_of_several_keys_that_are_released_is_no_waiter_for_them() {
    const OTHER: Key = Key::from_static("other");
    let (queues, holder) = (with_permit_out(10), holder());
    let keys = [KEY, OTHER];
    assert_eq!(queues.take_free(&[OTHER]), [OTHER]);
    queues.register(&keys, 1, holder.owner, &Arc::default());
    queues.set_holder(&keys, holder, Contention::None);
    assert!(!queues.are_being_released(&keys), "they are held");
    queues.mark_releasing(&keys, holder.lease);
    assert!(queues.are_being_released(&keys));
    queues.register(&[OTHER], 2, Owner::random().unwrap(), &Arc::default());
    assert!(!queues.are_being_released(&keys), "another request waits for one");
}

#[test]
fn a_holder_stays_known_when_the_queues_close() {
    let queues = with_permit_out(10);
    let holder = holder();
    queues.set_holder(&[KEY], holder, Contention::None);
    let waiter = TestWaiter::new("k", false);
    enqueued(&queues, &waiter);
    queues.close();
    assert_eq!(waiter.rejected(), Some(ErrorKind::PoolClosed));
    assert_eq!(held_by(queues.wake_all()), [7]);
    assert!(queues.pass(&[KEY]).is_empty() && queues.is_empty());
}

#[test]
fn a_wait_that_is_over_leaves_no_deadline() {
    let queues = with_permit_out(10);
    let params = WaitParams::new(Clock::Boot.now(), Wait::For(Duration::from_secs(3_600)));
    let enqueue = || queues.enqueue(&KEY, &params, TestWaiter::new("k", false)).unwrap().0;
    let ends: [&dyn Fn(u64); 5] = [
        &|id| queues.cancel(&KEY, id),
        &|id| drop(queues.take_head(&KEY, id, |_| false)),
        &|_| drop(queues.hand_off(&KEY, None, || params.since, |_, _, _| Some((holder(), ())))),
        &|_| drop(queues.reject_expired(&KEY, params.since, |_, _| true)),
        &|_| drop(queues.reject_all(&[KEY], &LockError::pool_closed())),
    ];
    for (n, end) in ends.into_iter().enumerate() {
        let id = enqueue();
        end(id);
        assert!(queues.deadlines.take_until(far()).is_empty(), "{n}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_rejected_at_its_deadline() {
    let clock = Clock::runtime();
    let queues = Arc::new(WaitQueues::new(10, clock));
    let second = Duration::from_secs(1);
    let params = |wait| WaitParams::new(clock.now(), wait);
    let waiters = [(); 4].map(|()| TestWaiter::new("k", false));
    let enqueue = |n: usize, wait| queues.enqueue(&KEY, &params(wait), waiters[n].clone()).unwrap();
    let waits = [Wait::Forever, Wait::For(second), Wait::For(second * 2), Wait::Forever];
    let ids: Vec<_> = waits.into_iter().enumerate().map(|(n, wait)| enqueue(n, wait).0).collect();
    queues.record_answer(&[KEY], &LastAnswer::Held { expires_in: None });
    let expiry = tokio::spawn(queues.clone().expire());
    let kinds = || waiters.each_ref().map(TestWaiter::rejected);
    let pass = async |time| {
        let over = tokio::time::timeout(time, std::future::pending::<()>()).await;
        assert!(over.is_err());
    };
    pass(second - Duration::from_millis(1)).await;
    assert_eq!(kinds(), [None; 4]);
    pass(Duration::from_millis(2)).await;
    let conflict = Some(ErrorKind::Conflict);
    assert_eq!(kinds(), [None, conflict, None, None]);
    // A waiter that was inserted at its rank has its deadline too.
    let entry = queues.take_head(&KEY, ids[2], |_| false).unwrap();
    queues.insert_at_rank(&KEY, entry);
    pass(second).await;
    assert_eq!(kinds(), [None, conflict, conflict, None]);
    assert_eq!(queues.begin_request(&KEY).unwrap().id, ids[3]);
    expiry.abort();
}

/// The lease of the lock that lingers in these tests.
const IDLE: u64 = 7;

/// Queues where a lease of this number holds the key.
fn held_queues() -> WaitQueues<TestWaiter> {
    let queues = with_permit_out(10);
    hold(&queues, &KEY, Contention::None);
    queues
}

fn hold(queues: &WaitQueues<TestWaiter>, key: &Key, contention: Contention) {
    let owner = Owner::random().unwrap();
    let holder = Holder { lease: IDLE, owner, since: Clock::Boot.now() };
    queues.set_holder(std::slice::from_ref(key), holder, contention);
}

/// The leases with a linger that is over now.
fn lingered(queues: &WaitQueues<TestWaiter>) -> Vec<u64> {
    let mut due = pin!(queues.lingered());
    match due.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(leases) => leases,
        Poll::Pending => Vec::new(),
    }
}

#[tokio::test]
async fn a_lock_lingers_until_the_next_request_of_the_process() {
    let queues = held_queues();
    let now = Clock::Boot.now();
    let later = now + Duration::from_secs(60);
    assert!(
        queues.may_linger(&KEY, true, None, now) && queues.begin_linger(&KEY, IDLE, true, later)
    );
    assert!(lingered(&queues).is_empty());
    // A single try too.
    let single = WaitParams::new(now, Wait::For(Duration::ZERO));
    let enqueued = queues.enqueue(&KEY, &single, TestWaiter::new("k", false)).unwrap().1;
    assert!(matches!(enqueued, Enqueued::Lingering(_, IDLE)), "{enqueued:?}");
    assert_eq!(queues.end_linger(&KEY), None, "it belongs to that request");
    let enqueued = queues.enqueue(&KEY, &single, TestWaiter::new("k", false));
    assert_eq!(enqueued.unwrap_err().kind(), ErrorKind::Conflict);
}

#[tokio::test]
async fn a_lock_does_not_linger_while_something_waits_for_it() {
    let now = Clock::Boot.now();
    let later = now + Duration::from_secs(60);
    let other = Key::from_static("other");
    let wake = Arc::default();
    let behind = |queues: &WaitQueues<TestWaiter>, kind: usize| match kind {
        0 => {
            enqueued(queues, &TestWaiter::new("k", false));
        }
        1 => queues.mark_contended(KEY.as_str()),
        2 => drop(queues.wake_all()),
        3 => queues.register(&[KEY], 70, Owner::random().unwrap(), &wake),
        _ => {
            let keys: Arc<[Key]> = Arc::from([KEY, other.clone()]);
            let params = WaitParams::new(now, Wait::Forever);
            let (reply, _) = oneshot::channel();
            let has = queues.enqueue_for_permits(80, &keys, &params, &wake, reply, false).unwrap();
            assert!(!has);
        }
    };
    for kind in 0..5 {
        // Before the linger begins.
        let queues = held_queues();
        behind(&queues, kind);
        assert!(!queues.may_linger(&KEY, true, None, now), "{kind}");
        assert!(!queues.begin_linger(&KEY, IDLE, true, later), "{kind}");
        // While it lasts. A request for only this key takes the lock itself.
        if kind > 0 {
            let queues = held_queues();
            assert!(queues.begin_linger(&KEY, IDLE, true, later));
            behind(&queues, kind);
            assert_eq!(lingered(&queues), [IDLE], "{kind}");
            assert_eq!(queues.end_linger(&KEY), None, "{kind}");
        }
    }
    let queues = held_queues();
    assert!(!queues.may_linger(&KEY, true, Some(Duration::ZERO), now), "a barging window is due");
    assert!(!queues.begin_linger(&KEY, IDLE + 1, true, later), "another lease holds it");
    hold(&queues, &KEY, Contention::Unknown);
    assert!(queues.may_linger(&KEY, true, None, now), "a store that says nothing may notify");
    assert!(
        !queues.may_linger(&KEY, false, None, now)
            && !queues.begin_linger(&KEY, IDLE, false, later)
    );
    assert!(queues.end_all_lingers().is_empty());
    assert!(
        !queues.may_linger(&KEY, true, None, now) && !queues.begin_linger(&KEY, IDLE, true, later)
    );
}

#[tokio::test]
async fn a_linger_that_ends_leaves_no_timer() {
    let queues = held_queues();
    let now = Clock::Boot.now();
    let later = now + Duration::from_secs(60);
    assert!(queues.begin_linger(&KEY, IDLE, true, now));
    assert_eq!(queues.end_linger(&KEY), Some(IDLE));
    assert!(lingered(&queues).is_empty());
    assert!(queues.begin_linger(&KEY, IDLE, true, now));
    let single = WaitParams::new(now, Wait::For(Duration::ZERO));
    let taken = queues.enqueue(&KEY, &single, TestWaiter::new("k", false)).unwrap().1;
    assert!(matches!(taken, Enqueued::Lingering(_, IDLE)), "{taken:?}");
    assert!(queues.begin_linger(&KEY, IDLE, true, later));
    assert!(lingered(&queues).is_empty());
    assert_eq!(queues.end_linger(&KEY), Some(IDLE));
    // Its lease was lost.
    assert!(queues.begin_linger(&KEY, IDLE, true, now));
    assert!(queues.pass(&[KEY]).is_empty());
    assert!(lingered(&queues).is_empty() && queues.end_all_lingers().is_empty());
}

#[tokio::test]
async fn locks_that_linger_until_the_same_moment_all_end() {
    let queues = queues(10);
    let keys = ["a", "b", "c"].map(Key::from_static);
    for key in &keys {
        queues.enqueue(key, &forever(), TestWaiter::new("k", false)).unwrap();
        hold(&queues, key, Contention::None);
    }
    let now = Clock::Boot.now();
    for key in &keys {
        assert!(queues.begin_linger(key, IDLE, true, now));
    }
    assert_eq!(lingered(&queues), [IDLE; 3]);
    assert!(keys.iter().all(|key| queues.end_linger(key).is_none()));
    for key in &keys {
        assert!(queues.begin_linger(key, IDLE, true, now + Duration::from_secs(60)));
    }
    assert_eq!((queues.end_all_lingers(), lingered(&queues)), (vec![IDLE; 3], Vec::new()));
}

/// With a search through all others it is 45 billion steps.
#[test]
fn waiters_leave_a_long_queue_in_any_order_without_a_search() {
    const WAITERS: usize = 300_000;
    let queues = with_permit_out(usize::MAX);
    let waiter = TestWaiter::new("k", false);
    let mut ids: Vec<_> = (0..WAITERS).map(|_| enqueued(&queues, &waiter)).collect();
    let began = Clock::Boot.now();
    // From the middle to both ends.
    let (front, back) = ids.split_at_mut(WAITERS / 2);
    front.reverse();
    for (one, other) in front.iter().zip(back.iter()) {
        queues.cancel(&KEY, *one);
        queues.cancel(&KEY, *other);
    }
    let took = Clock::Boot.now().since(began);
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert!(queues.begin_request(&KEY).is_none());
}
