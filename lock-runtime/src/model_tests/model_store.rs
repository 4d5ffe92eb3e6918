//! A model of the Redis protocol: a lock, its wait queue, and messages that arrive in any order.

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

/// The connection of one process.
pub(super) struct ModelConnection {
    process: usize,
    server: Arc<ModelServer>,
}

#[derive(Default)]
pub(super) struct ModelServer {
    first_refusal: FirstRefusal,
    // Never locked across a point at which shuttle may switch threads.
    keys: Mutex<ModelKeys>,
    settled: Notify,
    notifiers: Mutex<Vec<Option<Notifier>>>,
}

/// What the refusal of a first request means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum FirstRefusal {
    /// Nothing is registered, and the second request is due immediately: Redis.
    #[default]
    AskAgain,
    /// The request waits like every later one, and may be notified before its refusal arrives: etcd and ZooKeeper.
    Waits,
}

#[derive(Default)]
struct ModelKeys {
    by_name: HashMap<Key, ModelLock>,
    last_fence: u64,
    deleted: HashSet<Owner>,
    /// Receiving process and message.
    messages: Vec<(usize, ModelMessage)>,
    /// Messages in transit or being handled.
    pending: usize,
    processes: usize,
}

#[derive(Debug, Default)]
struct ModelLock {
    holder: Option<ModelToken>,
    is_contended: bool,
    queue: VecDeque<ModelToken>,
    /// Processes that client tracking notifies of the next change.
    watchers: HashSet<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ModelToken {
    owner: Owner,
    process: usize,
}

enum ModelMessage {
    KeyChanged(Key),
    HeadOfQueue(Key, Owner, Duration),
    Contended(Key),
}

impl ModelServer {
    pub(super) fn new(first_refusal: FirstRefusal) -> Self {
        Self { first_refusal, ..Self::default() }
    }

    pub(super) fn connect(self: &Arc<Self>) -> ModelConnection {
        let mut notifiers = self.notifiers.lock().unwrap();
        // Replaced by `subscribe`.
        let process = notifiers.len();
        notifiers.push(None);
        self.keys().processes += 1;
        ModelConnection { process, server: self.clone() }
    }

    /// Whether no lock has a holder or a waiter.
    pub(super) fn is_empty(&self) -> bool {
        self.keys().by_name.values().all(|lock| lock.holder.is_none() && lock.queue.is_empty())
    }

    /// Resolves when no message is in transit.
    pub(super) async fn settled(&self) {
        loop {
            let settled = self.settled.notified();
            if self.keys().pending == 0 {
                return;
            }
            settled.await;
        }
    }

    /// Deletes the key and notifies all processes. A process that does not watch the key would detect it at its next
    /// check, which does not come while clocks stand still.
    pub(super) fn delete(self: &Arc<Self>, key: &Key) {
        let mut keys = self.keys();
        if let Some(lock) = keys.by_name.get_mut(key)
            && let Some(holder) = lock.holder.take()
        {
            lock.is_contended = false;
            keys.deleted.insert(holder.owner);
            for process in 0..keys.processes {
                keys.messages.push((process, ModelMessage::KeyChanged(key.clone())));
            }
        }
        self.send(keys);
    }

    /// Whether a key was deleted while `owner` held it.
    pub(super) fn was_deleted(&self, owner: &Owner) -> bool {
        self.keys().deleted.contains(owner)
    }

    fn keys(&self) -> MutexGuard<'_, ModelKeys> {
        self.keys.lock().unwrap()
    }

    /// Delivers each message in a task of its own, and thus in any order.
    fn send(self: &Arc<Self>, mut keys: MutexGuard<'_, ModelKeys>) {
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
                server.settled.notify_waiters();
            });
        }
    }

    fn deliver(self: &Arc<Self>, process: usize, notifier: &Notifier, message: ModelMessage) {
        match message {
            ModelMessage::KeyChanged(key) => notifier.key_changed(key.as_str()),
            ModelMessage::Contended(key) => notifier.contended(key.as_str()),
            ModelMessage::HeadOfQueue(key, owner, within) => {
                if !notifier.head_of_queue(key.as_str(), &owner, within) {
                    let mut keys = self.keys();
                    keys.release(&key, ModelToken { owner, process }, None);
                    self.send(keys);
                }
            }
        }
    }
}

impl ModelKeys {
    /// wait_queue.lua: acquire
    fn acquire_queued(
        &mut self,
        key: &Key,
        token: ModelToken,
        claim: &AcquireRequest,
    ) -> AcquireOutcome {
        let lock = self.by_name.entry(key.clone()).or_default();
        match lock.holder {
            Some(holder) if holder.owner != token.owner => {
                if !lock.queue.contains(&token) {
                    lock.queue.push_back(token);
                }
                let is_first = lock.queue.front() == Some(&token);
                if is_first {
                    lock.watchers.insert(token.process);
                }
                if !std::mem::replace(&mut lock.is_contended, true) || is_first {
                    let contended = ModelMessage::Contended(key.clone());
                    self.messages.push((holder.process, contended));
                }
                AcquireOutcome::Contended {
                    expires_in: None,
                    wait_mode: WaitMode::Queued { retry_after: NEVER },
                }
            }
            holder => {
                if holder.is_none() {
                    lock.queue.retain(|waiting| *waiting != token);
                    lock.holder = Some(token);
                    lock.is_contended = !lock.queue.is_empty();
                }
                let contended = Some(!lock.queue.is_empty());
                self.grant(claim, contended)
            }
        }
    }

