//! The way of events to the program's `tracing` subscriber: over a thread of their own. A subscriber that blocks
//! delays other events and no renewal; a panic in it ends one event.

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

/// Events that wait for the subscriber, at the most. The next ones are dropped and counted.
const MOST: usize = 4096;

/// Whether a subscriber wants events of this level. A level that no subscriber wants costs one load.
macro_rules! is_wanted {
    ($level:ident) => {
        tracing::Level::$level <= tracing::level_filters::LevelFilter::current()
            && $crate::exec::panic_boundary::call(
                || tracing::enabled!(target: "lock_runtime", tracing::Level::$level),
            )
            .unwrap_or(false)
    };
}
pub(crate) use is_wanted;

/// The sending half. Its thread lives as long as the process.
struct Events {
    letters: mpsc::Sender<Letter>,
    dropped: Arc<AtomicU64>,
}

enum Letter {
    Event {
        /// The subscriber where the event happened: that of a thread may differ from the program's.
        to: Dispatch,
        tell: Box<dyn FnOnce() + Send>,
    },
    /// All events before this one have been told.
    Told(oneshot::Sender<()>),
}

static EVENTS: OfProcess<Events> = OfProcess::new();

/// Has `tell` run where it may take its time. In the order of the calls, so of each lease in the order in which its
/// events happened.
pub(crate) fn send(tell: impl FnOnce() + Send + 'static) {
    // Without a thread there are no events; the locks are kept all the same.
    let Ok(events) = EVENTS.get_or_try_init(Events::start) else { return };
    let Ok(to) = panic_boundary::call(|| dispatcher::get_default(Dispatch::clone)) else { return };
    if events.letters.try_send(Letter::Event { to, tell: Box::new(tell) }).is_err() {
        events.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until the subscriber has had all events so far, for as long as `limit`.
pub(crate) async fn told(limit: Duration) {
    let Some(events) = EVENTS.get() else { return };
    let (told, all) = oneshot::channel();
    let all = async {
        if events.letters.send(Letter::Told(told)).await.is_ok() {
            let _ = all.await;
        }
    };
    let _ = timeout(limit, all).await;
}

impl Events {
    fn start() -> std::io::Result<Self> {
        let (letters, inbox) = mpsc::channel(MOST);
        let dropped = Arc::<AtomicU64>::default();
        let events = Self { letters, dropped: dropped.clone() };
        thread::Builder::new()
            .name("lock-events".to_owned())
            .spawn(move || run(inbox, &dropped))?;
        Ok(events)
    }
}

fn run(mut inbox: mpsc::Receiver<Letter>, dropped: &AtomicU64) {
    while let Some(letter) = inbox.blocking_recv() {
        match letter {
            Letter::Event { to, tell } => {
                let told = panic_boundary::call(|| dispatcher::with_default(&to, tell));
                let count = match told {
                    Ok(()) => dropped.swap(0, Ordering::Relaxed),
                    Err(_) => {
                        dropped.fetch_add(1, Ordering::Relaxed);
                        0
                    }
                };
                if count > 0
                    && panic_boundary::call(|| dispatcher::with_default(&to, || tell_of(count)))
                        .is_err()
                {
                    dropped.fetch_add(count, Ordering::Relaxed);
                }
                // The last of a subscriber goes here too.
                let _ = panic_boundary::call(|| drop(to));
            }
            Letter::Told(reply) => panic_boundary::answer(reply, ()),
        }
    }
}

fn tell_of(dropped: u64) {
    warn!(
        target: "lock_runtime",
        dropped,
        "events were dropped: the subscriber is too slow, or panics"
    );
}
