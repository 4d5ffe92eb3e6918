//! What the listeners of a lease are told, and what is left of them.

use std::panic::Location;
use std::sync::atomic::AtomicUsize;
use std::task::{Wake, Waker};

use super::*;
use crate::base::call_site::LockLabel;
use crate::base::key::Key;
use crate::base::options::{Defaults, LockOptions};
use crate::base::policy::Policy;
use crate::lease::listener::Listener;
use crate::lease::renewal_action::RenewalAction;

mod phases;

/// How many times a task was woken. The lease has its waker for as long as there are more references than one.
#[derive(Debug, Default)]
struct Task(AtomicUsize);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Task {
    fn new() -> Arc<Self> {
        Arc::default()
    }

    fn woken(self: &Arc<Self>) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    fn is_kept(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1
    }

    fn poll(self: &Arc<Self>, listener: &mut Listener) -> Poll<Ending> {
        listener.poll(&Context::from_waker(&Waker::from(self.clone())))
    }
}

fn spec() -> LockSpec {
    let keys: Arc<[Key]> = [Key::from_static("k")].into();
    let label = LockLabel::Key(keys[0].clone(), Location::caller());
    LockSpec::new(label, keys, Policy::new(&LockOptions::new(), &Defaults::default()).unwrap(), "")
}

fn lease() -> Arc<Lease> {
    lease_with(1)
}

pub(crate) fn lease_with(id: u64) -> Arc<Lease> {
    let (spec, clock) = (Arc::new(spec()), Clock::Boot);
    let owner = Owner::random().unwrap();
    let grant = Grant::new(owner, None, &spec.policy, clock.now(), None, None);
    Arc::new(Lease::new(id, "pool".into(), spec, grant, HoldTimes::now(clock), clock))
}

/// The lease that a hand-off makes of `former`. It has the next number.
pub(crate) fn successor(former: &Lease) -> Arc<Lease> {
    let clock = Clock::Boot;
    let (grant, _) = former.transfer(&former.spec, clock.now()).unwrap();
    let (spec, times) = (former.spec.clone(), HoldTimes::now(clock));
    Arc::new(Lease::new(former.id + 1, "pool".into(), spec, grant, times, clock))
}

const LOST: Poll<Ending> = Poll::Ready(Ending::Lost(Loss::Taken));
const RELEASED: Poll<Ending> = Poll::Ready(Ending::Released);

#[test]
fn two_listeners_are_told_under_the_wakers_of_their_last_polls() {
    let lease = lease();
    let (mut one, mut two) = (Listener::new(&lease), Listener::new(&lease));
    let tasks: [_; 4] = std::array::from_fn(|_| Task::new());
    assert!(tasks[0].poll(&mut one).is_pending());
    assert!(tasks[1].poll(&mut two).is_pending());
    // Under the same waker once more, and from another task.
    assert!(tasks[0].poll(&mut one).is_pending());
    assert!(tasks[2].poll(&mut one).is_pending());
    assert!(tasks[3].poll(&mut two).is_pending());
    assert_eq!(tasks.each_ref().map(Task::is_kept), [false, false, true, true]);
    assert!(lease.lose(Loss::Taken));
    assert_eq!(tasks.each_ref().map(Task::woken), [0, 0, 1, 1]);
    assert_eq!(tasks.each_ref().map(Task::is_kept), [false; 4]);
    for _ in 0..2 {
        assert_eq!((tasks[2].poll(&mut one), tasks[3].poll(&mut two)), (LOST, LOST));
    }
}

#[test]
fn a_listener_that_is_dropped_is_forgotten_and_no_other_is() {
    let lease = lease();
    let tasks: Vec<_> = (0..1_000).map(|_| Task::new()).collect();
    let mut listeners: Vec<_> = tasks.iter().map(|_| Some(Listener::new(&lease))).collect();
    for (task, listener) in tasks.iter().zip(&mut listeners) {
        assert!(task.poll(listener.as_mut().unwrap()).is_pending());
    }
    // One that was never polled has left nothing.
    drop(Listener::new(&lease));
    // From both ends and from the middle.
    let leaves = |n: usize| !(100..900).contains(&n) || n.is_multiple_of(3);
    for n in (0..1_000).rev().filter(|n| leaves(*n)) {
        listeners[n] = None;
    }
    for (n, task) in tasks.iter().enumerate() {
        assert_eq!(task.is_kept(), !leaves(n), "{n}");
    }
    assert!(lease.lose(Loss::Expired));
    for (n, task) in tasks.iter().enumerate() {
        assert_eq!(task.woken(), usize::from(!leaves(n)), "{n}");
    }
}

