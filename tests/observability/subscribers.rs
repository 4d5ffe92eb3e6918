//! Subscribers and recorders that block, that panic, and that belong to one thread.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use lock_runtime::{LockError, LockPool, distributed_lock};
use lock_tests::prelude::*;
use lock_tests::runtimes::current_thread;
use lock_tests::{eventually_async, in_own_process};
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Instrument, Level, Subscriber, info, info_span};
use tracing_subscriber::filter::{LevelFilter, filter_fn};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use crate::metered::{KeepAll, Recorded};
use crate::seen::{all_events, all_spans, block, blocked_in_an_event, watch};

macro_rules! in_own_process {
    ($name:ident, $body:expr) => {
        in_own_process(concat!(module_path!(), "::", stringify!($name)), || {
            current_thread().block_on($body);
        })
    };
}

#[distributed_lock(key = "order:<id>", pool = pool)]
async fn settle(pool: &LockPool, id: u64) -> Result<(), LockError> {
    Ok(())
}

/// The messages of all events.
#[derive(Clone, Debug, Default)]
struct Messages(Arc<Mutex<Vec<String>>>);

impl<S: Subscriber> Layer<S> for Messages {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        event.record(&mut self.clone());
    }
}

impl Visit for Messages {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0.lock().unwrap().push(format!("{value:?}"));
        }
    }
}

impl Messages {
    async fn until(&self, message: &str) {
        eventually_async(DEADLINE, message, async || {
            self.0.lock().unwrap().iter().any(|it| it == message)
        })
        .await;
    }
}

/// The driver's thread has none, and sends what the call's wants.
#[test]
fn the_subscriber_of_a_thread_gets_what_happens_to_its_calls_on_other_threads() {
    in_own_process!(
        the_subscriber_of_a_thread_gets_what_happens_to_its_calls_on_other_threads,
        async {
            let pool = memory().await;
            let messages = Messages::default();
            let subscriber = tracing_subscriber::registry().with(messages.clone());
            let _guard = tracing::subscriber::set_default(subscriber);
            let guard = pool.lock("order:7").ttl(ms(1_500)).acquire().await.unwrap();
            messages.until("renewed").await;
            drop(guard);
            let guard = pool.lock("order:8").ttl(ms(1_000)).renew(false).acquire().await.unwrap();
            messages.until("lost").await;
            drop(guard);
            messages.until("released").await;
        }
    );
}

/// Filters of layers keep what they were asked for the next event of the thread.
#[test]
fn no_event_of_the_program_is_lost_by_the_filters_of_layers() {
    in_own_process!(no_event_of_the_program_is_lost_by_the_filters_of_layers, async {
        let (all, some) = (Messages::default(), Messages::default());
        let subscriber = tracing_subscriber::registry()
            .with(all.clone().with_filter(LevelFilter::DEBUG))
            .with(some.clone().with_filter(LevelFilter::INFO));
        tracing::subscriber::set_global_default(subscriber).unwrap();
        let pool = memory().await;
        let guard = pool.lock("order:7").acquire().await.unwrap();
        info!("inside");
        drop(guard);
        info!("behind");
        all.until("released").await;
        assert_eq!(*some.0.lock().unwrap(), ["inside", "behind"]);
    });
}

#[test]
fn a_layer_that_takes_events_alone_gets_those_of_locks() {
    in_own_process!(a_layer_that_takes_events_alone_gets_those_of_locks, async {
        let messages = Messages::default();
        let layer = messages.clone().with_filter(filter_fn(|metadata| metadata.is_event()));
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::set_global_default(subscriber).unwrap();
        let pool = memory().await;
        let guard = pool.lock("order:7").ttl(ms(300)).renew(false).acquire().await.unwrap();
        messages.until("lost").await;
        drop(guard);
    });
}

