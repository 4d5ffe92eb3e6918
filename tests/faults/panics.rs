//! A panic or a blocking call in foreign code affects one request or event of a pool, and no renewal and no wait.

#![allow(clippy::disallowed_methods)]

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, FailureKind, LeaseRef, LeaseStatus,
    ReleaseOutcome, ReleaseRequest, Warning,
};
use lock_runtime::testing::{Fault, FaultyBackend, Operation, open_backend};
use lock_runtime::{ErrorKind, LockPool, Wait};
use lock_tests::eventually_async;
use lock_tests::logs::OnEvent;
use lock_tests::prelude::*;
use tokio::runtime::Builder;
use tokio::time::sleep;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};

const TTL: Duration = Duration::from_secs(30);

/// The limit of effects that come soon, on a busy machine.
const SOON: Duration = Duration::from_secs(10);

/// The panic hook would fill the output of the tests.
fn silence_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let text = info.payload().downcast_ref::<&str>().copied();
            let text = text.or_else(|| info.payload().downcast_ref::<String>().map(String::as_str));
            let text = text.unwrap_or_default();
            if !text.starts_with("planned") {
                hook(info);
            }
        }));
    });
}

mod overflow {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_longest_durations_that_are_taken_overflow_nothing() {
        let (backend, faults) = FaultyBackend::new(open_backend("memory://").await.unwrap());
        let pool = LockPool::with_backend(backend).ttl(TTL).on_current_runtime();
        let pool = pool
            .request_timeout(60 * ms(60_000))
            .local_handoff_limit(TTL)
            .barging_window(Duration::MAX, TTL)
            .wait(Duration::MAX);
        let pool = pool.connect().await.unwrap();
        let guard = pool.lock("k").max_hold(Duration::MAX).acquire().await.unwrap();
        sleep(3 * TTL).await;
        assert!(guard.is_held(), "renewed");
        assert!(faults.count(Operation::Renew) >= 3);
        let waits = tokio::spawn(pool.lock("k").wait(Wait::Forever).acquire());
        sleep(TTL).await;
        guard.release().await.unwrap();
        waits.await.unwrap().unwrap().release().await.unwrap();
        pool.shutdown(Duration::MAX).await;
    }
}

mod subscriber {
    use super::*;

    /// Runs `test` in a process of its own: a process has one event thread.
    fn alone<F: Future<Output = ()>>(name: &str, is_paused: bool, test: impl FnOnce() -> F) {
        let name = format!("{}::{name}", module_path!());
        lock_tests::in_own_process(&name, || {
            let mut runtime = Builder::new_current_thread();
            runtime.enable_all().start_paused(is_paused).build().unwrap().block_on(test());
        });
    }

    #[test]
    fn its_panic_ends_one_event_and_the_next_one_says_how_many() {
        alone("its_panic_ends_one_event_and_the_next_one_says_how_many", true, async || {
            silence_panics();
            let seen = Arc::<Seen>::default();
            let _default = tracing::subscriber::set_default(planned(seen.clone()));
            let (pool, faults) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
            *seen.trouble.lock().unwrap() = Trouble::Panics;
            let guard = pool.lock("k").acquire().await.unwrap();
            faults.plan(Operation::Renew, Fault::Fail(FailureKind::NotApplied));
            sleep(3 * TTL).await;
            assert!(guard.is_held(), "renewed");
            assert!(faults.count(Operation::Renew) >= 4);
            let count = || seen.events.load(Ordering::SeqCst);
            // Real time, as the events' thread has no other.
            // When the sixth has come, five have panicked.
            eventually_blocking("events of each kind panic", || count() >= 6);
            *seen.trouble.lock().unwrap() = Trouble::None;
            guard.release().await.unwrap();
            eventually_blocking("the number of dropped events is reported", || {
                seen.dropped.lock().unwrap().is_some()
            });
            assert!(seen.dropped.lock().unwrap().unwrap() >= 5);
        });
    }

