//! Delivers events to the program's `tracing` subscriber, on a thread of their own.
//!
//! A subscriber that blocks delays other events and no renewal. A panic in it ends one event.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tracing::dispatcher::{self, Dispatch};
use tracing::warn;

use crate::base::process::OfProcess;
use crate::exec::panic_boundary;

/// The most events that wait for the subscriber. Further ones are dropped and counted.
const MOST: usize = 4096;

/// Whether the subscriber `$to`, or that of this thread, wants events of this level. A level that no subscriber wants costs
/// one load.
macro_rules! is_wanted {
    ($level:ident, $to:expr) => {
        tracing::Level::$level <= tracing::level_filters::LevelFilter::current()
            && $crate::exec::event_thread::ask($to, || {
                tracing::enabled!(target: "lock_runtime", tracing::Level::$level)
            })
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
        emit: Box<dyn FnOnce() + Send>,
    },
    /// Answered when all earlier events are delivered.
    Flush(oneshot::Sender<()>),
}

static EVENTS: OfProcess<EventThread> = OfProcess::new();

/// The answer of the subscriber `to`; without one, of that of this thread.
pub(crate) fn ask(to: Option<&Dispatch>, is_wanted: fn() -> bool) -> bool {
    let asked = panic_boundary::call(|| match to {
        Some(to) => dispatcher::with_default(to, is_wanted),
        None => is_wanted(),
    });
    asked.unwrap_or(false)
}

/// The subscriber `of_span`; without one, that of this thread.
pub(crate) fn subscriber(of_span: Option<&Dispatch>) -> Option<Dispatch> {
    let of_thread = || panic_boundary::call(|| dispatcher::get_default(Dispatch::clone)).ok();
    of_span.cloned().or_else(of_thread)
}

/// As [`send_to`], to the subscriber of this thread.
pub(crate) fn send(emit: impl FnOnce() + Send + 'static) {
    send_to(subscriber(None), emit);
}

/// Runs `emit` on the event thread with the subscriber `to`, in the order of the calls: the events of a lease keep their
/// order.
pub(crate) fn send_to(to: Option<Dispatch>, emit: impl FnOnce() + Send + 'static) {
    // Without a thread there are no events, and locks work all the same.
    let Ok(events) = EVENTS.get_or_try_init(EventThread::start) else { return };
    let Some(to) = to else { return };
    if let Err(refused) = events.queue.try_send(Job::Event { to, emit: Box::new(emit) }) {
        events.dropped.fetch_add(1, Ordering::Relaxed);
        // It may have the last reference to a subscriber.
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
    while let Some(job) = jobs.blocking_recv() {
        match job {
            Job::Event { to, emit } => {
                let delivered = panic_boundary::call(|| dispatcher::with_default(&to, emit));
                let count = match delivered {
                    Ok(()) => dropped.swap(0, Ordering::Relaxed),
                    Err(_) => {
                        dropped.fetch_add(1, Ordering::Relaxed);
                        0
                    }
                };
                if count > 0
                    && panic_boundary::call(|| {
                        dispatcher::with_default(&to, || report_dropped(count));
                    })
                    .is_err()
                {
                    dropped.fetch_add(count, Ordering::Relaxed);
                }
                // It may be the last reference to a subscriber.
                let _ = panic_boundary::call(|| drop(to));
            }
            Job::Flush(reply) => panic_boundary::answer(reply, ()),
        }
    }
}

fn report_dropped(dropped: u64) {
    warn!(
        target: "lock_runtime",
        dropped,
        "events were dropped: the subscriber is too slow, or panics"
    );
}
