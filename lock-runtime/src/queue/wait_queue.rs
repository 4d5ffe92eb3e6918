//! Who of this process wants a key: one line per key, first come, first served.
//!
//! Whoever has the [`Turn`] of a key acts for its line: asks the store, holds the lock, lets it go. The
//! others wait in it. This file moves waiters only; it asks the store nothing.
//!
//! A request for several keys takes the permits of all of them in one step, or none:
//!
//! 1. **One place at a time.** It waits in the line of one key that it cannot have, the one whose permit is out for
//!    the longest time. So it keeps no key from other tasks. Its rank is the order of its coming, in each line.
//! 2. **It moves on.** When its turn comes there and another key is missing, it moves to the line of that key, and
//!    the next waiter goes.
//! 3. **It keeps a key, for a while.** A request that has waited for [`KEEP_AFTER`] keeps the permit of a key that
//!    comes back from later ranks, and has the next missing key kept too. So keys that are never free at once are
//!    had in the end. After [`free_after`] it gives way: all goes back, and the keys stay open for as long as they
//!    were kept. The time doubles with every try that fails.
//! 4. **The earlier rank wins.** A key that is kept for a later rank is free for an earlier one. So no two requests
//!    wait for each other.
//!
//! What holds whenever the lines are unlocked: a waiter is in a line whose permit is out, or kept for an earlier
//! rank. A permit that is neither out nor kept has no waiters.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use crate::api::guard::LockGuard;
use crate::backend::{BackendError, FailureKind, Owner};
use crate::base::clock::{Clock, Instant};
use crate::base::error::{ErrorKind, LockError};
use crate::base::key::Key;
use crate::base::options::Wait;
use crate::base::process::Process;
use crate::base::sync::{Mutex, MutexGuard};
use crate::exec::driver::Driver;
use crate::exec::panic_boundary;
use crate::exec::timer_queue::Deadlines;
use crate::lease::lease::Lease;
use crate::lock::acquire::Ask;
use crate::queue::last_answer::Word;
use crate::queue::permit::Turn;

/// How long a request for several keys waits before it keeps one of them from later ranks.
const KEEP_AFTER: Duration = Duration::from_millis(10);

fn keep_after() -> Duration {
    // Clocks stand still there.
    #[cfg(test)]
    if crate::base::sync::scheduler::by_chance() {
        return Duration::ZERO;
    }
    KEEP_AFTER
}

/// How long a request for several keys keeps some of them while others are missing, after `failures` such tries:
/// from 50 ms to 1.6 s, less than the default wait of a single key.
fn free_after(failures: u32) -> Duration {
    Duration::from_millis(50 << failures.min(5))
}

/// The lines of a pool.
#[derive(Debug)]
pub(crate) struct Queue {
    lines: Mutex<Lines>,
    clock: Clock,
    /// Who is to be sent away when.
    deadlines: Deadlines<(Key, u64)>,
    max_waiters: usize,
    /// Of the pool.
    process: Process,
}

#[derive(Debug, Default)]
struct Lines {
    /// A key has a line as long as its permit is out or kept, or a request for several keys asks the store for it.
    by_key: HashMap<Key, Line>,
    /// In which line each request for several keys waits.
    places: HashMap<u64, Key>,
    /// The last failure of any key, until the store answers again.
    trouble: Option<BackendError>,
    last_id: u64,
    closed: bool,
}

#[derive(Debug, Default)]
struct Line {
    permit: Permit,
    /// By rank.
    waiters: BTreeMap<u64, Waiter>,
    /// The rank of the request for several keys for which the permit is kept, from all later ranks.
    kept_for: Option<u64>,
    /// The permit is not kept again before this moment.
    open_until: Option<Instant>,
    /// Requests for several keys that ask the store for this one too.
    stands: Vec<Stand>,
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

/// Where the permit of a line is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Permit {
    #[default]
    Here,
    /// In use since then.
    Out(Instant),
}

/// A request for several keys, for one of which the store is asked.
#[derive(Debug)]
struct Stand {
    id: u64,
    /// The name under which it asks.
    owner: Owner,
    wake: Arc<Notify>,
    look_at: Option<Instant>,
    /// Whether the store says that others want the key.
    wanted: bool,
}