#[test]
fn a_listener_of_an_ended_lease_is_told_at_once_and_leaves_nothing() {
    for (end, told) in [
        (Lease::begin_release as fn(&Lease) -> bool, RELEASED),
        (|lease: &Lease| lease.lose(Loss::Taken), LOST),
    ] {
        let (lease, task) = (lease(), Task::new());
        assert!(end(&lease));
        assert_eq!(task.poll(&mut Listener::new(&lease)), told);
        assert!(!task.is_kept());
    }
}

#[test]
fn a_release_ends_all_listeners() {
    let lease = lease();
    let tasks = [Task::new(), Task::new()];
    let mut listeners = tasks.each_ref().map(|_| Listener::new(&lease));
    for (task, listener) in tasks.iter().zip(&mut listeners) {
        assert!(task.poll(listener).is_pending());
    }
    assert!(lease.begin_release());
    assert!(!lease.begin_release(), "once");
    for (task, listener) in tasks.iter().zip(&mut listeners) {
        assert_eq!((task.woken(), task.is_kept(), task.poll(listener)), (1, false, RELEASED));
    }
}

#[test]
fn a_release_behind_a_renewal_that_is_on_its_way_ends_them_too() {
    let (lease, task) = (lease(), Task::new());
    let mut listener = Listener::new(&lease);
    assert!(task.poll(&mut listener).is_pending());
    let due = lease.due().unwrap();
    assert!(matches!(lease.poll_renewal(due), RenewalAction::Renew { .. }));
    assert!(lease.begin_release());
    assert_eq!((task.woken(), task.poll(&mut listener)), (1, RELEASED));
    lease.on_renewed(due, Duration::from_secs(1));
    assert_eq!(task.poll(&mut listener), RELEASED);
}

#[test]
fn a_loss_stays_one_when_the_holder_lets_go() {
    let (lease, task) = (lease(), Task::new());
    let mut listener = Listener::new(&lease);
    assert!(task.poll(&mut listener).is_pending());
    assert!(lease.lose(Loss::Taken));
    assert!(lease.begin_release());
    assert_eq!((task.woken(), task.poll(&mut listener)), (1, LOST));
    // A released lease cannot be lost.
    let lease = self::lease();
    assert!(lease.begin_release() && !lease.lose(Loss::Taken));
    assert_eq!(task.poll(&mut Listener::new(&lease)), RELEASED);
}

#[test]
fn a_lease_that_is_handed_on_ends_its_listeners() {
    let (lease, task) = (lease(), Task::new());
    let mut listener = Listener::new(&lease);
    assert!(task.poll(&mut listener).is_pending());
    let (_, listeners) =
        lease.transfer(&spec(), Clock::Boot.now()).expect("the next requests for the same");
    assert_eq!(task.woken(), 0, "not yet: the queue is locked");
    listeners.wake();
    assert_eq!((task.woken(), task.is_kept(), task.poll(&mut listener)), (1, false, RELEASED));
}

/// The waker of a task may be the only reference to it, and to a listener with it.
#[test]
fn a_waker_that_drops_a_listener_is_dropped_in_peace() {
    struct Owns(#[allow(dead_code)] Mutex<Option<Listener>>);

    impl Wake for Owns {
        fn wake(self: Arc<Self>) {}
    }

    let (lease, task) = (lease(), Task::new());
    let inside = || {
        let mut inside = Listener::new(&lease);
        assert!(task.poll(&mut inside).is_pending());
        Waker::from(Arc::new(Owns(Mutex::new(Some(inside)))))
    };
    let mut listener = Listener::new(&lease);
    assert!(listener.poll(&Context::from_waker(&inside())).is_pending());
    assert!(task.is_kept());
    // Replaced, forgotten, woken.
    assert!(listener.poll(&Context::from_waker(Waker::noop())).is_pending());
    assert!(!task.is_kept());
    assert!(listener.poll(&Context::from_waker(&inside())).is_pending());
    drop(listener);
    assert!(!task.is_kept());
    let mut listener = Listener::new(&lease);
    assert!(listener.poll(&Context::from_waker(&inside())).is_pending());
    assert!(lease.lose(Loss::Taken));
    assert!(!task.is_kept());
}
