//! The protocol of the Redis store in a few lines: a lock, its line, and messages that come when they come.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, LeaseRef, LeaseStatus,
    Notifier, Owner, ReleaseOutcome, ReleaseRequest, WaitMode, Warning,
};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::sync::spawn;

/// Longer than any test runs, since clocks stand still.
const NEVER: Duration = Duration::from_secs(3600);

/// One process's connection.
pub(super) struct Client {
    me: usize,
    server: Arc<Server>,
}

#[derive(Default)]
pub(super) struct Server {
    // Never locked across a point at which shuttle may switch.
    keys: Mutex<Keys>,
    calm: Notify,
    notifiers: Mutex<Vec<Option<Notifier>>>,
}

#[derive(Default)]
struct Keys {
    by_name: HashMap<Key, Lock>,
    last_fence: u64,
    taken_away: HashSet<Owner>,
    /// To whom, and what.
    messages: Vec<(usize, Message)>,
    /// Messages on their way, and what they lead to.
    pending: usize,
    processes: usize,
}

#[derive(Debug, Default)]
struct Lock {
    holder: Option<Token>,
    is_marked: bool,
    line: VecDeque<Token>,
    /// Whom client tracking tells of the next change.
    watchers: HashSet<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Token {
    owner: Owner,
    process: usize,
}

enum Message {
    Changed(Key),
    Called(Key, Owner, Duration),
    Wanted(Key),
}

impl Server {
    pub(super) fn connect(self: &Arc<Self>) -> Client {
        let mut notifiers = self.notifiers.lock().unwrap();
        // Replaced when the pool attaches its own.
        let me = notifiers.len();
        notifiers.push(None);
        self.keys().processes += 1;
        Client { me, server: self.clone() }
    }

    /// Nobody holds anything, and nobody stands in line.
    pub(super) fn is_empty(&self) -> bool {
        self.keys().by_name.values().all(|lock| lock.holder.is_none() && lock.line.is_empty())
    }

    /// Resolves when no message is on its way.
    pub(super) async fn settled(&self) {
        loop {
            let calm = self.calm.notified();
            if self.keys().pending == 0 {
                return;
            }
            calm.await;
        }
    }

    /// Somebody deletes the key. Everybody hears of it: those who do not watch would find it at their next
    /// look, which does not come while clocks stand still.
    pub(super) fn delete(self: &Arc<Self>, key: &Key) {
        let mut keys = self.keys();
        if let Some(lock) = keys.by_name.get_mut(key)
            && let Some(holder) = lock.holder.take()
        {
            lock.is_marked = false;
            keys.taken_away.insert(holder.owner);
            for process in 0..keys.processes {
                keys.messages.push((process, Message::Changed(key.clone())));
            }
        }
        self.send(keys);
    }

    /// Whether a key was deleted while it was `owner`'s.
    pub(super) fn was_taken_away(&self, owner: &Owner) -> bool {
        self.keys().taken_away.contains(owner)
    }

    fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().unwrap()
    }

    /// Each message on its own way, in any order.
    fn send(self: &Arc<Self>, mut keys: MutexGuard<'_, Keys>) {
        let messages = std::mem::take(&mut keys.messages);
        keys.pending += messages.len();
        drop(keys);
        for (process, message) in messages {
            let notifier = self.notifiers.lock().unwrap()[process].clone();
            let server = self.clone();
            spawn(async move {
                if let Some(notifier) = notifier {
                    server.deliver(process, &notifier, message);
                }
                server.keys().pending -= 1;
                server.calm.notify_waiters();
            });
        }
    }

    fn deliver(self: &Arc<Self>, process: usize, notifier: &Notifier, message: Message) {
        match message {
            Message::Changed(key) => notifier.key_changed(key.as_str()),
            Message::Wanted(key) => notifier.contended(key.as_str()),
            Message::Called(key, owner, within) => {
                if !notifier.head_of_queue(key.as_str(), &owner, within) {
                    let mut keys = self.keys();
                    keys.release(&key, Token { owner, process }, None);
                    self.send(keys);
                }
            }
        }
    }
}

impl Keys {
    /// line.lua: claim
    fn claim_in_line(&mut self, key: &Key, token: Token, claim: &AcquireRequest) -> AcquireOutcome {
        let lock = self.by_name.entry(key.clone()).or_default();
        match lock.holder {
            Some(holder) if holder.owner != token.owner => {
                if !lock.line.contains(&token) {
                    lock.line.push_back(token);
                }
                let is_first = lock.line.front() == Some(&token);
                if is_first {
                    lock.watchers.insert(token.process);
                }
                if !std::mem::replace(&mut lock.is_marked, true) || is_first {
                    let wanted = Message::Wanted(key.clone());
                    self.messages.push((holder.process, wanted));
                }
                AcquireOutcome::Contended {
                    expires_in: None,
                    wait_mode: WaitMode::Queued { retry_after: NEVER },
                }
            }
            holder => {
                if holder.is_none() {
                    lock.line.retain(|waiting| *waiting != token);
                    lock.holder = Some(token);
                    lock.is_marked = !lock.line.is_empty();
                }
                let wanted = Some(!lock.line.is_empty());
                self.grant(claim, wanted)
            }
        }
    }

