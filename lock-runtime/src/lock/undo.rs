//! Takes back what ambiguous requests may have left in the store.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::time::timeout;

use crate::backend::{BackendError, LeaseRef, ReleaseOutcome, ReleaseRequest};
use crate::base::clock::Instant;
use crate::base::sync::{Mutex, MutexGuard};
use crate::lease::tracker::Errand;
use crate::lock::core::Engine;
use crate::lock::release::silence;

/// Entries of one call to the store.
const BATCH: usize = 128;

/// Entries of a pool, some 250 bytes each. One more, and the entry that is due for the longest time is left to its ttl.
const MOST: usize = 65_536;

/// A request may be served as late as this after the ttl of its claim, by a store that was frozen meanwhile. A request
/// that is served later blocks its keys for one ttl.
const LATEST: Duration = Duration::from_secs(60);

/// The longest pause between two tries for one entry, and between two calls to a store that answers none.
const LONGEST: Duration = Duration::from_secs(1);

/// The longest pause between two calls of which some entries fail.
const LONGEST_IN_PART: Duration = Duration::from_millis(100);

/// What unanswered requests of one acquire may have left, and how far that is taken back.
///
/// Dropped, it is left to its ttl.
#[derive(Debug)]
pub(crate) struct Leftover {
    pub(crate) release: ReleaseRequest,
    /// Until then the keys stay taken.
    keep_until: Instant,
    /// Then the store has forgotten what it granted by then.
    until: Instant,
    /// Requests that may have been applied, or may be applied yet.
    unanswered: usize,
    /// Those that a release has met.
    met: usize,
    is_answered: bool,
    pause: Duration,
    _errand: Errand,
}

impl Leftover {
    pub(crate) fn new(
        lease: LeaseRef,
        keep_until: Instant,
        until: Instant,
        unanswered: usize,
        errand: Errand,
    ) -> Self {
        let release = ReleaseRequest {
            lease,
            free_after: Duration::ZERO,
            successor: None,
            barging_window: Duration::ZERO,
        };
        Self {
            release,
            keep_until,
            until,
            unanswered,
            met: 0,
            is_answered: false,
            pause: Duration::from_millis(20),
            _errand: errand,
        }
    }

    /// What is sent at `now`.
    pub(crate) fn release_at(&mut self, now: Instant) -> ReleaseRequest {
        self.release.free_after = self.keep_until.since(now);
        self.release.clone()
    }

    /// Takes in what the store answered. When to send it again; `None` if it is over.
    pub(crate) fn answered(
        &mut self,
        outcome: &Result<ReleaseOutcome, BackendError>,
        now: Instant,
    ) -> Option<Instant> {
        self.is_answered |= outcome.is_ok();
        match outcome {
            Ok(_) if now >= self.until => return None,
            Ok(ReleaseOutcome::NotHeld) | Err(_) => {}
            Ok(_) if self.release.free_after.is_zero() => self.met += 1,
            Ok(_) => {}
        }
        if self.is_answered && self.met >= self.unanswered {
            return None;
        }
        let due = now + self.pause;
        self.pause = (self.pause * 2).min(LONGEST);
        Some(due)
    }

    /// Whether the store has answered for it at all. A shutdown waits for what has arrived at the store, not for
    /// requests that may never arrive.
    pub(crate) fn is_answered(&self) -> bool {
        self.is_answered
    }

    fn is_too_late(&self, now: Instant) -> bool {
        now >= self.until + LATEST
    }
}

/// The leftovers of a pool that are not taken back at once.
///
/// One task sends their releases in batches, from the first entry until there is none. While the store answers no
/// release, it sends one batch for each pause, and the pause doubles up to a second. An entry ends when its requests are
/// met, when the store answers after the ttl of the claim, or [`LATEST`] after that ttl. Memory is bounded by [`MOST`].
#[derive(Debug, Default)]
pub(crate) struct Undo(Mutex<Book>);

#[derive(Debug, Default)]
struct Book {
    /// By the moment of the next try.
    entries: BTreeMap<(Instant, u64), Leftover>,
    last_id: u64,
    is_at_work: bool,
}

enum Step {
    Send(Vec<Leftover>),
    WaitUntil(Instant),
    Over,
}