/// What a request waits for that wants the permits of several keys.
#[derive(Debug)]
pub(crate) struct Several {
    keys: Arc<[Key]>,
    wait: Wait,
    reply: oneshot::Sender<Result<Turn, LockError>>,
    /// Tells the request that some of its keys are kept.
    wake: Arc<Notify>,
    /// Since when some are.
    kept_since: Option<Instant>,
    failures: u32,
    /// No key is kept before this moment.
    keep_from: Instant,
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
    /// The turns of several keys.
    Several(Box<Several>),
}

impl Wish {
    fn wait(&self) -> Wait {
        match self {
            Self::Lease { ask, .. } => ask.policy.wait,
            Self::Several(several) => several.wait,
        }
    }

    fn refuse(self, error: LockError) {
        match self {
            Self::Lease { reply, .. } => panic_boundary::answer(reply, Err(error)),
            Self::Several(several) => panic_boundary::answer(several.reply, Err(error)),
        }
    }

    fn is_gone(&self) -> bool {
        match self {
            Self::Lease { reply, .. } => reply.is_closed(),
            Self::Several(several) => several.reply.is_closed(),
        }
    }
}

/// Who joins a line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Newcomer {
    pub(crate) now: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) wait: Wait,
}

impl Newcomer {
    pub(crate) fn new(now: Instant, wait: Wait) -> Self {
        let deadline = match wait {
            Wait::For(wait) => Some(now + wait),
            Wait::Forever => None,
        };
        Self { now, deadline, wait }
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

/// What is next for keys whose turns were given back.
#[derive(Debug)]
pub(crate) enum Next {
    /// A line in which a task waits for the lock: its keys, one.
    Line(Arc<[Key]>),
    /// A request for the turns of these keys.
    Several(Arc<[Key]>, oneshot::Sender<Result<Turn, LockError>>),
}

/// The waiter that goes next when the permit of its line is free.
enum Candidate {
    Lease(u64),
    Several(u64),
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
    pub(crate) fn new(max_waiters: usize, clock: Clock) -> Self {
        let (lines, deadlines) = (Mutex::default(), Deadlines::default());
        Self { lines, clock, deadlines, max_waiters, process: Process::current() }
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
        let Newcomer { now, deadline, wait } = *newcomer;
        let Some(line) = lines.by_key.get_mut(key) else {
            lines.by_key.insert(key.clone(), Line::taken(now));
            return Ok((id, Entered::First(given)));
        };
        if line.is_open() {
            line.permit = Permit::Out(now);
            line.word = Word::Asked(now);
            line.shut_since = Some(now);
            return Ok((id, Entered::First(given)));
        }
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(lines.verdict(key, wait, now));
        }
        if line.waiters.len() >= self.max_waiters {
            return Err(full());
        }
        let wish = wish(given);
        line.add(Waiter { id, since: now, deadline, attempts: 0, wish });
        self.file(key, id, deadline);
        Ok((id, Entered::Behind))
    }

    /// The rank of a new request for several keys.
    pub(crate) fn rank(&self) -> u64 {
        let mut lines = self.lines();
        lines.last_id += 1;
        lines.last_id
    }

    /// Asks for the turns of all of `keys` at once. `reply` comes back if they are the caller's; otherwise it is
    /// answered once they are. `wake` is notified when [`gives_way_at`](Self::gives_way_at) changes. With
    /// `comes_again` the request has had its turns before.
    pub(crate) fn enter_several(
        &self,
        id: u64,
        keys: &Arc<[Key]>,
        newcomer: &Newcomer,
        wake: &Arc<Notify>,
        reply: oneshot::Sender<Result<Turn, LockError>>,
        comes_again: bool,
    ) -> Result<Entered<oneshot::Sender<Result<Turn, LockError>>>, LockError> {
        let mut lines = self.lines();
        if lines.closed {
            return Err(LockError::shutdown());
        }
        let now = self.clock.now();
        let Some(at) = lines.missing(id, keys, None) else {
            lines.take(id, keys, now);
            return Ok(Entered::First(reply));
        };
        let Newcomer { now: since, deadline, wait } = *newcomer;
        let key = &keys[at];
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(lines.verdict(key, wait, now));
        }
        let Some(line) = lines.by_key.get_mut(key) else { return Err(Driver::gone()) };
        if !comes_again && line.waiters.len() >= self.max_waiters {
            return Err(full());
        }
        let several = Several {
            keys: keys.clone(),
            wait,
            reply,
            wake: wake.clone(),
            kept_since: None,
            failures: 0,
            keep_from: since + keep_after(),
        };
        let wish = Wish::Several(Box::new(several));
        line.add(Waiter { id, since, deadline, attempts: 0, wish });
        lines.places.insert(id, key.clone());
        Ok(Entered::Behind)
    }