    /// acquire.lua, and `SET NX`
    fn acquire(
        &mut self,
        token: ModelToken,
        claim: &AcquireRequest,
        asks_again: bool,
    ) -> AcquireOutcome {
        let is_held_by_other =
            |lock: &ModelLock| lock.holder.is_some_and(|holder| holder.owner != token.owner);
        if claim.keys.iter().any(|key| self.by_name.get(key).is_some_and(is_held_by_other)) {
            let retries_at_once = asks_again && (claim.enqueue || claim.keys.len() > 1);
            let retry_after = if retries_at_once { Duration::ZERO } else { NEVER };
            if !asks_again {
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
                lock.is_contended = false;
            }
        }
        self.grant(claim, Some(false))
    }

    fn grant(&mut self, claim: &AcquireRequest, contended: Option<bool>) -> AcquireOutcome {
        let extra_fences = if claim.fencing { claim.extra_fences } else { 0 };
        let fence = claim.fencing.then(|| Fence::new(self.last_fence + 1));
        if claim.fencing {
            self.last_fence += 1 + u64::from(extra_fences);
        }
        let granted = AcquireOutcome::acquired(fence).with_reserved_fences(extra_fences);
        contended.map_or(granted, |waits| granted.with_contended(waits))
    }

    /// wait_queue.lua: release
    fn release(
        &mut self,
        key: &Key,
        token: ModelToken,
        successor: Option<Owner>,
    ) -> ReleaseOutcome {
        let successor = successor.map(|owner| ModelToken { owner, ..token });
        let lock = self.by_name.entry(key.clone()).or_default();
        if lock.holder.map(|holder| holder.owner) != Some(token.owner) {
            lock.queue.retain(|waiting| *waiting != token);
            return ReleaseOutcome::NotHeld;
        }
        let changed = |process| (process, ModelMessage::KeyChanged(key.clone()));
        self.messages.extend(lock.watchers.drain().map(changed));
        let next = if lock.is_contended { lock.queue.pop_front() } else { None };
        match (next, successor) {
            (Some(next), _) => {
                lock.holder = Some(next);
                lock.is_contended = !lock.queue.is_empty() || successor.is_some();
                let head_of_queue = |token: ModelToken, within| {
                    let message = ModelMessage::HeadOfQueue(key.clone(), token.owner, within);
                    (token.process, message)
                };
                self.messages.push(head_of_queue(next, Duration::ZERO));
                self.messages
                    .extend(lock.queue.front().map(|second| head_of_queue(*second, NEVER)));
                lock.queue.extend(successor);
                if successor.is_some() {
                    ReleaseOutcome::SuccessorQueued { retry_after: NEVER }
                } else {
                    ReleaseOutcome::Freed
                }
            }
            (None, Some(successor)) => {
                lock.holder = Some(successor);
                lock.is_contended = false;
                ReleaseOutcome::SuccessorGranted
            }
            (None, None) => {
                lock.holder = None;
                lock.is_contended = false;
                ReleaseOutcome::Freed
            }
        }
    }

    fn has(&self, lease: &LeaseRef) -> bool {
        let is_held = |key| {
            let lock: Option<&ModelLock> = self.by_name.get(key);
            lock.and_then(|lock| lock.holder).is_some_and(|holder| holder.owner == lease.owner)
        };
        lease.keys.iter().all(is_held)
    }
}

impl ModelConnection {
    fn token(&self, owner: Owner) -> ModelToken {
        ModelToken { owner, process: self.process }
    }
}

impl fmt::Debug for ModelServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.keys().by_name.fmt(f)
    }
}

/// A request or a reply in transit.
async fn in_transit() {
    shuttle::future::yield_now().await;
}

impl Backend for ModelConnection {
    fn subscribe(&self, notifier: Notifier) {
        self.server.notifiers.lock().unwrap()[self.process] = Some(notifier);
    }

    async fn acquire(
        &self,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        in_transit().await;
        let answers = claims.iter().map(|claim| {
            let mut keys = self.server.keys();
            let token = self.token(claim.owner);
            let asks_again =
                claim.attempt == 0 && self.server.first_refusal == FirstRefusal::AskAgain;
            let outcome = match &*claim.keys {
                [key] if claim.enqueue && !asks_again => keys.acquire_queued(key, token, claim),
                _ => keys.acquire(token, claim, asks_again),
            };
            self.server.send(keys);
            Ok(outcome)
        });
        let answers = answers.collect();
        in_transit().await;
        answers
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        in_transit().await;
        let answers =
            leases.iter().map(|lease| Ok(LeaseStatus::of(self.server.keys().has(lease)))).collect();
        in_transit().await;
        answers
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        in_transit().await;
        let outcomes = releases.iter().map(|ReleaseRequest { lease, successor, .. }| {
            let successor = successor.map(|successor| successor.owner);
            let token = self.token(lease.owner);
            let mut keys = self.server.keys();
            let mut outcome = ReleaseOutcome::Freed;
            for key in lease.keys.iter() {
                match keys.release(key, token, successor) {
                    ReleaseOutcome::Freed => {}
                    other => outcome = other,
                }
            }
            self.server.send(keys);
            Ok(outcome)
        });
        let outcomes = outcomes.collect();
        in_transit().await;
        outcomes
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        Ok(LeaseStatus::of(self.server.keys().has(lease)))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { wait_queue: true, ..Capabilities::default() }
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        Ok(Vec::new())
    }
}