    /// acquire.lua, and `SET NX`
    fn claim(&mut self, token: Token, claim: &AcquireRequest) -> AcquireOutcome {
        let is_others = |lock: &Lock| lock.holder.is_some_and(|holder| holder.owner != token.owner);
        if claim.keys.iter().any(|key| self.by_name.get(key).is_some_and(is_others)) {
            let asks_on = claim.attempt == 0 && (claim.enqueue || claim.keys.len() > 1);
            let retry_after = if asks_on { Duration::ZERO } else { NEVER };
            if claim.attempt > 0 {
                for key in claim.keys.iter() {
                    self.by_name.entry(key.clone()).or_default().watchers.insert(token.process);
                }
            }
            return AcquireOutcome::Contended {
                expires_in: None,
                wait_mode: WaitMode::Watch { retry_after },
            };
        }
        for key in claim.keys.iter() {
            let lock = self.by_name.entry(key.clone()).or_default();
            if lock.holder.is_none() {
                lock.holder = Some(token);
                lock.is_marked = false;
            }
        }
        self.grant(claim, Some(false))
    }

    fn grant(&mut self, claim: &AcquireRequest, wanted: Option<bool>) -> AcquireOutcome {
        let extra_fences = if claim.fencing { claim.extra_fences } else { 0 };
        let fence = claim.fencing.then(|| Fence::new(self.last_fence + 1));
        if claim.fencing {
            self.last_fence += 1 + u64::from(extra_fences);
        }
        AcquireOutcome::Acquired { fence, reserved_fences: extra_fences, contended: wanted }
    }

    /// line.lua: release
    fn release(&mut self, key: &Key, token: Token, heir: Option<Owner>) -> ReleaseOutcome {
        let heir = heir.map(|owner| Token { owner, ..token });
        let lock = self.by_name.entry(key.clone()).or_default();
        if lock.holder.map(|holder| holder.owner) != Some(token.owner) {
            lock.line.retain(|waiting| *waiting != token);
            return ReleaseOutcome::NotHeld;
        }
        let changed = |process| (process, Message::Changed(key.clone()));
        self.messages.extend(lock.watchers.drain().map(changed));
        let next = if lock.is_marked { lock.line.pop_front() } else { None };
        match (next, heir) {
            (Some(next), _) => {
                lock.holder = Some(next);
                lock.is_marked = !lock.line.is_empty() || heir.is_some();
                let call = |token: Token, within| {
                    let called = Message::Called(key.clone(), token.owner, within);
                    (token.process, called)
                };
                self.messages.push(call(next, Duration::ZERO));
                self.messages.extend(lock.line.front().map(|second| call(*second, NEVER)));
                lock.line.extend(heir);
                if heir.is_some() {
                    ReleaseOutcome::SuccessorQueued { retry_after: NEVER }
                } else {
                    ReleaseOutcome::Freed
                }
            }
            (None, Some(heir)) => {
                lock.holder = Some(heir);
                lock.is_marked = false;
                ReleaseOutcome::SuccessorGranted
            }
            (None, None) => {
                lock.holder = None;
                lock.is_marked = false;
                ReleaseOutcome::Freed
            }
        }
    }

    fn has(&self, lease: &LeaseRef) -> bool {
        let is_its = |key| {
            let lock: Option<&Lock> = self.by_name.get(key);
            lock.and_then(|lock| lock.holder).is_some_and(|holder| holder.owner == lease.owner)
        };
        lease.keys.iter().all(is_its)
    }
}

impl Client {
    fn token(&self, owner: Owner) -> Token {
        Token { owner, process: self.me }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.keys().by_name.fmt(f)
    }
}

fn held(yes: bool) -> LeaseStatus {
    if yes { LeaseStatus::Held } else { LeaseStatus::NotHeld }
}

/// On its way there, or back.
async fn travel() {
    shuttle::future::yield_now().await;
}

impl Backend for Client {
    fn subscribe(&self, notifier: Notifier) {
        self.server.notifiers.lock().unwrap()[self.me] = Some(notifier);
    }

    async fn acquire(
        &self,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        travel().await;
        let answers = claims.iter().map(|claim| {
            let mut keys = self.server.keys();
            let token = self.token(claim.owner);
            let answer = match &*claim.keys {
                [key] if claim.enqueue && claim.attempt > 0 => {
                    keys.claim_in_line(key, token, claim)
                }
                _ => keys.claim(token, claim),
            };
            self.server.send(keys);
            Ok(answer)
        });
        let answers = answers.collect();
        travel().await;
        answers
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        travel().await;
        let answers = leases.iter().map(|lease| Ok(held(self.server.keys().has(lease)))).collect();
        travel().await;
        answers
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        travel().await;
        let outcomes = releases.iter().map(|ReleaseRequest { lease, successor, .. }| {
            let heir = successor.map(|successor| successor.owner);
            let token = self.token(lease.owner);
            let mut keys = self.server.keys();
            let mut outcome = ReleaseOutcome::Freed;
            for key in lease.keys.iter() {
                match keys.release(key, token, heir) {
                    ReleaseOutcome::Freed => {}
                    other => outcome = other,
                }
            }
            self.server.send(keys);
            Ok(outcome)
        });
        let outcomes = outcomes.collect();
        travel().await;
        outcomes
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        Ok(held(self.server.keys().has(lease)))
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.wait_queue = true;
        capabilities
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        Ok(Vec::new())
    }
}
