use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};

use tokio::sync::oneshot;

use super::*;
use crate::base::clock::Clock;
use crate::base::error::ErrorKind;
use crate::base::options::Wait;
use crate::queue::wait_queue::Enqueued;
use crate::queue::wait_queue::tests::TestWaiter;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn queues() -> WaitQueues<TestWaiter> {
    WaitQueues::new(10, Clock::runtime())
}

async fn after(time: Duration) {
    tokio::time::advance(time).await;
}

fn keys(names: &[&'static str]) -> Arc<[Key]> {
    names.iter().map(|name| Key::from_static(name)).collect()
}

fn key(name: &'static str) -> Key {
    Key::from_static(name)
}

/// A request for one key: its rank, and whether it has the permit immediately.
fn lock(queues: &WaitQueues<TestWaiter>, name: &'static str) -> (u64, bool) {
    let params = WaitParams::new(queues.clock.now(), Wait::Forever);
    let waiter = TestWaiter::new(name, false);
    let (id, position) = queues.enqueue(&key(name), &params, waiter).unwrap();
    (id, matches!(position, Enqueued::Head(_)))
}

/// The permits of these keys go out, one by one.
fn take_each(queues: &WaitQueues<TestWaiter>, names: &[&'static str]) {
    for name in names {
        assert!(lock(queues, name).1, "{name}");
    }
}

/// A request for several keys: whether it has the permits immediately.
fn request(
    queues: &WaitQueues<TestWaiter>,
    id: u64,
    names: &[&'static str],
    wait: Wait,
    again: bool,
) -> Result<bool, LockError> {
    let params = WaitParams::new(queues.clock.now(), wait);
    let (reply, _) = oneshot::channel();
    let keys = keys(names);
    queues.enqueue_for_permits(id, &keys, &params, &Arc::default(), reply, again)
}

/// The rank of a request for several keys that has to wait.
fn waiting(queues: &WaitQueues<TestWaiter>, names: &[&'static str]) -> u64 {
    let id = queues.rank();
    assert!(!request(queues, id, names, Wait::Forever, false).unwrap(), "{names:?}");
    id
}

fn described(after: Vec<AfterPass>) -> Vec<String> {
    let described = |next: AfterPass| {
        let (kind, keys) = match &next {
            AfterPass::Queue(keys) => ("lock", keys),
            AfterPass::Permits(keys, _) => ("permits", keys),
        };
        keys.iter().fold(kind.to_owned(), |text, key| text + " " + key.as_str())
    };
    after.into_iter().map(described).collect()
}

/// The permits are dropped. Returns what follows.
fn pass(queues: &WaitQueues<TestWaiter>, names: &[&'static str]) -> Vec<String> {
    described(queues.pass(&keys(names)))
}

const NOTHING: [&str; 0] = [];

#[tokio::test(start_paused = true)]
async fn the_permits_of_several_keys_go_out_in_one_step() {
    let queues = queues();
    assert!(request(&queues, queues.rank(), &["a", "b"], Wait::Forever, false).unwrap());
    assert!(!lock(&queues, "a").1 && !lock(&queues, "b").1);
    assert_eq!(pass(&queues, &["a", "b"]), ["lock a", "lock b"]);
}

#[tokio::test(start_paused = true)]
async fn a_request_keeps_no_key_from_others_while_it_waits_for_another() {
    let queues = queues();
    take_each(&queues, &["b"]);
    waiting(&queues, &["a", "b"]);
    take_each(&queues, &["a"]);
    assert_eq!(pass(&queues, &["b"]), NOTHING);
    take_each(&queues, &["b"]);
    assert_eq!(pass(&queues, &["a"]), NOTHING);
    assert_eq!(pass(&queues, &["b"]), ["permits a b"]);
    assert!(!lock(&queues, "a").1 && !lock(&queues, "b").1);
}

#[tokio::test(start_paused = true)]
async fn ranks_are_in_order_of_arrival() {
    let queues = queues();
    let ranks = [(); 3].map(|()| queues.rank());
    assert!(ranks.windows(2).all(|pair| pair[0] < pair[1]), "{ranks:?}");
    assert!(lock(&queues, "a").0 > ranks[2]);
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_is_over_is_refused_and_one_with_time_left_is_not() {
    let queues = queues();
    take_each(&queues, &["a"]);
    let enqueue = |wait| request(&queues, queues.rank(), &["a", "b"], wait, false);
    let over = enqueue(Wait::For(Duration::ZERO)).unwrap_err();
    assert_eq!(over.kind(), ErrorKind::Conflict);
    assert!(!enqueue(Wait::For(ms(1))).unwrap());
}

#[tokio::test(start_paused = true)]
async fn max_waiters_counts_but_for_a_request_that_had_its_permits() {
    let queues = WaitQueues::new(1, Clock::runtime());
    take_each(&queues, &["a"]);
    assert!(!lock(&queues, "a").1);
    let enqueue = |again| request(&queues, queues.rank(), &["a", "b"], Wait::Forever, again);
    assert_eq!(enqueue(false).unwrap_err().kind(), ErrorKind::QueueFull);
    assert!(!enqueue(true).unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_key_is_reserved_after_ten_milliseconds_and_for_longer_each_time() {
    let queues = queues();
    take_each(&queues, &["a", "b"]);
    let id = waiting(&queues, &["a", "b"]);
    after(ms(9)).await;
    assert_eq!(pass(&queues, &["a"]), NOTHING);
    take_each(&queues, &["a"]);
    assert_eq!(queues.reservation_ends_at(id), None, "too early");
    assert_eq!(described(queues.end_reservation(id)), NOTHING);
    after(ms(1)).await;
    for (free, other, lasts) in [("b", "a", 50), ("a", "b", 100), ("b", "a", 200)] {
        let now = queues.clock.now();
        assert_eq!(pass(&queues, &[free]), NOTHING);
        assert_eq!(queues.reservation_ends_at(id), Some(now + ms(lasts)));
        let (later, has_it) = lock(&queues, free);
        assert!(!has_it, "{free} is reserved");
        after(ms(lasts)).await;
        assert_eq!(described(queues.end_reservation(id)), [format!("lock {free}")]);
        assert_eq!(queues.reservation_ends_at(id), None);
        assert!(queues.take_head(&key(free), later, |_| false).is_some());
        // Stays unreserved for as long as it was reserved.
        after(ms(lasts) - ms(1)).await;
        assert_eq!(pass(&queues, &[other]), NOTHING);
        take_each(&queues, &[other]);
        assert_eq!(queues.reservation_ends_at(id), None);
        assert_eq!(pass(&queues, &[free]), NOTHING);
        take_each(&queues, &[free]);
        after(ms(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_reservation_wakes_its_request() {
    let (queues, wake) = (queues(), Arc::<WakeSignal>::default());
    take_each(&queues, &["a", "b"]);
    let params = WaitParams::new(queues.clock.now(), Wait::Forever);
    let (reply, _) = oneshot::channel();
    let (id, keys) = (queues.rank(), keys(&["a", "b"]));
    assert!(!queues.enqueue_for_permits(id, &keys, &params, &wake, reply, false).unwrap());
    after(ms(10)).await;
    let is_woken = || {
        let mut notified = pin!(wake.notified());
        notified.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
    };
    assert!(!is_woken());
    assert_eq!(pass(&queues, &["a"]), NOTHING);
    assert!(is_woken());
}

/// Three requests: `first` for a, c and d has a and c reserved, and waits for d. `second` for b and c has b reserved, and
/// waits for c.
async fn two_reservations(queues: &WaitQueues<TestWaiter>) -> [u64; 2] {
    take_each(queues, &["a", "b", "c", "d"]);
    let requests = [waiting(queues, &["a", "c", "d"]), waiting(queues, &["b", "c"])];
    after(ms(10)).await;
    for name in ["a", "c", "b"] {
        assert_eq!(pass(queues, &[name]), NOTHING);
    }
    assert!(requests.iter().all(|id| queues.reservation_ends_at(*id).is_some()));
    requests
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_reserved_is_for_its_request_and_then_for_the_next() {
    let queues = queues();
    two_reservations(&queues).await;
    assert_eq!(pass(&queues, &["d"]), ["permits a c d"]);
    assert_eq!(pass(&queues, &["a", "c", "d"]), ["permits b c"]);
    assert_eq!(pass(&queues, &["b", "c"]), NOTHING);
    assert!(queues.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_later_rank_takes_no_reservation_over() {
    let queues = queues();
    let [first, second] = two_reservations(&queues).await;
    assert_eq!(described(queues.end_reservation(second)), NOTHING);
    take_each(&queues, &["b"]);
    assert_eq!(described(queues.end_reservation(first)), NOTHING);
    take_each(&queues, &["a"]);
    assert_eq!(pass(&queues, &["b"]), ["permits b c"]);
}

#[tokio::test(start_paused = true)]
async fn an_earlier_rank_takes_a_key_that_is_reserved_for_a_later_one() {
    let queues = queues();
    let early = queues.rank();
    two_reservations(&queues).await;
    assert!(request(&queues, early, &["b", "c"], Wait::Forever, false).unwrap());
    assert_eq!(pass(&queues, &["d"]), NOTHING, "c is missing");
    assert_eq!(pass(&queues, &["b", "c"]), ["permits a c d"]);
}

#[tokio::test(start_paused = true)]
async fn a_key_that_was_reserved_is_not_reserved_again_for_as_long() {
    for (passed, is_reserved) in [(49, false), (50, true)] {
        let queues = queues();
        take_each(&queues, &["a", "b"]);
        let first = waiting(&queues, &["a", "b"]);
        after(ms(10)).await;
        assert_eq!(pass(&queues, &["a"]), NOTHING);
        let (later, has_it) = lock(&queues, "a");
        assert!(!has_it);
        after(ms(50)).await;
        assert_eq!(described(queues.end_reservation(first)), ["lock a"]);
        assert!(queues.take_head(&key("a"), later, |_| false).is_some());
        assert_eq!(described(queues.cancel_permits_wait(first)), NOTHING);
        // Nor for another request.
        take_each(&queues, &["d"]);
        let second = waiting(&queues, &["a", "d"]);
        after(ms(passed)).await;
        assert_eq!(pass(&queues, &["a"]), NOTHING);
        assert_eq!(queues.reservation_ends_at(second).is_some(), is_reserved, "{passed}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_gives_up_leaves_its_keys_to_the_next() {
    let queues = queues();
    take_each(&queues, &["a", "b"]);
    let id = waiting(&queues, &["a", "b"]);
    after(ms(10)).await;
    assert_eq!(pass(&queues, &["a"]), NOTHING);
    assert!(!lock(&queues, "a").1, "reserved");
    assert_eq!(described(queues.cancel_permits_wait(id)), ["lock a"]);
    assert_eq!(described(queues.cancel_permits_wait(id)), NOTHING);
    assert_eq!(pass(&queues, &["b"]), NOTHING);
}

/// The first request waits for `b` and has reserved `c`, which the second one waits for.
#[tokio::test(start_paused = true)]
async fn a_request_that_moves_to_a_key_whose_waiters_are_rejected_has_it_next() {
    let queues = queues();
    take_each(&queues, &["c"]);
    after(ms(1)).await;
    take_each(&queues, &["b"]);
    waiting(&queues, &["b", "c"]);
    waiting(&queues, &["b", "c"]);
    after(ms(10)).await;
    assert_eq!(pass(&queues, &["c"]), NOTHING);
    let next = queues.reject_all(&keys(&["b"]), &LockError::pool_closed());
    assert_eq!(described(next), ["permits b c"]);
}

#[tokio::test(start_paused = true)]
async fn free_permits_are_taken_and_no_others() {
    let queues = queues();
    take_each(&queues, &["a"]);
    // A queue without a permit out.
    queues.register(&keys(&["b"]), queues.rank(), Owner::random().unwrap(), &Arc::default());
    assert_eq!(queues.take_free(&keys(&["a", "b", "c"])), [key("b"), key("c")]);
    assert!(queues.take_free(&keys(&["a", "b", "c"])).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_registered_key_is_open_until_its_registration_ends() {
    let queues = Arc::new(queues());
    let keys = keys(&["a", "b"]);
    let owners = [(); 2].map(|()| Owner::random().unwrap());
    let [one, two] = owners.map(|owner| {
        let id = queues.rank();
        queues.register(&keys, id, owner, &Arc::default());
        Registration { queues: queues.clone(), keys: keys.clone(), id }
    });
    take_each(&queues, &["a"]);
    assert_eq!(pass(&queues, &["a"]), NOTHING);
    let now = queues.clock.now();
    let is_known = || owners.map(|owner| queues.promote("b", &owner, now));
    assert_eq!(is_known(), [true, true]);
    drop(one);
    assert_eq!(is_known(), [false, true]);
    drop(two);
    assert!(queues.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_key_is_contended_by_other_processes_until_it_is_released_and_by_waiters() {
    let queues = queues();
    let keys = keys(&["a", "b"]);
    let ids = [queues.rank(), queues.rank()];
    for id in ids {
        queues.register(&keys, id, Owner::random().unwrap(), &Arc::default());
    }
    let unregistered = queues.rank();
    let contended =
        || [ids[0], ids[1], unregistered].map(|id| queues.is_contended(keys.iter(), id));
    assert_eq!(contended(), [false; 3]);
    queues.mark_contended("b");
    assert_eq!(contended(), [true, true, false]);
    queues.clear_contended(keys.iter(), ids[0]);
    assert_eq!(contended(), [false, true, false]);
    take_each(&queues, &["a"]);
    assert_eq!(contended(), [false, true, false]);
    lock(&queues, "a");
    assert_eq!(contended(), [true; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_for_the_lock_is_first_also_behind_a_request_for_several_keys() {
    let queues = queues();
    take_each(&queues, &["a"]);
    let wake = queues.request_as(&key("a"), Owner::random().unwrap());
    waiting(&queues, &["a", "b"]);
    let (id, _) = lock(&queues, "a");
    queues.cancel(&key("a"), id);
    assert_eq!(wake.take_due(), Some(Instant::ORIGIN));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_does_not_answer_is_the_reason_only_where_it_was_asked() {
    let queues = queues();
    take_each(&queues, &["a"]);
    assert!(request(&queues, queues.rank(), &["b", "c"], Wait::Forever, false).unwrap());
    let kind = |name| {
        queues.wait_error(&key(name), WaitEnd::Wait(Wait::Forever), queues.clock.now()).kind()
    };
    after(ms(249)).await;
    assert_eq!(["a", "b", "c"].map(kind), [ErrorKind::Conflict; 3]);
    after(ms(1)).await;
    let expected = [ErrorKind::Backend, ErrorKind::Conflict, ErrorKind::Conflict];
    assert_eq!(["a", "b", "c"].map(kind), expected);
}