impl Undo {
    /// Has `leftover` released again at `due`, and on until it is over.
    pub(crate) fn file(engine: &Arc<Engine>, leftover: Leftover, due: Instant) {
        let mut book = engine.undo.book();
        let too_many = book.add(leftover, due);
        let is_at_work = std::mem::replace(&mut book.is_at_work, true);
        drop(book);
        drop(too_many);
        if !is_at_work {
            engine.driver.spawn(work(AtWork { engine: engine.clone(), is_over: false }));
        }
    }

    fn step(&self, engine: &Engine, is_silent: bool) -> Step {
        let (now, mut ended) = (engine.clock.now(), Vec::new());
        let mut book = self.book();
        let step = if engine.registry.is_closed() {
            ended.extend(std::mem::take(&mut book.entries).into_values());
            Step::Over
        } else {
            let is_open = engine.registry.is_open();
            if is_silent || !is_open {
                let is_over = |leftover: &Leftover| {
                    leftover.is_too_late(now) || (!is_open && leftover.is_answered)
                };
                let (over, rest): (BTreeMap<_, _>, _) =
                    std::mem::take(&mut book.entries).into_iter().partition(|(_, it)| is_over(it));
                book.entries = rest;
                ended.extend(over.into_values());
            }
            book.next(now)
        };
        book.is_at_work = !matches!(step, Step::Over);
        drop(book);
        drop(ended);
        step
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    /// The entry for which there is no room any more, if so.
    fn add(&mut self, leftover: Leftover, due: Instant) -> Option<Leftover> {
        let too_many = if self.entries.len() >= MOST { self.entries.pop_first() } else { None };
        self.last_id += 1;
        self.entries.insert((due, self.last_id), leftover);
        too_many.map(|(_, leftover)| leftover)
    }

    fn next(&mut self, now: Instant) -> Step {
        let mut due = Vec::new();
        while due.len() < BATCH
            && let Some(first) = self.entries.first_entry()
        {
            if first.key().0 > now {
                let until = first.key().0;
                return if due.is_empty() { Step::WaitUntil(until) } else { Step::Send(due) };
            }
            due.push(first.remove());
        }
        if due.is_empty() { Step::Over } else { Step::Send(due) }
    }
}

/// The task that sees to the entries. Dropped half-way, the next entry begins another one.
struct AtWork {
    engine: Arc<Engine>,
    /// The book says so already, and another task may be at work by now.
    is_over: bool,
}

impl Drop for AtWork {
    fn drop(&mut self) {
        if !self.is_over {
            self.engine.undo.book().is_at_work = false;
        }
    }
}

async fn work(mut at_work: AtWork) {
    // A new entry may be due before the next known one.
    const LOOK: Duration = Duration::from_millis(100);
    let engine = at_work.engine.clone();
    let mut pause = Duration::ZERO;
    loop {
        match engine.undo.step(&engine, !pause.is_zero()) {
            Step::Over => break,
            Step::WaitUntil(due) => wait_until(&engine, due.min(engine.clock.now() + LOOK)).await,
            Step::Send(batch) => {
                pause = send(&engine, batch, pause).await;
                if !pause.is_zero() {
                    wait_until(&engine, engine.clock.now() + pause).await;
                }
            }
        }
    }
    at_work.is_over = true;
}

/// Sends one batch. How long to wait before the next one.
async fn send(engine: &Arc<Engine>, mut batch: Vec<Leftover>, pause: Duration) -> Duration {
    let now = engine.clock.now();
    let releases: Vec<_> = batch.iter_mut().map(|leftover| leftover.release_at(now)).collect();
    let outcomes = timeout(engine.request_timeout, engine.store.release(&releases)).await;
    let mut outcomes = outcomes.unwrap_or_default().into_iter();
    let now = engine.clock.now();
    let (count, mut failures) = (batch.len(), 0);
    for mut leftover in batch {
        let outcome = outcomes.next().unwrap_or_else(|| Err(silence()));
        failures += usize::from(outcome.is_err());
        if let Some(due) = leftover.answered(&outcome, now) {
            Undo::file(engine, leftover, due);
        }
    }
    let longest = match failures {
        0 => return Duration::ZERO,
        failures if failures == count => LONGEST,
        _ => LONGEST_IN_PART,
    };
    (pause * 2).clamp(Duration::from_millis(20), longest)
}

/// Ends also when the pool goes on to shut down.
async fn wait_until(engine: &Engine, moment: Instant) {
    let registry = &engine.registry;
    tokio::select! {
        () = engine.clock.sleep_until(moment) => {}
        () = registry.closing(), if registry.is_open() => {}
        () = registry.closed(), if !registry.is_open() => {}
    }
}
