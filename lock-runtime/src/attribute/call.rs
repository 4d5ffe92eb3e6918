//! One call of a locked function, or of the programmatic API: which pool, which keys, which options.

use std::borrow::Borrow;
use std::sync::Arc;
use std::time::Duration;

use crate::api::guard::LockGuard;
use crate::api::locked_future::Entry;
use crate::api::named_pools;
use crate::api::pool::LockPool;
use crate::api::reentrancy;
use crate::base::call_site::{Site, Subject};
use crate::base::error::{ErrorKind, LockError};
use crate::base::key::Key;
use crate::base::options::{LockOptions, OnLost, Policy, ReleaseMode, Renew, Wait};
use crate::lock::acquire::{Ask, acquire};
use crate::lock::core::Engine;

/// Collects what one call needs before it can acquire. Owns everything, borrows no argument.
#[derive(Debug)]
pub struct Call {
    subject: Subject,
    pool: PoolRef,
    keys: Result<Vec<Key>, LockError>,
    options: LockOptions,
    locks: bool,
    /// Whether the caller sees the guard, and so its fence.
    shows_guard: bool,
}

#[derive(Debug)]
enum PoolRef {
    Named(&'static str),
    Given(LockPool),
}

/// What `pool = <expression>` evaluates to: a [`LockPool`], or anything that borrows one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a lock pool",
    label = "`pool` takes a `LockPool`, a reference to one, or an `Arc` of one",
    note = "a pool that is installed under a name is written as a literal: `pool = \"orders\"`",
    note = "for a name that is known at run time only: `pool = lock_runtime::pool(&name).expect(\"installed\")`"
)]
pub trait AsPool {
    /// The pool.
    fn as_pool(&self) -> &LockPool;
}

#[diagnostic::do_not_recommend]
impl<T: Borrow<LockPool>> AsPool for T {
    fn as_pool(&self) -> &LockPool {
        self.borrow()
    }
}

impl Call {
    /// A call of an annotated function, with the site's options and the default pool.
    #[must_use]
    pub fn new(site: &'static Site) -> Self {
        Self {
            subject: Subject::Site(site),
            pool: PoolRef::Named(named_pools::DEFAULT),
            keys: Ok(Vec::new()),
            options: site.options(),
            locks: true,
            // A site asks for a fence if it has a `guard`.
            shows_guard: true,
        }
    }

    /// A call that needs no lock: its `when` was false.
    #[must_use]
    pub fn unlocked(site: &'static Site) -> Self {
        Self { locks: false, ..Self::new(site) }
    }

    pub(crate) fn of_pool(pool: LockPool, keys: Vec<Key>) -> Self {
        let subject = Subject::Key(keys.first().cloned().unwrap_or(Key::from_static("")));
        let keys = keys.into_iter().map(Key::checked).collect();
        let options = LockOptions::new().fencing(true);
        Self { subject, pool: PoolRef::Given(pool), keys, options, locks: true, shows_guard: true }
    }

    /// The guard stays inside, as that of a body which has no name for it.
    pub(crate) fn without_guard(self) -> Self {
        Self { shows_guard: false, ..self }
    }

    /// Sets the key.
    #[must_use]
    pub fn key(self, key: Result<Key, LockError>) -> Self {
        self.keys([key])
    }

    /// Sets several keys, of which all or none are locked.
    #[must_use]
    pub fn keys(mut self, keys: impl IntoIterator<Item = Result<Key, LockError>>) -> Self {
        self.keys = keys.into_iter().collect();
        self
    }

    /// Takes the pool that is installed under `name`.
    #[must_use]
    pub fn pool_named(mut self, name: &'static str) -> Self {
        self.pool = PoolRef::Named(name);
        self
    }

    /// Takes this pool.
    #[must_use]
    pub fn pool(mut self, pool: &impl AsPool) -> Self {
        self.pool = PoolRef::Given(pool.as_pool().clone());
        self
    }

    /// Sets `ttl`.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|options| options.ttl(ttl))
    }

    /// Sets `wait`.
    #[must_use]
    pub fn wait(self, wait: impl Into<Wait>) -> Self {
        self.with(|options| options.wait(wait.into()))
    }

    /// Sets `renew`.
    #[must_use]
    pub fn renew(self, renew: impl Into<Renew>) -> Self {
        self.with(|options| options.renew(renew.into()))
    }

    /// Sets `max_hold`.
    #[must_use]
    pub fn max_hold(self, max_hold: Duration) -> Self {
        self.with(|options| options.max_hold(max_hold))
    }

    /// Sets `min_hold`.
    #[must_use]
    pub fn min_hold(self, min_hold: Duration) -> Self {
        self.with(|options| options.min_hold(min_hold))
    }

    /// Sets `retry_delay`.
    #[must_use]
    pub fn retry_delay(self, delay: Duration) -> Self {
        self.with(|options| options.retry_delay(delay))
    }

    /// Sets `retry_count`.
    #[must_use]
    pub fn retry_count(self, count: u32) -> Self {
        self.with(|options| options.retry_count(count))
    }

    pub(crate) fn with(mut self, set: impl FnOnce(LockOptions) -> LockOptions) -> Self {
        self.options = set(self.options);
        self
    }

    pub(crate) fn release(self, release: ReleaseMode) -> Self {
        self.with(|options| options.release(release))
    }

    pub(crate) fn on_lost(self, on_lost: OnLost) -> Self {
        self.with(|options| options.on_lost(on_lost))
    }
}

