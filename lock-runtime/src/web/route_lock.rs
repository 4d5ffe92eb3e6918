//! What locks a route: its key, pool and options.

use std::time::Duration;

use crate::api::call_keys::CallKeys;
use crate::api::enter::{LockCall, enter};
use crate::api::entered::Entered;
use crate::api::named_pools;
use crate::api::pool::LockPool;
use crate::base::call_site::{CallOptions, LockLabel};
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::base::options::{LockOptions, Wait};

/// The pool and the options of a locked route.
#[derive(Clone, Debug)]
pub(super) struct RouteLock {
    pool: RoutePool,
    pub(super) options: LockOptions,
}

#[derive(Clone, Debug)]
enum RoutePool {
    Named(String),
    Given(LockPool),
}

impl Default for RouteLock {
    fn default() -> Self {
        let options = LockOptions::new().fencing(true);
        Self { pool: RoutePool::Named(named_pools::DEFAULT.to_owned()), options }
    }
}

impl RouteLock {
    pub(super) fn set_pool(&mut self, pool: &LockPool) {
        self.pool = RoutePool::Given(pool.clone());
    }

    pub(super) fn set_pool_named(&mut self, name: &str) {
        self.pool = RoutePool::Named(name.to_owned());
    }

    pub(super) fn set_ttl(&mut self, ttl: Duration) {
        self.options = self.options.ttl(ttl);
    }

    pub(super) fn set_wait(&mut self, wait: Wait) {
        self.options = self.options.wait(wait);
    }

    pub(super) fn set_max_hold(&mut self, max_hold: Duration) {
        self.options = self.options.max_hold(max_hold);
    }

    pub(super) fn set_fencing(&mut self, fencing: bool) {
        self.options = self.options.fencing(fencing);
    }

    /// Acquires the lock of `key` for one request. Cancel safe.
    pub(super) async fn enter(
        &self,
        key: Result<Key, LockError>,
        label: LockLabel,
    ) -> Result<Entered, LockError> {
        let pool = match &self.pool {
            RoutePool::Given(pool) => pool.clone(),
            RoutePool::Named(name) => {
                named_pools::find(name).map_err(|error| error.at(label.lock_name()))?
            }
        };
        let keys = key.and_then(Key::checked).map(CallKeys::One);
        let core = pool.core().clone();
        let call = LockCall { core, label, keys, shows_guard: true };
        enter(call, CallOptions::Given(&self.options)).await
    }
}
