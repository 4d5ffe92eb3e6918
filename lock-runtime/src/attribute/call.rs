//! One call of an annotated function.

use std::borrow::Borrow;
use std::time::Duration;

use crate::api::call_keys::CallKeys;
use crate::api::enter::{self, Entering, LockCall};
use crate::api::entered::Entered;
use crate::api::named_pools::PoolRef;
use crate::api::pool::LockPool;
use crate::attribute::key_template::{self, KeyPart};
use crate::base::call_site::{CallOptions, LockLabel, Site};
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::base::options::{LockOptions, Renew, Wait};

/// Collects pool, keys and options of one call. Owns everything, borrows no argument.
#[derive(Debug)]
pub struct Call {
    site: &'static Site,
    pool: PoolRef,
    keys: Result<CallKeys, LockError>,
    /// Those of the site, unless the call sets one by an expression.
    options: Option<Box<LockOptions>>,
    /// `when`.
    locks: bool,
}

/// The value of `pool = <expression>`: a [`LockPool`], or anything that borrows one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a lock pool",
    label = "`pool` takes a `LockPool`, a reference to one, or an `Arc` of one",
    note = "a pool that is installed under a name is written as a literal: `pool = \"orders\"`",
    note = "what dereferences to a pool, such as a `LazyLock<LockPool>`, is written with a star: `pool = *LOCKS`",
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
    /// A call for `key`, with the site's options and the default pool.
    #[must_use]
    pub fn new(site: &'static Site, key: Result<Key, LockError>) -> Self {
        Self::of_keys(site, key.map(CallKeys::One))
    }

    /// A call for the key that `template` renders. One function for both, because each annotated function calls it.
    #[must_use]
    pub fn template(
        site: &'static Site,
        start: &str,
        values: &[(&'static str, &dyn KeyPart, &str)],
    ) -> Self {
        Self::new(site, key_template::template(site, start, values))
    }

    /// A call for several keys, all or nothing.
    #[must_use]
    pub fn all(
        site: &'static Site,
        keys: impl IntoIterator<Item = Result<Key, LockError>>,
    ) -> Self {
        Self::of_keys(site, keys.into_iter().collect())
    }

    fn of_keys(site: &'static Site, keys: Result<CallKeys, LockError>) -> Self {
        Self { site, pool: PoolRef::default(), keys, options: None, locks: true }
    }

    /// A call whose `when` is false: it needs no lock.
    #[must_use]
    pub fn unlocked(site: &'static Site) -> Self {
        Self { locks: false, ..Self::all(site, []) }
    }

    /// Sets the pool that is installed under `name`.
    #[must_use]
    pub fn pool_named(mut self, name: &'static str) -> Self {
        self.pool = PoolRef::Named(name.into());
        self
    }

    /// Sets the pool.
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

    /// Sets `lock_delay`.
    #[must_use]
    pub fn lock_delay(self, lock_delay: Duration) -> Self {
        self.with(|options| options.lock_delay(lock_delay))
    }

    /// Sets `linger`.
    #[must_use]
    pub fn linger(self, linger: Duration) -> Self {
        self.with(|options| options.linger(linger))
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

    fn with(mut self, set: impl FnOnce(LockOptions) -> LockOptions) -> Self {
        let options = self.options.get_or_insert_with(|| Box::new(self.site.options()));
        **options = set(**options);
        self
    }

    fn enter(self) -> Result<Entering, LockError> {
        let Self { site, pool, keys, options, locks } = self;
        if !locks {
            return Ok(Entering::entered(Entered::unlocked()));
        }
        let label = LockLabel::Site(site);
        let core = pool.find(&label)?.into_core();
        // The options of a site ask for a fence if it has a `guard`.
        let call = LockCall { core, label, keys, shows_guard: true };
        let options = options.as_deref().map_or(CallOptions::OfSite(site), CallOptions::Given);
        Ok(enter::enter(call, options))
    }
}

/// Starts the acquire of the lock of `call`. Dropping the future leaves nothing behind.
///
/// # Errors
/// Every kind but [`Released`](crate::ErrorKind::Released); the body has not run.
pub fn enter(call: Call) -> Entering {
    call.enter().unwrap_or_else(Entering::refused)
}