/// Events wait, and the spans of their calls close.
#[test]
fn a_subscriber_that_blocks_keeps_no_span_open() {
    in_own_process!(a_subscriber_that_blocks_keeps_no_span_open, async {
        watch();
        let pool = memory().await;
        block(true);
        let guard = pool.lock("order:6").acquire().await.unwrap();
        blocked_in_an_event().await;
        settle(&pool, 7).instrument(info_span!("caller")).await.unwrap();
        let spans = all_spans();
        assert!(all_events().is_empty());
        let closed = |name| spans.iter().filter(move |it| it.name == name && it.is_closed).count();
        assert_eq!((closed("caller"), closed("lock"), spans.len()), (1, 1, 3), "{spans:#?}");
        drop(guard);
        block(false);
        eventually_async(DEADLINE, "all spans are closed", async || {
            all_spans().iter().all(|span| span.is_closed)
        })
        .await;
    });
}

/// Reads the spans around an event, as a formatter does, until it may go on.
struct ReadsSpans {
    reads: mpsc::Sender<()>,
    goes_on: Mutex<mpsc::Receiver<()>>,
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for ReadsSpans {
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        if let Some(span) = context.event_span(event) {
            self.reads.send(()).unwrap();
            self.goes_on.lock().unwrap().recv().unwrap();
            drop(span);
        }
    }
}

/// The registry clears a span when its last reader is done.
#[test]
fn the_spans_around_a_call_close_although_it_ended_during_an_event() {
    in_own_process!(the_spans_around_a_call_close_although_it_ended_during_an_event, async {
        let (reads, read) = mpsc::channel();
        let (go_on, goes_on) = mpsc::channel();
        let reader = ReadsSpans { reads, goes_on: Mutex::new(goes_on) };
        let closed = ClosedSpans::default();
        let subscriber = tracing_subscriber::registry().with(reader).with(closed.clone());
        tracing::subscriber::set_global_default(subscriber).unwrap();
        let pool = memory().await;
        let acquire = pool.lock("order:7").acquire();
        let guard = acquire.instrument(info_span!("caller")).await.unwrap();
        read.recv_timeout(DEADLINE).unwrap();
        drop(guard);
        go_on.send(()).unwrap();
        eventually_async(DEADLINE, "both spans are closed", async || {
            *closed.0.lock().unwrap() == ["lock", "caller"]
        })
        .await;
    });
}

/// The names of closed spans.
#[derive(Clone, Debug, Default)]
struct ClosedSpans(Arc<Mutex<Vec<&'static str>>>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for ClosedSpans {
    fn on_close(&self, id: Id, context: Context<'_, S>) {
        self.0.lock().unwrap().push(context.span(&id).unwrap().name());
    }
}

/// Panics in everything that a pool calls.
#[derive(Debug, Default)]
struct Panics(AtomicUsize);

impl Panics {
    fn panic(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        panic!("in the subscriber");
    }
}

impl Subscriber for Panics {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "lock_runtime"
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::TRACE)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {
        self.panic();
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.panic();
    }

    fn enter(&self, _: &Id) {
        self.panic();
    }

    fn exit(&self, _: &Id) {
        self.panic();
    }

    fn try_close(&self, _: Id) -> bool {
        self.panic();
        true
    }
}

#[test]
fn a_subscriber_that_panics_ends_no_call() {
    in_own_process!(a_subscriber_that_panics_ends_no_call, async {
        let panics = Arc::new(Panics::default());
        let dispatch = tracing::Dispatch::from(panics.clone() as Arc<dyn Subscriber + Send + Sync>);
        tracing::dispatcher::set_global_default(dispatch).unwrap();
        let pool = memory().await;
        settle(&pool, 7).await.unwrap();
        let dropped = pool.lock("order:7").run(std::future::pending::<()>());
        assert!(tokio::time::timeout(ms(20), dropped).await.is_err());
        let inner = pool.clone();
        let body = async move { inner.lock("order:8").run(async { panic!("in the body") }).await };
        let failed = tokio::spawn(body).await;
        assert!(failed.map(|it| it.map(|(): ()| ())).unwrap_err().is_panic());
        assert!(pool.lock("").acquire().await.is_err());
        // Nothing of it is held.
        for key in ["order:7", "order:8"] {
            pool.lock(key).wait(DEADLINE).acquire().await.unwrap().release().await.unwrap();
        }
        assert!(panics.0.load(Ordering::SeqCst) > 10);
    });
}

