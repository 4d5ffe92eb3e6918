//! Who of this process may ask the store for a key: one task per key, the others in line behind it.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::backend::{BackendError, Failure};
use crate::clock::{Clock, Instant};
use crate::deadlines::Deadlines;
use crate::key::Key;

/// One line per key, first come, first served.
#[derive(Debug)]
pub(crate) struct Queue {
    lines: Mutex<Lines>,
    /// Who is to be sent away when.
    deadlines: Deadlines<(Key, u64)>,
    max_waiters: usize,
}

#[derive(Debug, Default)]
struct Lines {
    /// A key has a line as long as somebody has its turn.
    by_key: HashMap<Key, Line>,
    /// The last failure of any key, until the store answers again.
    trouble: Option<BackendError>,
    last_id: u64,
    closed: bool,
}

#[derive(Debug, Default)]
struct Line {
    waiters: VecDeque<Waiter>,
    word: Word,
}

/// What the head of a line has last heard from the store. Those behind it must not be told that
/// somebody holds the lock when nobody could be asked.
#[derive(Clone, Debug, Default)]
pub(crate) enum Word {
    #[default]
    NothingAsked,
    Answered,
    /// Nothing yet to what was asked then.
    Asked(Instant),
    Failed(BackendError),
}

impl Word {
    /// Why it is not known who holds the lock, if it is not.
    fn doubt(&self, now: Instant, trouble: Option<&BackendError>) -> Option<BackendError> {
        /// An answer may take as long as this without a doubt.
        const USUAL: Duration = Duration::from_millis(250);
        match self {
            Self::Asked(since) if now.since(*since) >= USUAL => {
                let message = format!("the store has not answered for {:?}", now.since(*since));
                Some(
                    BackendError::new(Failure::Unknown, message)
                        .remedy("check that the store is up and reachable"),
                )
            }
            Self::NothingAsked | Self::Asked(_) => trouble.cloned(),
            Self::Answered => None,
            Self::Failed(error) => Some(error.clone()),
        }
    }
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    deadline: Option<Instant>,
    called: oneshot::Sender<Result<Turn, NoTurn>>,
}

/// Why there is no turn.
#[derive(Debug)]
pub(crate) enum NoTurn {
    /// The line is as long as it may be.
    Full,
    /// The deadline passed. The head of the line may not know either who holds the lock.
    Expired { doubt: Option<BackendError> },
    /// The pool shuts down.
    Closed,
}

impl Queue {
    pub(crate) fn new(max_waiters: usize) -> Self {
        Self { lines: Mutex::default(), deadlines: Deadlines::default(), max_waiters }
    }

    /// Waits for the turn to ask for `key`, until `deadline` if there is one.
    ///
    /// A dropped wait leaves the line; a turn that arrives in that instant goes to the next in line.
    pub(crate) async fn turn(
        self: &Arc<Self>,
        key: &Key,
        deadline: Option<Instant>,
        clock: Clock,
    ) -> Result<Turn, NoTurn> {
        let waiting = match self.enter(key, deadline, clock)? {
            Entered::First(turn) => return Ok(turn),
            Entered::Behind(waiting) => waiting,
        };
        waiting.await
    }

