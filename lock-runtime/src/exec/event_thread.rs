//! Delivers events to the program's `tracing` subscriber, on a thread of their own.
//!
//! A subscriber that blocks delays other events, but no renewal. A panic in it ends one event.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tracing::callsite::DefaultCallsite;
use tracing::dispatcher::{self, Dispatch};
use tracing::span::Id;
use tracing::warn;

use crate::base::clock::Clock;
use crate::base::process::OfProcess;
use crate::base::span_slot::{SpanHandle, SpanSlot};
use crate::exec::panic_boundary::{self, Panic};
use crate::exec::throttle::Throttle;

/// The maximum number of events that wait for the subscriber. Further events are dropped and counted.
const MOST: usize = 4096;

/// Whether the subscriber `$to`, or that of this thread, may want events of this level. A level that no subscriber wants costs
/// one load.
///
/// It does not use `tracing::enabled!`. Filters of layers keep its answer for the next event or span of the thread, which
/// belongs to the program.
macro_rules! is_wanted {
    ($level:ident, $to:expr) => {
        tracing::Level::$level <= tracing::level_filters::LevelFilter::current() && {
            use tracing::callsite::{DefaultCallsite, Identifier};
            use tracing::field::FieldSet;
            use tracing::metadata::{Kind, Metadata};

            static CALLSITE: DefaultCallsite = DefaultCallsite::new(&METADATA);
            static METADATA: Metadata<'static> = Metadata::new(
                "event of lock_runtime",
                "lock_runtime",
                tracing::Level::$level,
                None,
                None,
                Some(module_path!()),
                FieldSet::new(&[], Identifier(&CALLSITE)),
                Kind::EVENT,
            );
            $crate::exec::event_thread::may_want($to, &CALLSITE)
        }
    };
}
pub(crate) use is_wanted;

/// The sending half. Its thread lives as long as the process.
struct EventThread {
    queue: mpsc::Sender<Job>,
    dropped: Arc<AtomicU64>,
}

enum Job {
    Event {
        /// The subscriber of the call, or where the event occurred. That of a thread may differ from the program's.
        to: Dispatch,
        /// Not a handle: an event that waits keeps neither this span nor the spans around it open.
        span: SpanSlot,
        /// Takes the span that the event is in.
        emit: Box<dyn FnOnce(Option<Id>) + Send>,
    },
    /// Answered when all earlier events are delivered.
    Flush(oneshot::Sender<()>),
}

static EVENTS: OfProcess<EventThread> = OfProcess::new();

/// Whether the subscriber `to` may want the events of `callsite`; without one, that of this thread. Each event checks again.
pub(crate) fn may_want(to: Option<&Dispatch>, callsite: &'static DefaultCallsite) -> bool {
    let may_want = || !callsite.interest().is_never();
    // The first call registers the callsite with the default subscriber, if there is only one.
    let asked = panic_boundary::call(|| match to {
        Some(to) => dispatcher::with_default(to, may_want),
        None => may_want(),
    });
    asked.unwrap_or(false)
}

/// Like [`send_in`], to the subscriber of this thread, in no span.
pub(crate) fn send(emit: impl FnOnce() + Send + 'static) {
    send_in(SpanSlot::default(), |_| emit());
}

/// Runs `emit` on the event thread with the subscriber of `span`; without one, with that of this thread. In the order of the
/// calls: the events of a lease keep their order.
pub(crate) fn send_in(span: SpanSlot, emit: impl FnOnce(Option<Id>) + Send + 'static) {
    // Without a thread there are no events, and locks work all the same.
    let Ok(events) = EVENTS.get_or_try_init(EventThread::start) else { return };
    let of_thread = || panic_boundary::call(|| dispatcher::get_default(Dispatch::clone)).ok();
    let Some(to) = span.subscriber().cloned().or_else(of_thread) else { return };
    if let Err(refused) = events.queue.try_send(Job::Event { to, span, emit: Box::new(emit) }) {
        events.dropped.fetch_add(1, Ordering::Relaxed);
        // It may be the last reference to a subscriber.
        let _ = panic_boundary::call(|| drop(refused));
    }
}

/// Waits until all events so far are delivered, at most for `limit`.
pub(crate) async fn flushed(limit: Duration) {
    let Some(events) = EVENTS.get() else { return };
    let (reply, flushed) = oneshot::channel();
    let flushed = async {
        if events.queue.send(Job::Flush(reply)).await.is_ok() {
            let _ = flushed.await;
        }
    };
    let _ = timeout(limit, flushed).await;
}

impl EventThread {
    fn start() -> std::io::Result<Self> {
        let (queue, jobs) = mpsc::channel(MOST);
        let dropped = Arc::<AtomicU64>::default();
        let events = Self { queue, dropped: dropped.clone() };
        thread::Builder::new().name("lock-events".to_owned()).spawn(move || run(jobs, &dropped))?;
        Ok(events)
    }
}

fn run(mut jobs: mpsc::Receiver<Job>, dropped: &AtomicU64) {
    let reports = Throttle::default();
    while let Some(job) = jobs.blocking_recv() {
        match job {
            Job::Event { to, span, emit } => {
                if deliver(&to, &span, emit).is_err() {
                    dropped.fetch_add(1, Ordering::Relaxed);
                } else if dropped.load(Ordering::Relaxed) > 0 {
                    // While events are dropped, one report for each of the others would cause the loss of more.
                    if reports.report(Clock::Boot.now()).is_some() || jobs.is_empty() {
                        report_dropped(&to, dropped);
                    }
                }
                // They may be the last references to a subscriber.
                let _ = panic_boundary::call(|| drop((to, span)));
            }
            Job::Flush(reply) => panic_boundary::answer(reply, ()),
        }
    }
}

/// A handle keeps the span open in the meantime. Without it `tracing_subscriber::Registry` clears a span that its call
/// closes as soon as the event ends. It does so inside the subscriber, where it cannot close the span's parent, which stays
/// open forever.
fn deliver(to: &Dispatch, span: &SpanSlot, emit: impl FnOnce(Option<Id>)) -> Result<(), Panic> {
    dispatcher::with_default(to, || {
        let handle = panic_boundary::call(|| span.handle()).ok().flatten();
        let parent = handle.as_ref().map(SpanHandle::id);
        let delivered = panic_boundary::call(|| emit(parent));
        let _ = panic_boundary::call(|| drop(handle));
        delivered
    })
}

fn report_dropped(to: &Dispatch, dropped: &AtomicU64) {
    let count = dropped.swap(0, Ordering::Relaxed);
    let reported = panic_boundary::call(|| {
        dispatcher::with_default(to, || {
            warn!(
                target: "lock_runtime",
                dropped = count,
                "events were dropped: the subscriber is too slow, or panics"
            );
        });
    });
    if reported.is_err() {
        dropped.fetch_add(count, Ordering::Relaxed);
    }
}
