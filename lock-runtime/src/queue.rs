//! Who of this process wants a key: one line per key, first come, first served.
//!
//! Whoever has the [`Turn`] of a key acts for its line: asks the store, holds the lock, lets it go. The
//! others wait in it. This file moves waiters only; it asks the store nothing.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use crate::acquire::Ask;
use crate::backend::{BackendError, Failure, Owner};
use crate::clock::{Clock, Instant};
use crate::deadlines::Deadlines;
use crate::error::{ErrorKind, LockError};
use crate::guard::LockGuard;
use crate::key::Key;
use crate::lease::Lease;
use crate::options::Wait;
use crate::sync::{Mutex, MutexGuard};
use crate::turn::Turn;
use crate::word::Word;

/// The lines of a pool.
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
    /// The lease under which a task of this process holds the lock.
    holder: Weak<Lease>,
    /// Wakes whoever waits for the store on the line's behalf.
    wake: Option<Arc<Notify>>,
    /// When to look at the store, as far as it has said so since the last look.
    look_at: Option<Instant>,
    /// The name under which the line asks the store.
    place: Option<Owner>,
    /// Whether others than this process want the lock.
    wanted: bool,
    /// Since when the lock has not been left free.
    shut_since: Option<Instant>,
}

/// Somebody in line.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) id: u64,
    /// When the wait began.
    pub(crate) since: Instant,
    pub(crate) deadline: Option<Instant>,
    /// Requests made for this waiter.
    pub(crate) attempts: u32,
    pub(crate) wish: Wish,
}

/// What somebody waits for.
#[derive(Debug)]
pub(crate) enum Wish {
    /// The lock. Whoever has the turn gets it, or hands it on.
    Lease { ask: Arc<Ask>, reply: oneshot::Sender<Result<LockGuard, LockError>> },
    /// The turn itself, of a task that wants several keys.
    Turn { wait: Wait, reply: oneshot::Sender<Result<Turn, LockError>> },
}

impl Wish {
    fn wait(&self) -> Wait {
        match self {
            Self::Lease { ask, .. } => ask.policy.wait,
            Self::Turn { wait, .. } => *wait,
        }
    }

    fn refuse(self, error: LockError) {
        match self {
            Self::Lease { reply, .. } => drop(reply.send(Err(error))),
            Self::Turn { reply, .. } => drop(reply.send(Err(error))),
        }
    }

    fn is_gone(&self) -> bool {
        match self {
            Self::Lease { reply, .. } => reply.is_closed(),
            Self::Turn { reply, .. } => reply.is_closed(),
        }
    }
}

/// Who joins a line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Newcomer {
    pub(crate) now: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) wait: Wait,
    /// Whether who is alone asks the store at once.
    pub(crate) asks: bool,
}

impl Newcomer {
    pub(crate) fn new(now: Instant, wait: Wait) -> Self {
        let deadline = match wait {
            Wait::For(wait) => Some(now + wait),
            Wait::Forever => None,
        };
        Self { now, deadline, wait, asks: true }
    }
}

/// Where a newcomer came to stand.
#[derive(Debug)]
pub(crate) enum Entered<W> {
    /// Alone: the turn is the newcomer's, who gives its wish back.
    First(W),
    /// Behind others.
    Behind,
}

/// What is next for a line whose turn was given back.
#[derive(Debug)]
pub(crate) enum Next {
    /// The line is no more.
    Nobody,
    /// Somebody waits for the lock.
    Lease,
    /// Somebody waits for the turn.
    Turn(oneshot::Sender<Result<Turn, LockError>>),
}

/// The first in line, for whoever asks the store on its behalf.
#[derive(Debug)]
pub(crate) struct Front {
    pub(crate) id: u64,
    pub(crate) ask: Arc<Ask>,
    pub(crate) deadline: Option<Instant>,
    /// How many stand behind.
    pub(crate) behind: usize,
}

impl Queue {
    pub(crate) fn new(max_waiters: usize) -> Self {
        Self { lines: Mutex::default(), deadlines: Deadlines::default(), max_waiters }
    }