struct PanickingRecorder;

impl Recorder for PanickingRecorder {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let text = key.to_string();
        assert!(!text.contains("refused"), "in the registration");
        Counter::from_arc(Arc::new(PanickingHandle))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(PanickingHandle))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(PanickingHandle))
    }
}

struct PanickingHandle;

static PANICS: AtomicUsize = AtomicUsize::new(0);

impl PanickingHandle {
    fn panic() {
        PANICS.fetch_add(1, Ordering::SeqCst);
        panic!("in the recorder");
    }
}

impl CounterFn for PanickingHandle {
    fn increment(&self, _: u64) {
        Self::panic();
    }

    fn absolute(&self, _: u64) {}
}

impl GaugeFn for PanickingHandle {
    fn increment(&self, _: f64) {
        Self::panic();
    }

    fn decrement(&self, _: f64) {
        Self::panic();
    }

    fn set(&self, _: f64) {
        Self::panic();
    }
}

impl HistogramFn for PanickingHandle {
    fn record(&self, _: f64) {
        Self::panic();
    }
}

/// It also has no fields, as the recorder that stands for none.
#[test]
fn a_recorder_that_panics_ends_no_call() {
    in_own_process!(a_recorder_that_panics_ends_no_call, async {
        metrics::set_global_recorder(PanickingRecorder).unwrap();
        let pool = memory().await;
        lock_runtime::install("panicking", pool.clone()).unwrap();
        settle(&pool, 7).await.unwrap();
        pool.lock("refused").template("refused").acquire().await.unwrap().release().await.unwrap();
        let short = pool.lock("order:8").ttl(ms(50)).renew(false);
        assert!(short.run(std::future::pending::<()>()).await.unwrap_err().is_lost());
        pool.lock("order:8").wait(DEADLINE).acquire().await.unwrap().release().await.unwrap();
        assert!(pool.lock("").acquire().await.is_err());
        pool.shutdown(Duration::ZERO).await;
        assert!(PANICS.load(Ordering::SeqCst) > 10);
    });
}

/// Those of two tests often have one address.
#[test]
fn recorders_of_a_thread_follow_each_other() {
    in_own_process(concat!(module_path!(), "::recorders_of_a_thread_follow_each_other"), || {
        let runtime = current_thread();
        let pool = runtime.block_on(memory());
        for _ in 0..3 {
            let recorded = Arc::<Recorded>::default();
            let recorder = KeepAll(recorded.clone());
            metrics::with_local_recorder(&recorder, || {
                runtime.block_on(settle(&pool, 7)).unwrap();
            });
            assert_eq!(recorded.total("lock.attempts"), 1);
        }
        // One of the program gets all from its installation on.
        let recorded = Arc::<Recorded>::default();
        metrics::set_global_recorder(KeepAll(recorded.clone())).unwrap();
        for _ in 0..3 {
            runtime.block_on(settle(&pool, 7)).unwrap();
        }
        assert_eq!(recorded.total("lock.attempts"), 3);
    });
}

/// What a subscriber for `warn` never sees.
#[test]
fn a_call_at_level_info_has_no_span() {
    in_own_process!(a_call_at_level_info_has_no_span, async {
        #[derive(Clone, Debug, Default)]
        struct Spans(Arc<AtomicUsize>);
        impl<S: Subscriber> Layer<S> for Spans {
            fn on_new_span(&self, _: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }

        let spans = Spans::default();
        let filter = LevelFilter::from_level(Level::INFO);
        let subscriber = tracing_subscriber::registry().with(spans.clone()).with(filter);
        tracing::subscriber::set_global_default(subscriber).unwrap();
        let pool = memory().await;
        settle(&pool, 7).await.unwrap();
        assert_eq!(spans.0.load(Ordering::SeqCst), 0);
    });
}