    /// When the request for several keys has to give back those that are kept for it, if some are.
    pub(crate) fn gives_way_at(&self, id: u64) -> Option<Instant> {
        let lines = self.lines();
        let key = lines.places.get(&id)?;
        match &lines.by_key.get(key)?.waiters.get(&id)?.wish {
            Wish::Several(several) => {
                several.kept_since.map(|since| since + free_after(several.failures))
            }
            Wish::Lease { .. } => None,
        }
    }

    /// The keys that are kept for the request `id` are kept no more, for as long again.
    pub(crate) fn give_way(&self, id: u64) -> Vec<Next> {
        let now = self.clock.now();
        let mut lines = self.lines();
        let Lines { by_key, places, .. } = &mut *lines;
        let Some(line) = places.get(&id).and_then(|key| by_key.get_mut(key)) else {
            return Vec::new();
        };
        let Some(Wish::Several(several)) = line.waiters.get_mut(&id).map(|waiter| &mut waiter.wish)
        else {
            return Vec::new();
        };
        let Some(since) = several.kept_since.take() else { return Vec::new() };
        let open_until = now + now.since(since);
        several.failures += 1;
        several.keep_from = open_until;
        let keys = several.keys.clone();
        lines.keep_no_more(id, &keys, Some(open_until));
        let nexts = lines.settle(&keys, self.clock);
        #[cfg(test)]
        lines.check();
        nexts
    }

    /// A request for several keys does not wait for their turns any more.
    pub(crate) fn leave_several(&self, id: u64) -> Vec<Next> {
        let mut lines = self.lines();
        let Some(waiter) = lines.remove_several(id) else { return Vec::new() };
        let Wish::Several(several) = &waiter.wish else { return Vec::new() };
        let nexts = lines.settle(&several.keys, self.clock);
        #[cfg(test)]
        lines.check();
        drop(lines);
        nexts
    }

    /// Takes the turns of those of `keys` that are free.
    pub(crate) fn take_free(&self, keys: &[Key]) -> Vec<Key> {
        let now = self.clock.now();
        let mut lines = self.lines();
        let mut take = |key: &&Key| {
            let Some(line) = lines.by_key.get_mut(*key) else {
                lines.by_key.insert((*key).clone(), Line::taken(now));
                return true;
            };
            let is_open = line.is_open();
            if is_open {
                line.permit = Permit::Out(now);
            }
            is_open
        };
        keys.iter().filter(&mut take).cloned().collect()
    }