    #[test]
    fn while_it_blocks_leases_are_renewed() {
        alone("while_it_blocks_leases_are_renewed", false, async || {
            let seen = Arc::<Seen>::default();
            let _default = tracing::subscriber::set_default(planned(seen.clone()));
            let (pool, faults) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
            *seen.trouble.lock().unwrap() = Trouble::Blocks;
            // If this thread emitted the events, the test would otherwise not end.
            let opener = seen.clone();
            thread::spawn(move || {
                thread::sleep(SOON);
                opener.open();
            });
            let guard = pool.lock("k").ttl(ms(3000)).acquire().await.unwrap();
            let renewed = async || faults.count(Operation::Renew) >= 3;
            eventually_async(SOON, "it is renewed three times", renewed).await;
            assert!(guard.is_held());
            assert_eq!(*seen.trouble.lock().unwrap(), Trouble::Blocks, "it still blocks");
            assert_eq!(seen.events.load(Ordering::SeqCst), 1, "and nothing has come behind");
            seen.open();
            guard.release().await.unwrap();
        });
    }

    /// The events of one lease come in the order in which they happened, also from several threads.
    #[test]
    fn a_shutdown_waits_until_it_has_received_all_events() {
        alone("a_shutdown_waits_until_it_has_received_all_events", false, async || {
            let seen = Arc::<Seen>::default();
            let _default = tracing::subscriber::set_default(planned(seen.clone()));
            let pool = LockPool::builder("memory://").request_timeout(SOON).on_current_runtime();
            let pool = pool.connect().await.unwrap();
            for _ in 0..20 {
                pool.lock("k").acquire().await.unwrap().release().await.unwrap();
            }
            pool.shutdown(SOON).await;
            let messages = seen.messages.lock().unwrap().clone();
            assert_eq!(messages, ["acquired", "released"].repeat(20));
        });
    }

    fn eventually_blocking(what: &str, condition: impl FnMut() -> bool) {
        lock_tests::eventually(SOON, what, condition);
    }

    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    enum Trouble {
        #[default]
        None,
        Panics,
        Blocks,
    }

    #[derive(Default)]
    struct Seen {
        trouble: Mutex<Trouble>,
        opened: Condvar,
        /// How many events it received.
        events: AtomicUsize,
        messages: Mutex<Vec<String>>,
        dropped: Mutex<Option<u64>>,
    }

    impl Seen {
        fn open(&self) {
            *self.trouble.lock().unwrap() = Trouble::None;
            self.opened.notify_all();
        }
    }

    /// Fails or blocks as planned at each event of the pool.
    fn planned(seen: Arc<Seen>) -> impl Subscriber + Send + Sync {
        OnEvent(move |event: &Event<'_>| {
            seen.events.fetch_add(1, Ordering::SeqCst);
            let trouble = seen.trouble.lock().unwrap();
            match *trouble {
                Trouble::None => {}
                Trouble::Panics => {
                    drop(trouble);
                    panic!("planned in an event");
                }
                Trouble::Blocks => {
                    let blocks = |trouble: &mut Trouble| *trouble == Trouble::Blocks;
                    drop(seen.opened.wait_while(trouble, blocks).unwrap());
                }
            }
            event.record(&mut Fields(&seen));
        })
    }

    struct Fields<'a>(&'a Seen);

    impl Visit for Fields<'_> {
        fn record_u64(&mut self, field: &Field, value: u64) {
            if field.name() == "dropped" {
                *self.0.dropped.lock().unwrap() = Some(value);
            }
        }

        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            if field.name() == "message" {
                self.0.messages.lock().unwrap().push(format!("{value:?}"));
            }
        }
    }
}

mod store {
    use super::*;

    /// A store with a bug.
    struct Buggy<B> {
        inner: B,
        /// How many more renewals panic.
        renewals: Arc<AtomicUsize>,
    }

    impl<B: Backend> Backend for Buggy<B> {
        async fn acquire(
            &self,
            claims: &[AcquireRequest],
        ) -> Vec<Result<AcquireOutcome, BackendError>> {
            assert!(!claims[0].keys[0].as_str().starts_with("bad"), "planned in an acquire");
            self.inner.acquire(claims).await
        }