    fn enter(
        self: &Arc<Self>,
        key: &Key,
        deadline: Option<Instant>,
        clock: Clock,
    ) -> Result<Entered, NoTurn> {
        let mut lines = self.lines();
        if lines.closed {
            return Err(NoTurn::Closed);
        }
        lines.last_id += 1;
        let id = lines.last_id;
        let Some(line) = lines.by_key.get_mut(key) else {
            lines.by_key.insert(key.clone(), Line::default());
            return Ok(Entered::First(Turn { queue: self.clone(), key: key.clone() }));
        };
        let now = clock.now();
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(NoTurn::Expired { doubt: lines.doubt(key, now) });
        }
        if line.waiters.len() >= self.max_waiters {
            return Err(NoTurn::Full);
        }
        let (called, call) = oneshot::channel();
        line.waiters.push_back(Waiter { id, deadline, called });
        if let Some(deadline) = deadline {
            self.deadlines.file(deadline, id, (key.clone(), id));
        }
        Ok(Entered::Behind(Waiting {
            queue: self.clone(),
            key: key.clone(),
            place: Some(id),
            call,
        }))
    }

    /// Turns everybody away who waits, and everybody who comes later.
    pub(crate) fn close(&self) {
        let mut lines = self.lines();
        lines.closed = true;
        let waiters: Vec<_> =
            lines.by_key.values_mut().flat_map(|line| std::mem::take(&mut line.waiters)).collect();
        drop(lines);
        for waiter in waiters {
            let _ = waiter.called.send(Err(NoTurn::Closed));
        }
    }

    /// Sends waiters away when their deadline has passed. Runs on the driver for the life of the pool.
    pub(crate) async fn expire(self: Arc<Self>, clock: Clock) {
        loop {
            self.deadlines.due(clock).await;
            for (key, id) in self.deadlines.take_until(clock.now()) {
                let mut lines = self.lines();
                let Some(waiter) = lines.remove(&key, id) else { continue };
                let doubt = lines.doubt(&key, clock.now());
                drop(lines);
                let _ = waiter.called.send(Err(NoTurn::Expired { doubt }));
            }
        }
    }

    /// Hands the turn of `key` to the next in line, or closes the line.
    fn pass(self: &Arc<Self>, key: &Key) {
        let mut lines = self.lines();
        let next = lines.by_key.get_mut(key).and_then(|line| line.waiters.pop_front());
        let Some(waiter) = next else {
            lines.by_key.remove(key);
            return;
        };
        drop(lines);
        if let Some(deadline) = waiter.deadline {
            self.deadlines.remove(deadline, waiter.id);
        }
        // If the waiter is gone by now, the turn comes back and its drop calls the one behind.
        let turn = Turn { queue: self.clone(), key: key.clone() };
        drop(waiter.called.send(Ok(turn)));
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lines {
    fn doubt(&self, key: &Key, now: Instant) -> Option<BackendError> {
        self.by_key.get(key)?.word.doubt(now, self.trouble.as_ref())
    }

    fn remove(&mut self, key: &Key, id: u64) -> Option<Waiter> {
        let line = &mut self.by_key.get_mut(key)?.waiters;
        let at = line.iter().position(|waiter| waiter.id == id)?;
        line.remove(at)
    }
}

enum Entered {
    First(Turn),
    Behind(Waiting),
}

/// The right to ask the store for a key, and the duty to call the next in line: dropping it does.
#[derive(Debug)]
pub(crate) struct Turn {
    queue: Arc<Queue>,
    key: Key,
}

impl Turn {
    /// Tells those in line what the store says.
    pub(crate) fn spread(&self, word: Word) {
        let mut lines = self.queue.lines();
        match &word {
            Word::Answered => lines.trouble = None,
            // A refusal may be about this key alone.
            Word::Failed(error) if error.failure() != Failure::Refused => {
                lines.trouble = Some(error.clone());
            }
            Word::NothingAsked | Word::Asked(_) | Word::Failed(_) => {}
        }
        if let Some(line) = lines.by_key.get_mut(&self.key) {
            line.word = word;
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.queue.pass(&self.key);
    }
}

/// A place in a line. Dropping it leaves the line.
struct Waiting {
    queue: Arc<Queue>,
    key: Key,
    /// `None` once called or sent away.
    place: Option<u64>,
    call: oneshot::Receiver<Result<Turn, NoTurn>>,
}

impl Future for Waiting {
    type Output = Result<Turn, NoTurn>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let call = ready!(Pin::new(&mut self.call).poll(cx));
        self.place = None;
        // The sender is only dropped unused together with the queue.
        Poll::Ready(call.unwrap_or(Err(NoTurn::Closed)))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Some(id) = self.place else { return };
        let left = self.queue.lines().remove(&self.key, id);
        if let Some(deadline) = left.and_then(|waiter| waiter.deadline) {
            self.queue.deadlines.remove(deadline, id);
        }
    }
}