    /// Puts a waiter that asked the store in vain at its place in the line, unless it is gone meanwhile.
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
        lines.line(key, self.clock).add(waiter);
        self.file(key, id, deadline);
    }

    /// Takes somebody out of the line, who does not wait any more.
    fn leave(&self, key: &Key, id: u64) {
        let mut lines = self.lines();
        let Some(waiter) = lines.remove(key, id) else { return };
        drop(lines);
        self.unfile(&waiter);
    }

    /// The turns of `keys` were given back.
    pub(crate) fn pass(&self, keys: &[Key]) -> Vec<Next> {
        let mut lines = self.lines();
        for key in keys {
            if let Some(line) = lines.by_key.get_mut(key) {
                line.come_back();
                if line.is_vacant() {
                    lines.by_key.remove(key);
                }
            }
        }
        let nexts = match keys {
            [key] => lines.settle_one(key, self.clock).into_iter().collect(),
            _ => lines.settle(keys, self.clock),
        };
        #[cfg(test)]
        lines.check();
        nexts
    }

    /// The lines of `keys` can be acted for no more.
    pub(crate) fn dissolve(&self, keys: &[Key], error: &LockError) -> Vec<Next> {
        let mut refused = Vec::new();
        let mut nexts = Vec::new();
        let mut lines = self.lines();
        for key in keys {
            let Some(line) = lines.by_key.get_mut(key) else { continue };
            for (id, waiter) in std::mem::take(&mut line.waiters) {
                if let Wish::Several(several) = &waiter.wish {
                    lines.places.remove(&id);
                    lines.keep_no_more(id, &several.keys, None);
                    nexts.extend(lines.settle(&several.keys, self.clock));
                }
                refused.push(waiter);
            }
            if let Some(line) = lines.by_key.get_mut(key) {
                line.come_back();
            }
            lines.remove_if_vacant(key);
        }
        drop(lines);
        for waiter in refused {
            self.unfile(&waiter);
            waiter.wish.refuse(error.clone());
        }
        nexts
    }

    /// The first in line, if it waits for the lock.
    pub(crate) fn front(&self, key: &Key) -> Option<Front> {
        let mut lines = self.lines();
        let Some(Candidate::Lease(id)) = lines.candidate(key, self.clock) else { return None };
        let line = lines.by_key.get_mut(key)?;
        let behind = line.waiters.len().saturating_sub(1);
        let waiter = line.waiters.get_mut(&id)?;
        let Wish::Lease { ask, .. } = &waiter.wish else { return None };
        waiter.attempts += 1;
        Some(Front { id, ask: ask.clone(), deadline: waiter.deadline, behind })
    }

    /// Takes out the waiter `id` if it still waits, or the first in line if it wants the lock and `fits`.
    pub(crate) fn take_front(
        &self,
        key: &Key,
        id: u64,
        fits: impl FnOnce(&Ask) -> bool,
    ) -> Option<Waiter> {
        let mut lines = self.lines();
        let is_here = lines.by_key.get(key).is_some_and(|line| line.waiters.contains_key(&id));
        let id = if is_here {
            id
        } else {
            let Some(Candidate::Lease(first)) = lines.candidate(key, self.clock) else {
                return None;
            };
            let Wish::Lease { ask, .. } = &lines.by_key.get(key)?.waiters.get(&first)?.wish else {
                return None;
            };
            if !fits(ask) {
                return None;
            }
            first
        };
        let waiter = lines.by_key.get_mut(key)?.waiters.remove(&id)?;
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
        let Some(Candidate::Lease(id)) = lines.candidate(key, self.clock) else { return None };
        let line = lines.by_key.get_mut(key)?;
        let Wish::Lease { ask, .. } = &line.waiters.get(&id)?.wish else { return None };
        let next = succeed(ask, line.wanted)?;
        let waiter = line.waiters.remove(&id)?;
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
        line.word = Word::Taken { expires_in: None };
        // Unless it was lost at once, and its turn has passed on.
        if let Permit::Out(since) = &mut line.permit {
            *since = lease.granted_at;
        }
    }

    /// From now on the line asks the store under this name, and waits for the returned notifier.
    pub(crate) fn stand(&self, key: &Key, owner: Owner) -> Arc<Notify> {
        let mut lines = self.lines();
        let line = lines.line(key, self.clock);
        line.place = Some(owner);
        line.wanted = false;
        line.wake.get_or_insert_default().clone()
    }

    /// From now on the request `id` asks the store for any of `keys` under this name, and `wake` is notified when
    /// something happens to one of them.
    pub(crate) fn stand_in_all(&self, keys: &[Key], id: u64, owner: Owner, wake: &Arc<Notify>) {
        let mut lines = self.lines();
        for key in keys {
            let line = lines.by_key.entry(key.clone()).or_default();
            match line.stands.iter_mut().find(|stand| stand.id == id) {
                Some(stand) => stand.owner = owner,
                None => {
                    let wake = wake.clone();
                    let stand = Stand { id, owner, wake, look_at: None, wanted: false };
                    line.stands.push(stand);
                }
            }
        }
    }

    /// The request `id` does not ask the store any more.
    pub(crate) fn stand_down(&self, keys: &[Key], id: u64) {
        // A fork may have copied the mutex while it was locked.
        if !self.process.is_current() {
            return;
        }
        let mut lines = self.lines();
        for key in keys {
            if let Some(line) = lines.by_key.get_mut(key) {
                line.stands.retain(|stand| stand.id != id);
            }
            lines.remove_if_vacant(key);
        }
    }

    /// Whether others want one of `keys`, which the request `id` has at the store: others in the store's line, or
    /// of this process in the line of a key.
    pub(crate) fn is_wanted<'a>(&self, mut keys: impl Iterator<Item = &'a Key>, id: u64) -> bool {
        let lines = self.lines();
        keys.any(|key| {
            lines.by_key.get(key).is_some_and(|line| {
                !line.waiters.is_empty()
                    || line.stands.iter().any(|stand| stand.id == id && stand.wanted)
            })
        })
    }

    /// The request `id` has let go of `keys` at the store.
    pub(crate) fn want_no_more<'a>(&self, keys: impl Iterator<Item = &'a Key>, id: u64) {
        let mut lines = self.lines();
        for key in keys {
            if let Some(line) = lines.by_key.get_mut(key) {
                line.stands
                    .iter_mut()
                    .filter(|stand| stand.id == id)
                    .for_each(|stand| stand.wanted = false);
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
        let mut lines = self.lines();
        let Some(Candidate::Lease(id)) = lines.candidate(key, self.clock) else { return None };
        match &lines.by_key.get(key)?.waiters.get(&id)?.wish {
            Wish::Lease { ask, .. } => Some(ask.clone()),
            Wish::Several(_) => None,
        }
    }

    /// Tells those in line what the store says.
    pub(crate) fn spread(&self, keys: &[Key], word: &Word) {
        let mut lines = self.lines();
        match word {
            Word::Taken { .. } => lines.trouble = None,
            // A refusal may be about this key alone.
            Word::Failed(error) if error.kind() != FailureKind::Rejected => {
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

    /// Refuses the waiters of `key` that `is_due` picks, with what the store said last. `is_due` is told how many
    /// waiters for the lock are in front.
    pub(crate) fn refuse(
        &self,
        key: &Key,
        now: Instant,
        is_due: impl Fn(usize, &Waiter) -> bool,
    ) -> Vec<Next> {
        let mut lines = self.lines();
        let Some(line) = lines.by_key.get_mut(key) else { return Vec::new() };
        let mut in_front = 0;
        let mut due = Vec::new();
        for (&id, waiter) in &line.waiters {
            if is_due(in_front, waiter) {
                due.push(id);
            }
            in_front += usize::from(matches!(waiter.wish, Wish::Lease { .. }));
        }
        let mut refused = Vec::new();
        let mut nexts = Vec::new();
        for id in due {
            let is_several = lines.places.contains_key(&id);
            let waiter = if is_several {
                lines.remove_several(id)
            } else {
                lines.by_key.get_mut(key).and_then(|line| line.waiters.remove(&id))
            };
            let Some(waiter) = waiter else { continue };
            if let Wish::Several(several) = &waiter.wish {
                nexts.extend(lines.settle(&several.keys, self.clock));
            }
            refused.push((lines.verdict(key, waiter.wish.wait(), now), waiter));
        }
        drop(lines);
        for (verdict, waiter) in refused {
            self.unfile(&waiter);
            waiter.wish.refuse(verdict);
        }
        nexts
    }

    /// What to tell somebody whose wait for `key` ends now.
    pub(crate) fn verdict(&self, key: &Key, wait: Wait, now: Instant) -> LockError {
        self.lines().verdict(key, wait, now)
    }

    /// What to tell the request `id` for several keys if its wait for their turns ends now.
    pub(crate) fn verdict_of(&self, id: u64, wait: Wait, now: Instant) -> LockError {
        let lines = self.lines();
        match lines.places.get(&id) {
            Some(key) => lines.verdict(key, wait, now),
            None => Word::default().verdict(wait, now, lines.trouble.as_ref()),
        }
    }

    /// The last failure of any key, until the store answers again.
    pub(crate) fn trouble(&self) -> Option<BackendError> {
        self.lines().trouble.clone()
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
            line.want();
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
        if let Some(stand) = line.stands.iter_mut().find(|stand| stand.owner == *owner) {
            stand.look_at(by);
            return true;
        }
        // Who holds it by that name has no need of the call, and must not lose it for that.
        let holder = line.holder.upgrade();
        drop(lines);
        holder.is_some_and(|holder| holder.owner == *owner)
    }

    /// When to look at the store for `key`, if it has said so since this was last asked.
    pub(crate) fn take_look(&self, key: &Key) -> Option<Instant> {
        self.lines().by_key.get_mut(key)?.look_at.take()
    }

    /// When the request `id` has to look at the store for one of `keys`, as [`take_look`](Self::take_look).
    pub(crate) fn take_looks(&self, keys: &[Key], id: u64) -> Option<Instant> {
        let mut lines = self.lines();
        let look = |key: &Key| {
            let stands = &mut lines.by_key.get_mut(key)?.stands;
            stands.iter_mut().find(|stand| stand.id == id)?.look_at.take()
        };
        keys.iter().filter_map(look).min()
    }

    /// Others want `key`.
    pub(crate) fn want(&self, key: &str) {
        if let Some(line) = self.lines().by_key.get_mut(key) {
            line.want();
        }
    }

    /// Turns everybody away who waits, and everybody who comes later.
    pub(crate) fn close(&self) {
        let mut lines = self.lines();
        lines.closed = true;
        lines.places.clear();
        let mut waiters = Vec::new();
        lines.by_key.retain(|_, line| {
            waiters.extend(std::mem::take(&mut line.waiters).into_values());
            line.kept_for = None;
            !line.is_vacant()
        });
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

    /// As if the time of all that keep keys were over.
    #[cfg(test)]
    pub(crate) fn all_give_way(&self) -> Vec<Next> {
        let ids: Vec<_> = self.lines().places.keys().copied().collect();
        ids.into_iter().flat_map(|id| self.give_way(id)).collect()
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
    /// A line whose permit goes out.
    fn taken(now: Instant) -> Self {
        let (permit, word) = (Permit::Out(now), Word::Asked(now));
        Self { permit, word, shut_since: Some(now), ..Self::default() }
    }

    /// Whether the permit is for the next task that comes.
    fn is_open(&self) -> bool {
        self.permit == Permit::Here && self.kept_for.is_none()
    }

    fn is_vacant(&self) -> bool {
        self.is_open() && self.waiters.is_empty() && self.stands.is_empty()
    }

    /// Since when the permit is not to be had for a request of rank `id`; `None` if it is.
    fn missing_since(&self, id: u64) -> Option<Instant> {
        match (self.permit, self.kept_for) {
            (Permit::Out(since), _) => Some(since),
            (Permit::Here, Some(rank)) if rank < id => Some(Instant::from_nanos(u64::MAX)),
            (Permit::Here, _) => None,
        }
    }

    /// Whether it may be kept for a request of rank `id`.
    fn may_be_kept(&self, id: u64, now: Instant) -> bool {
        self.kept_for.is_none_or(|rank| rank >= id)
            && self.open_until.is_none_or(|until| until <= now)
    }

    fn add(&mut self, waiter: Waiter) {
        self.waiters.insert(waiter.id, waiter);
        // A request for several keys that has this one gives it back sooner.
        for stand in &self.stands {
            stand.wake.notify_one();
        }
    }

    /// The permit is given back.
    fn come_back(&mut self) {
        self.permit = Permit::Here;
        self.holder = Weak::new();
        self.wake = None;
        self.place = None;
        self.look_at = None;
        self.wanted = false;
    }

    fn stir(&mut self) {
        self.look_at(Instant::from_nanos(0));
        for stand in &mut self.stands {
            stand.look_at(Instant::from_nanos(0));
        }
    }

    fn want(&mut self) {
        self.wanted = true;
        for stand in &mut self.stands {
            stand.wanted = true;
            stand.wake.notify_one();
        }
    }

    fn look_at(&mut self, moment: Instant) {
        self.look_at = Some(self.look_at.map_or(moment, |known| known.min(moment)));
        if let Some(wake) = &self.wake {
            wake.notify_one();
        }
    }
}

impl Stand {
    fn look_at(&mut self, moment: Instant) {
        self.look_at = Some(self.look_at.map_or(moment, |known| known.min(moment)));
        self.wake.notify_one();
    }
}

impl Lines {
    fn verdict(&self, key: &Key, wait: Wait, now: Instant) -> LockError {
        let nothing = Word::default();
        let word = self.by_key.get(key).map_or(&nothing, |line| &line.word);
        word.verdict(wait, now, self.trouble.as_ref())
    }

    /// The line of `key`, whose turn the caller has.
    fn line(&mut self, key: &Key, clock: Clock) -> &mut Line {
        self.by_key.entry(key.clone()).or_insert_with(|| Line::taken(clock.now()))
    }

    fn remove(&mut self, key: &Key, id: u64) -> Option<Waiter> {
        let line = self.by_key.get_mut(key)?;
        let waiter = line.waiters.remove(&id)?;
        let is_lease = |waiter: &Waiter| matches!(waiter.wish, Wish::Lease { .. });
        // The store is asked for the first that wants the lock.
        if !line.waiters.range(..id).any(|(_, waiter)| is_lease(waiter)) {
            line.stir();
        }
        Some(waiter)
    }

    /// Takes out a request for several keys, for which none is kept any more. The lines of its keys are to be
    /// settled.
    fn remove_several(&mut self, id: u64) -> Option<Waiter> {
        let key = self.places.remove(&id)?;
        let waiter = self.remove(&key, id)?;
        if let Wish::Several(several) = &waiter.wish {
            self.keep_no_more(id, &several.keys, None);
        }
        Some(waiter)
    }

    fn remove_if_vacant(&mut self, key: &Key) {
        if self.by_key.get(key).is_some_and(Line::is_vacant) {
            self.by_key.remove(key);
        }
    }

    /// Which of `keys` a request of rank `id` has to wait for: of those that it cannot have, the one that has been
    /// out for the longest time. It most likely stays the longest. `given` is one that the caller gives it.
    fn missing(&self, id: u64, keys: &[Key], given: Option<&Key>) -> Option<usize> {
        let missing = keys.iter().enumerate().filter_map(|(at, key)| {
            let line = self.by_key.get(key)?;
            if given == Some(key) {
                return None;
            }
            line.missing_since(id).map(|since| (since, at))
        });
        missing.min().map(|(_, at)| at)
    }

    /// The permits of all of `keys` go out to the request `id`.
    fn take(&mut self, id: u64, keys: &[Key], now: Instant) {
        for key in keys {
            match self.by_key.get_mut(key) {
                Some(line) => {
                    line.permit = Permit::Out(now);
                    line.kept_for = line.kept_for.filter(|rank| *rank != id);
                }
                None => {
                    let line = Line { word: Word::NothingAsked, ..Line::taken(now) };
                    self.by_key.insert(key.clone(), line);
                }
            }
        }
    }

    /// Fails if the lines are not as the head of this file says.
    #[cfg(test)]
    fn check(&self) {
        for (key, line) in &self.by_key {
            if line.permit == Permit::Here {
                let rank = line.kept_for;
                let are_later = |rank| line.waiters.keys().all(|id| rank < *id);
                let is_right = rank.map_or(line.waiters.is_empty(), are_later);
                assert!(is_right, "a free permit and waiters: {key}, {line:?}");
            }
            if let Some(rank) = line.kept_for {
                assert!(self.places.contains_key(&rank), "{key} is kept for no request: {line:?}");
            }
        }
        for (id, key) in &self.places {
            let line = self.by_key.get(key);
            let waiter = line.and_then(|line| line.waiters.get(id));
            let is_several = waiter.is_some_and(|waiter| matches!(waiter.wish, Wish::Several(_)));
            assert!(is_several, "a place without its waiter: {key}");
        }
        let several = |line: &Line| {
            let is_several = |waiter: &&Waiter| matches!(waiter.wish, Wish::Several(_));
            line.waiters.values().filter(is_several).count()
        };
        assert_eq!(self.by_key.values().map(several).sum::<usize>(), self.places.len());
    }

    /// None of `keys` is kept for the request `id` any more, nor for another one before `open_until`.
    fn keep_no_more(&mut self, id: u64, keys: &[Key], open_until: Option<Instant>) {
        for key in keys {
            if let Some(line) = self.by_key.get_mut(key)
                && line.kept_for == Some(id)
            {
                line.kept_for = None;
                line.open_until = open_until;
            }
        }
    }

    /// The waiter that goes next if the permit of `key` is free for it. Requests for several keys that come before
    /// it and miss another key move on.
    fn candidate(&mut self, key: &Key, clock: Clock) -> Option<Candidate> {
        loop {
            let line = self.by_key.get_mut(key)?;
            let (&id, waiter) = line.waiters.first_key_value()?;
            if line.kept_for.is_some_and(|rank| rank < id) {
                return None;
            }
            let Wish::Several(several) = &waiter.wish else { return Some(Candidate::Lease(id)) };
            let keys = several.keys.clone();
            match self.missing(id, &keys, Some(key)) {
                None => return Some(Candidate::Several(id)),
                Some(at) => self.move_on(id, key, &keys[at], clock.now())?,
            }
        }
    }

    /// The request `id`, whose turn has come in the line of `key`, waits for `missing` from now on. It may keep `key`
    /// meanwhile.
    fn move_on(&mut self, id: u64, key: &Key, missing: &Key, now: Instant) -> Option<()> {
        let line = self.by_key.get_mut(key)?;
        let mut waiter = line.waiters.remove(&id)?;
        if let Wish::Several(several) = &mut waiter.wish
            && several.keep_from <= now
            && line.may_be_kept(id, now)
        {
            line.kept_for = Some(id);
            if several.kept_since.is_none() {
                several.kept_since = Some(now);
                several.wake.notify_one();
            }
            if let Some(line) = self.by_key.get_mut(missing)
                && line.may_be_kept(id, now)
            {
                line.kept_for = Some(id);
            }
        }
        self.places.insert(id, missing.clone());
        self.by_key.get_mut(missing)?.add(waiter);
        Some(())
    }

    /// Gives the permits of `keys` that are free to those that wait for them.
    fn settle(&mut self, keys: &[Key], clock: Clock) -> Vec<Next> {
        let mut nexts = Vec::new();
        let first = |key: &Key| {
            let first = self.by_key.get(key).and_then(|line| line.waiters.keys().next());
            first.copied().unwrap_or(u64::MAX)
        };
        let mut order: Vec<_> = keys.iter().map(|key| (first(key), key)).collect();
        order.sort_unstable_by_key(|(rank, _)| *rank);
        for (_, key) in order {
            if let Some(next) = self.settle_one(key, clock) {
                nexts.push(next);
            }
        }
        nexts
    }

    fn settle_one(&mut self, key: &Key, clock: Clock) -> Option<Next> {
        if self.by_key.get(key)?.permit != Permit::Here {
            return None;
        }
        let Some(candidate) = self.candidate(key, clock) else {
            self.remove_if_vacant(key);
            return None;
        };
        let line = self.by_key.get_mut(key)?;
        match candidate {
            Candidate::Lease(id) => {
                line.permit = Permit::Out(clock.now());
                match &line.waiters.get(&id)?.wish {
                    Wish::Lease { ask, .. } => Some(Next::Line(ask.wire.clone())),
                    Wish::Several(_) => None,
                }
            }
            Candidate::Several(id) => {
                self.places.remove(&id);
                match line.waiters.remove(&id)?.wish {
                    Wish::Several(several) => {
                        let Several { keys, reply, .. } = *several;
                        self.take(id, &keys, clock.now());
                        Some(Next::Several(keys, reply))
                    }
                    Wish::Lease { .. } => None,
                }
            }
        }
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
        if !self.queue.process.is_current() {
            return Poll::Ready(Err(LockError::inherited()));
        }
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
            if !self.queue.process.is_current() {
                // Its other end is the parent's, and nothing is to be woken here.
                Box::leak(Box::new(call));
                return;
            }
            drop(call);
            self.queue.leave(&self.key, self.id);
        }
    }
}