        async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
            let left = |left: usize| left.checked_sub(1);
            let panics = self.renewals.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left);
            assert!(panics.is_err(), "planned in a renewal");
            self.inner.renew(leases).await
        }

        async fn release(
            &self,
            releases: &[ReleaseRequest],
        ) -> Vec<Result<ReleaseOutcome, BackendError>> {
            self.inner.release(releases).await
        }

        async fn is_held(&self, _: &LeaseRef) -> Result<LeaseStatus, BackendError> {
            panic!("planned in a look")
        }

        async fn health(&self) -> Result<Vec<Warning>, BackendError> {
            panic!("planned in a survey")
        }
    }

    async fn buggy() -> (LockPool, Arc<AtomicUsize>) {
        silence_panics();
        let renewals = Arc::<AtomicUsize>::default();
        let backend =
            Buggy { inner: open_backend("memory://").await.unwrap(), renewals: renewals.clone() };
        let pool = LockPool::with_backend(backend).ttl(TTL).on_current_runtime();
        (pool.connect().await.unwrap(), renewals)
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_in_a_renewal_is_a_renewal_that_failed() {
        let (pool, renewals) = buggy().await;
        let (one, other) = (pool.lock("one"), pool.lock("other"));
        let (one, other) = (one.acquire().await.unwrap(), other.acquire().await.unwrap());
        renewals.store(2, Ordering::SeqCst);
        sleep(3 * TTL).await;
        assert!(one.is_held() && other.is_held(), "tried again in time");
        assert_eq!(renewals.load(Ordering::SeqCst), 0);

        renewals.store(usize::MAX, Ordering::SeqCst);
        let lost = one.lost().await;
        assert_eq!(lost.kind(), ErrorKind::Lost);
        assert!(lost.to_string().contains("planned in a renewal"), "{lost}");
        assert!(other.lost().await.is_lost());
        renewals.store(0, Ordering::SeqCst);
        let later = pool.lock("later").acquire().await.unwrap();
        sleep(3 * TTL).await;
        assert!(later.is_held(), "later leases are renewed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_in_another_request_is_its_failure() {
        let (pool, _) = buggy().await;
        let error = pool.lock("bad").acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend);
        assert!(error.to_string().contains("planned in an acquire"), "{error}");
        let error = pool.health().await.unwrap_err();
        assert!(error.to_string().contains("planned in a survey"), "{error}");
        let guard = pool.lock("k").acquire().await.unwrap();
        let error = guard.verify().await.unwrap_err();
        assert!(error.to_string().contains("planned in a look"), "{error}");
        guard.release().await.unwrap();
    }
}

mod waker {
    use super::*;

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("planned in a waker");
        }
    }

    /// Polls like an executor with a bug.
    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(&Waker::from(Arc::new(Panics))))
    }

    #[tokio::test(start_paused = true)]
    async fn its_panic_at_a_loss_costs_no_other_lease_its_renewal() {
        silence_panics();
        let (pool, faults) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
        let short = pool.lock("short").max_hold(ms(1000)).acquire().await.unwrap();
        let guard = pool.lock("k").acquire().await.unwrap();
        let mut lost = pin!(short.lost());
        assert!(poll(lost.as_mut()).is_pending());
        sleep(3 * TTL).await;
        assert!(short.lost().await.is_lost());
        assert!(guard.is_held(), "renewed");
        assert!(faults.count(Operation::Renew) >= 3);
    }

    #[tokio::test(start_paused = true)]
    async fn its_panic_at_the_end_of_a_wait_ends_no_other_wait() {
        silence_panics();
        let (pool, _) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
        let guard = pool.lock("k").acquire().await.unwrap();
        let mut waits = pin!(pool.lock("k").wait(ms(1000)).acquire());
        assert!(poll(waits.as_mut()).is_pending());
        let other = pool.lock("k").wait(ms(5000)).acquire();
        let error = tokio::time::timeout(ms(6000), other).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(matches!(poll(waits.as_mut()), Poll::Ready(Err(_))), "it has its answer");
        guard.release().await.unwrap();
    }

    /// One call to the store answers all of these.
    #[tokio::test(start_paused = true)]
    async fn its_panic_at_an_answer_affects_no_other_caller() {
        silence_panics();
        let (pool, faults) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
        // While this one is in flight the others gather.
        faults.plan(Operation::Acquire, Fault::DelayReply(ms(100)));
        let mut first = pin!(pool.lock("first").acquire());
        let mut bad = pin!(pool.lock("bad").acquire());
        assert!(poll(first.as_mut()).is_pending());
        assert!(poll(bad.as_mut()).is_pending());
        let good = pool.lock("good").acquire().await.unwrap();
        assert_eq!(faults.count(Operation::Acquire), 2, "the last two went together");
        sleep(ms(200)).await;
        let Poll::Ready(bad) = poll(bad.as_mut()) else { panic!("it was answered") };
        let Poll::Ready(first) = poll(first.as_mut()) else { panic!("it was answered") };
        for guard in [good, bad.unwrap(), first.unwrap()] {
            guard.release().await.unwrap();
        }
    }
}