    /// Joins the line of `key`. `wish` is made for a place in the line only.
    pub(crate) fn enter<T>(
        &self,
        key: &Key,
        newcomer: &Newcomer,
        given: T,
        wish: impl FnOnce(T) -> Wish,
    ) -> Result<(u64, Entered<T>), LockError> {
        let mut lines = self.lines();
        if lines.closed {
            return Err(LockError::shutdown());
        }
        lines.last_id += 1;
        let id = lines.last_id;
        let Newcomer { now, deadline, wait, asks } = *newcomer;
        let Some(line) = lines.by_key.get_mut(key) else {
            let word = if asks { Word::Asked(now) } else { Word::NothingAsked };
            let line = Line { word, shut_since: Some(now), ..Line::default() };
            lines.by_key.insert(key.clone(), line);
            return Ok((id, Entered::First(given)));
        };
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(lines.verdict(key, wait, now));
        }
        if line.waiters.len() >= self.max_waiters {
            return Err(full());
        }
        let wish = wish(given);
        line.waiters.push_back(Waiter { id, since: now, deadline, attempts: 0, wish });
        self.file(key, id, deadline);
        Ok((id, Entered::Behind))
    }

    /// Puts somebody at the head of the line who asked the store in vain, unless it is gone meanwhile.
    pub(crate) fn join_front(&self, key: &Key, waiter: Waiter) {
        let mut lines = self.lines();
        if lines.closed {
            drop(lines);
            return waiter.wish.refuse(LockError::shutdown());
        }
        // Checked under the lock that a leaving waiter takes after it is gone.
        if waiter.wish.is_gone() {
            return;
        }
        let (id, deadline) = (waiter.id, waiter.deadline);
        lines.by_key.entry(key.clone()).or_default().waiters.push_front(waiter);
        self.file(key, id, deadline);
    }

    /// Takes somebody out of the line, who does not wait any more.
    fn leave(&self, key: &Key, id: u64) {
        let mut lines = self.lines();
        let Some(waiter) = lines.remove(key, id) else { return };
        drop(lines);
        self.unfile(&waiter);
    }

    /// The turn of `key` was given back.
    pub(crate) fn pass(&self, key: &Key) -> Next {
        let mut lines = self.lines();
        let Some(line) = lines.by_key.get_mut(key) else { return Next::Nobody };
        line.holder = Weak::new();
        line.wake = None;
        line.place = None;
        line.look_at = None;
        line.wanted = false;
        if matches!(line.waiters.front(), Some(Waiter { wish: Wish::Lease { .. }, .. })) {
            return Next::Lease;
        }
        match line.waiters.pop_front() {
            None => {
                lines.by_key.remove(key);
                Next::Nobody
            }
            Some(waiter) => {
                drop(lines);
                self.unfile(&waiter);
                match waiter.wish {
                    Wish::Turn { reply, .. } => Next::Turn(reply),
                    Wish::Lease { .. } => Next::Lease,
                }
            }
        }
    }

    /// Nobody can act for the line of `key` any more.
    pub(crate) fn dissolve(&self, key: &Key, error: &LockError) {
        let line = self.lines().by_key.remove(key);
        for waiter in line.into_iter().flat_map(|line| line.waiters) {
            self.unfile(&waiter);
            waiter.wish.refuse(error.clone());
        }
    }

    /// The first in line, if it waits for the lock.
    pub(crate) fn front(&self, key: &Key) -> Option<Front> {
        let mut lines = self.lines();
        let line = lines.by_key.get_mut(key)?;
        let behind = line.waiters.len().saturating_sub(1);
        let waiter = line.waiters.front_mut()?;
        match &waiter.wish {
            Wish::Lease { ask, .. } => {
                waiter.attempts += 1;
                Some(Front { id: waiter.id, ask: ask.clone(), deadline: waiter.deadline, behind })
            }
            Wish::Turn { .. } => None,
        }
    }

    /// Takes out the first in line if it wants the lock and `fits`.
    pub(crate) fn take_front(
        &self,
        key: &Key,
        fits: impl FnOnce(u64, &Ask) -> bool,
    ) -> Option<Waiter> {
        let mut lines = self.lines();
        let line = lines.by_key.get_mut(key)?;
        let front = line.waiters.front()?;
        let Wish::Lease { ask, .. } = &front.wish else { return None };
        if !fits(front.id, ask) {
            return None;
        }
        let waiter = line.waiters.pop_front()?;
        drop(lines);
        self.unfile(&waiter);
        Some(waiter)
    }

    /// Takes out the first in line if it wants the lock and `succeed` makes it the next holder, in one
    /// step. `succeed` is told whether others want the lock.
    pub(crate) fn hand_on<T>(
        &self,
        key: &Key,
        succeed: impl FnOnce(&Ask, bool) -> Option<T>,
    ) -> Option<(Waiter, T)> {
        let mut lines = self.lines();
        let line = lines.by_key.get_mut(key)?;
        let Wish::Lease { ask, .. } = &line.waiters.front()?.wish else { return None };
        let next = succeed(ask, line.wanted)?;
        let waiter = line.waiters.pop_front()?;
        drop(lines);
        self.unfile(&waiter);
        Some((waiter, next))
    }

    /// A task of this process holds the lock now. `wanted` tells whether others want it.
    pub(crate) fn hold(&self, key: &Key, lease: &Arc<Lease>, wanted: Option<bool>) {
        let mut lines = self.lines();
        lines.trouble = None;
        let Some(line) = lines.by_key.get_mut(key) else { return };
        line.holder = Arc::downgrade(lease);
        // What was said meanwhile is newer than the answer.
        line.wanted |= wanted.unwrap_or(false);
        line.place = None;
        line.word = Word::Taken { free_in: None };
    }

    /// From now on the line asks the store under this name, and waits for the returned bell.
    pub(crate) fn stand(&self, key: &Key, owner: Owner) -> Arc<Notify> {
        let mut lines = self.lines();
        let line = lines.by_key.entry(key.clone()).or_default();
        line.place = Some(owner);
        line.wanted = false;
        line.wake.get_or_insert_default().clone()
    }

    /// Has several lines wake the same task.
    pub(crate) fn wake_by(&self, keys: &[Key], wake: &Arc<Notify>) {
        let mut lines = self.lines();
        for key in keys {
            if let Some(line) = lines.by_key.get_mut(key) {
                line.wake = Some(wake.clone());
            }
        }
    }

    /// From now on the task that has the turns of several keys asks the store for any of them under this name.
    pub(crate) fn stand_in_all(&self, keys: &[Key], owner: Owner) {
        let mut lines = self.lines();
        for key in keys {
            if let Some(line) = lines.by_key.get_mut(key) {
                line.place = Some(owner);
            }
        }
    }

    /// Whether the lock of `key` has not been left free for as long as `every`.
    pub(crate) fn is_stuffy(&self, key: &Key, every: Duration, now: Instant) -> bool {
        let lines = self.lines();
        let since = lines.by_key.get(key).and_then(|line| line.shut_since);
        since.is_some_and(|since| now.since(since) >= every)
    }

    /// The lock of `key` is left free now.
    pub(crate) fn air(&self, key: &Key, now: Instant) {
        if let Some(line) = self.lines().by_key.get_mut(key) {
            line.shut_since = Some(now);
        }
    }

    /// Somebody waits for the lock and will ask the store for it next.
    pub(crate) fn heir(&self, key: &Key) -> Option<Arc<Ask>> {
        let lines = self.lines();
        match &lines.by_key.get(key)?.waiters.front()?.wish {
            Wish::Lease { ask, .. } => Some(ask.clone()),
            Wish::Turn { .. } => None,
        }
    }

    /// Tells those in line what the store says.
    pub(crate) fn spread(&self, keys: &[Key], word: &Word) {
        let mut lines = self.lines();
        match word {
            Word::Taken { .. } => lines.trouble = None,
            // A refusal may be about this key alone.
            Word::Failed(error) if error.failure() != Failure::Refused => {
                lines.trouble = Some(error.clone());
            }
            Word::NothingAsked | Word::Asked(_) | Word::Failed(_) => {}
        }
        for key in keys {
            if let Some(line) = lines.by_key.get_mut(key) {
                line.word = word.clone();
            }
        }
    }

    /// Refuses the waiters of `key` that `is_due` picks, with what the store said last.
    pub(crate) fn refuse(&self, key: &Key, now: Instant, is_due: impl Fn(usize, &Waiter) -> bool) {
        let mut lines = self.lines();
        let Some(line) = lines.by_key.get_mut(key) else { return };
        let mut refused = Vec::new();
        for (at, waiter) in std::mem::take(&mut line.waiters).into_iter().enumerate() {
            if is_due(at, &waiter) {
                refused.push(waiter);
            } else {
                line.waiters.push_back(waiter);
            }
        }
        let verdicts: Vec<_> =
            refused.iter().map(|waiter| lines.verdict(key, waiter.wish.wait(), now)).collect();
        drop(lines);
        for (waiter, verdict) in refused.into_iter().zip(verdicts) {
            self.unfile(&waiter);
            waiter.wish.refuse(verdict);
        }
    }

    /// What to tell somebody whose wait for `key` ends now.
    pub(crate) fn verdict(&self, key: &Key, wait: Wait, now: Instant) -> LockError {
        self.lines().verdict(key, wait, now)
    }

    /// Something happened to `key`. Wakes who waits for it; returns who holds it.
    pub(crate) fn stir(&self, key: &str) -> Option<Arc<Lease>> {
        let mut lines = self.lines();
        let line = lines.by_key.get_mut(key)?;
        line.stir();
        line.holder.upgrade()
    }

    /// Something may have happened to every key.
    pub(crate) fn stir_all(&self) -> Vec<Arc<Lease>> {
        let mut lines = self.lines();
        let stir = |line: &mut Line| {
            line.stir();
            // Whoever waits may have said so while nobody listened.
            line.wanted = true;
            line.holder.upgrade()
        };
        lines.by_key.values_mut().filter_map(stir).collect()
    }

    /// The store calls the line of `key` by the name under which it asks: at `by` at the latest, the lock
    /// is its own. False if that is not its name.
    pub(crate) fn call(&self, key: &str, owner: &Owner, by: Instant) -> bool {
        let mut lines = self.lines();
        let Some(line) = lines.by_key.get_mut(key) else { return false };
        if line.place == Some(*owner) {
            line.look_at(by);
            return true;
        }
        // Who holds it by that name has no need of the call, and must not lose it for that.
        let holder = line.holder.upgrade();
        drop(lines);
        holder.is_some_and(|holder| holder.owner == *owner)
    }

    /// When to look at the store for one of `keys`, if it has said so since this was last asked.
    pub(crate) fn take_look(&self, keys: &[Key]) -> Option<Instant> {
        let mut lines = self.lines();
        keys.iter().filter_map(|key| lines.by_key.get_mut(key)?.look_at.take()).min()
    }

    /// Others want `key`.
    pub(crate) fn want(&self, key: &str) {
        if let Some(line) = self.lines().by_key.get_mut(key) {
            line.wanted = true;
        }
    }

    /// Turns everybody away who waits, and everybody who comes later.
    pub(crate) fn close(&self) {
        let mut lines = self.lines();
        lines.closed = true;
        let waiters: Vec<_> =
            lines.by_key.values_mut().flat_map(|line| std::mem::take(&mut line.waiters)).collect();
        drop(lines);
        for waiter in waiters {
            waiter.wish.refuse(LockError::shutdown());
        }
    }

    /// Sends waiters away when their deadline has passed. Runs on the driver for the life of the pool.
    pub(crate) async fn expire(self: Arc<Self>, clock: Clock) {
        loop {
            self.deadlines.due(clock).await;
            for (key, id) in self.deadlines.take_until(clock.now()) {
                let mut lines = self.lines();
                let Some(waiter) = lines.remove(&key, id) else { continue };
                let verdict = lines.verdict(&key, waiter.wish.wait(), clock.now());
                drop(lines);
                waiter.wish.refuse(verdict);
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.lines().by_key.is_empty()
    }

    fn file(&self, key: &Key, id: u64, deadline: Option<Instant>) {
        if let Some(deadline) = deadline {
            self.deadlines.file(deadline, id, (key.clone(), id));
        }
    }

    fn unfile(&self, waiter: &Waiter) {
        if let Some(deadline) = waiter.deadline {
            self.deadlines.remove(deadline, waiter.id);
        }
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    fn stir(&mut self) {
        self.look_at(Instant::from_nanos(0));
    }

    fn look_at(&mut self, moment: Instant) {
        self.look_at = Some(self.look_at.map_or(moment, |known| known.min(moment)));
        if let Some(wake) = &self.wake {
            wake.notify_one();
        }
    }
}

impl Lines {
    fn verdict(&self, key: &Key, wait: Wait, now: Instant) -> LockError {
        let nothing = Word::default();
        let word = self.by_key.get(key).map_or(&nothing, |line| &line.word);
        word.verdict(wait, now, self.trouble.as_ref())
    }

    fn remove(&mut self, key: &Key, id: u64) -> Option<Waiter> {
        let line = self.by_key.get_mut(key)?;
        let at = line.waiters.iter().position(|waiter| waiter.id == id)?;
        let waiter = line.waiters.remove(at);
        // Whoever asks the store does so for the first.
        if at == 0 {
            line.stir();
        }
        waiter
    }
}

#[cold]
fn full() -> LockError {
    LockError::new(ErrorKind::QueueFull, "too many tasks of this process wait for the lock already")
        .remedy("shed load before this call, or raise `max_waiters` on the pool")
}

/// A wait in line, or for an answer on the way to it. Dropping it leaves the line; what arrives in that
/// instant ends as it is dropped: a guard releases, a turn goes to the next.
#[derive(Debug)]
pub(crate) struct Waiting<T> {
    pub(crate) queue: Arc<Queue>,
    pub(crate) key: Key,
    pub(crate) id: u64,
    /// `None` once called or sent away.
    pub(crate) call: Option<oneshot::Receiver<Result<T, LockError>>>,
    /// The error for an answer that will never come.
    pub(crate) gone: fn() -> LockError,
}

impl<T> Future for Waiting<T> {
    type Output = Result<T, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(call) = &mut self.call else { return Poll::Pending };
        let answer = ready!(Pin::new(call).poll(cx));
        self.call = None;
        Poll::Ready(answer.unwrap_or_else(|_| Err((self.gone)())))
    }
}

impl<T> Drop for Waiting<T> {
    fn drop(&mut self) {
        // Closed first: whoever is about to put it in line sees that it is gone, or it is found there.
        if let Some(call) = self.call.take() {
            drop(call);
            self.queue.leave(&self.key, self.id);
        }
    }
}