/// Acquires what `call` asks for.
///
/// Dropping the future leaves nothing behind.
///
/// # Errors
/// Every kind but [`ErrorKind::Released`]; the body has not run.
pub async fn enter(call: Call) -> Result<Entry, LockError> {
    match prepare(call)? {
        Prepared::Entry(entry) => Ok(entry),
        Prepared::Ask(engine, ask) => {
            let subject = ask.subject.clone();
            let guard = acquire(engine.clone(), ask).await;
            let located = |error: LockError| error.at(subject.template()).in_pool(engine.name());
            guard.map(Entry::locked).map_err(located)
        }
    }
}

/// What a call comes to before anything is awaited.
enum Prepared {
    /// It needs no lock, or has it already.
    Entry(Entry),
    Ask(Arc<Engine>, Arc<Ask>),
}

/// Not a part of the future, which keeps room for all that is alive across an await, and for its
/// arguments.
fn prepare(call: Call) -> Result<Prepared, LockError> {
    if !call.locks {
        return Ok(Prepared::Entry(Entry::unlocked()));
    }
    let Call { subject, pool, keys, options, shows_guard, .. } = call;
    let located = |error: LockError| error.at(subject.template());
    let pool = match pool {
        PoolRef::Given(pool) => pool,
        PoolRef::Named(name) => named_pools::find(name).map_err(located)?,
    };
    let engine = pool.engine();
    if engine.is_inherited() {
        return Err(located(LockError::inherited()).in_pool(engine.name()));
    }
    let located = |error: LockError| error.at(subject.template()).in_pool(engine.name());
    let keys = sorted(keys.map_err(located)?).map_err(located)?;
    keys.iter().try_for_each(|key| key.is_free_behind(&engine.key_prefix)).map_err(located)?;
    let policy = Policy::new(&options, &engine.defaults).map_err(located)?;
    if let Some(holder) = reentrancy::holder(engine, &keys) {
        return pass(holder, &keys, &policy, shows_guard).map(Prepared::Entry).map_err(located);
    }
    let ask = Ask::new(engine, subject, keys, policy);
    Ok(Prepared::Ask(engine.clone(), Arc::new(ask)))
}

/// Lets a call through a lock that its task holds.
fn pass(
    holder: LockGuard,
    keys: &[Key],
    policy: &Policy,
    shows_guard: bool,
) -> Result<Entry, LockError> {
    if !holder.is_held() {
        return Err(holder.end_error());
    }
    if !policy.reentrant || !keys.iter().all(|key| holder.keys().contains(key)) {
        return Err(reentrant(keys));
    }
    if shows_guard && policy.fencing && !holder.lease().ask.policy.fencing {
        return Err(unfenced());
    }
    Ok(Entry::nested(holder, policy.on_lost))
}

/// In one order for all callers, so that two of them cannot wait for each other.
fn sorted(mut keys: Vec<Key>) -> Result<Arc<[Key]>, LockError> {
    keys.sort();
    keys.dedup();
    if keys.is_empty() {
        return Err(LockError::new(ErrorKind::InvalidKey, "the list of lock keys is empty")
            .remedy("name at least one key, or skip the call when there is nothing to lock"));
    }
    if keys.len() > MOST_KEYS {
        return Err(too_many(keys.len()));
    }
    Ok(keys.into())
}

/// How many keys one request may name. Their script takes the store about a millisecond, and no other client is
/// served meanwhile.
const MOST_KEYS: usize = 128;

#[cold]
fn too_many(count: usize) -> LockError {
    let message = format!(
        "{count} keys in one request; {MOST_KEYS} are the most, as the store serves no other client meanwhile"
    );
    LockError::new(ErrorKind::Config, message).remedy(
        "lock one key that stands for all of them, or take them by several requests, in the same order everywhere",
    )
}

#[cold]
fn reentrant(keys: &[Key]) -> LockError {
    let names = keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
    LockError::new(
        ErrorKind::WouldDeadlock,
        format!("this task already holds a lock of {names}, and would wait for itself"),
    )
    .remedy("call the inner function outside of the locked one, or write `reentrant = true` on it to let it pass")
}

#[cold]
fn unfenced() -> LockError {
    LockError::new(
        ErrorKind::Config,
        "the call wants a guard with a fence, and the lock around it was taken without one",
    )
    .remedy("write `guard = lock` on the outer function, or `.fencing(true)` on the outer request; a request that needs no fence says `.fencing(false)`")
}
