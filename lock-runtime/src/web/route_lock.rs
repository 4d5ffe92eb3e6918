//! What locks a route: its key, pool and options.

use crate::api::call_keys::CallKeys;
use crate::api::enter::{LockCall, enter};
use crate::api::entered::Entered;
use crate::api::named_pools::PoolRef;
use crate::base::call_site::{CallOptions, LockLabel};
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::base::options::LockOptions;

/// The methods of a layer or middleware that set what locks its routes. Its fields are `route` and `name`.
macro_rules! route_settings {
    () => {
        /// The name of the lock in events, spans, metrics and errors, like
        /// [`LockRequest::template`](crate::LockRequest::template). Defaults to the template of [`for_path`](Self::for_path); a
        /// computed key has none, and is `unnamed`.
        #[track_caller]
        pub fn template(self, template: &'static str) -> Self {
            Self {
                name: Some(LockLabel::Template(template, std::panic::Location::caller())),
                ..self
            }
        }

        /// Uses the pool that is installed under `name`. Defaults to `"default"`.
        pub fn pool_named(self, name: &str) -> Self {
            self.with(|route| {
                route.pool = $crate::api::named_pools::PoolRef::Named(name.to_owned().into())
            })
        }

        /// Uses `pool`.
        pub fn pool(self, pool: &$crate::api::pool::LockPool) -> Self {
            self.with(|route| route.pool = $crate::api::named_pools::PoolRef::Given(pool.clone()))
        }

        /// How long the grant lasts without a renewal. Defaults to the pool's.
        pub fn ttl(self, ttl: std::time::Duration) -> Self {
            self.with(|route| route.options = route.options.ttl(ttl))
        }

        /// How long a request waits for the lock. Defaults to the pool's.
        pub fn wait(self, wait: impl Into<$crate::base::options::Wait>) -> Self {
            self.with(|route| route.options = route.options.wait(wait.into()))
        }

        /// Ends the hold after this time. Defaults to no limit.
        pub fn max_hold(self, max_hold: std::time::Duration) -> Self {
            self.with(|route| route.options = route.options.max_hold(max_hold))
        }

        /// Whether the request gets a [`Fence`](crate::Fence). Defaults to `true`. Without one it has none, even if it has passed
        /// another lock before.
        pub fn fencing(self, fencing: bool) -> Self {
            self.with(|route| route.options = route.options.fencing(fencing))
        }

        fn with(mut self, set: impl FnOnce(&mut RouteLock)) -> Self {
            set(Arc::make_mut(&mut self.route));
            self
        }
    };
}
pub(super) use route_settings;

/// The pool and the options of a locked route.
#[derive(Clone, Debug)]
pub(super) struct RouteLock {
    pub(super) pool: PoolRef,
    pub(super) options: LockOptions,
}

impl Default for RouteLock {
    fn default() -> Self {
        Self { pool: PoolRef::default(), options: LockOptions::new().fencing(true) }
    }
}

impl RouteLock {
    /// Acquires the lock of `key` for one request. Cancel safe.
    pub(super) async fn enter(
        &self,
        key: Result<Key, LockError>,
        label: LockLabel,
    ) -> Result<Entered, LockError> {
        let core = self.pool.find(&label)?.into_core();
        let keys = key.and_then(Key::checked).map(CallKeys::One);
        let call = LockCall { core, label, keys, shows_guard: true };
        enter(call, CallOptions::Given(&self.options)).await
    }
}
