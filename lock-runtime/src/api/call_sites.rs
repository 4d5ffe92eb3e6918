//! The annotated functions of the program.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::base::call_site::{self, Site};
use crate::base::options::{LockOptions, Renew, Wait};
use crate::exec::events;
use crate::lock::core::PoolCore;

/// An annotated function, from [`call_sites`].
#[derive(Clone, Copy)]
pub struct CallSite(&'static Site);

/// All functions of this program with `#[distributed_lock]`, sorted by file and line, including functions that were never
/// called.
///
/// Functions of a library that the linker has left out of the program are not included.
///
/// ```
/// use lock_runtime::{LockError, distributed_lock};
///
/// #[distributed_lock(key = "order:<id>", ttl = "5s")]
/// async fn settle(id: u64) -> Result<(), LockError> {
///     Ok(())
/// }
///
/// let sites = lock_runtime::call_sites();
/// let settle = sites.iter().find(|site| site.function() == "settle").unwrap();
/// assert_eq!((settle.template(), settle.pool()), ("order:<id>", Some("default")));
/// assert_eq!(settle.ttl(), Some(std::time::Duration::from_secs(5)));
/// ```
#[must_use]
pub fn call_sites() -> Vec<CallSite> {
    let mut sites: Vec<_> = call_site::registered().map(CallSite).collect();
    sites.sort_unstable_by_key(|site| (site.file(), site.line(), site.function()));
    sites
}

impl CallSite {
    /// The label in events: the given `name`, or the function with its module.
    #[must_use]
    pub fn name(&self) -> String {
        self.0.to_string()
    }

    /// The name of the function.
    #[must_use]
    pub fn function(&self) -> &'static str {
        self.0.location().function
    }

    /// The module of the function.
    #[must_use]
    pub fn module(&self) -> &'static str {
        self.0.location().module
    }

    /// The file, as the compiler names it.
    #[must_use]
    pub fn file(&self) -> &'static str {
        self.0.location().file
    }

    /// The line of the attribute.
    #[must_use]
    pub fn line(&self) -> u32 {
        self.0.location().line
    }

    /// The key as written in the attribute; several keys are separated by commas.
    #[must_use]
    pub fn template(&self) -> &'static str {
        self.0.template()
    }

    /// The name of the pool; `None` if an expression gives the pool.
    #[must_use]
    pub fn pool(&self) -> Option<&'static str> {
        self.0.pool_name()
    }

    /// The `ttl`; `None` if it is the pool's, or is given by an expression.
    #[must_use]
    pub fn ttl(&self) -> Option<Duration> {
        self.options().ttl
    }

    /// The `wait`; `None` as for [`ttl`](Self::ttl).
    #[must_use]
    pub fn wait(&self) -> Option<Wait> {
        self.options().wait
    }

    /// The `renew`; `None` if it is not written, or is given by an expression.
    #[must_use]
    pub fn renew(&self) -> Option<Renew> {
        self.options().renew
    }

    /// The `max_hold`; `None` as for [`renew`](Self::renew).
    #[must_use]
    pub fn max_hold(&self) -> Option<Duration> {
        self.options().max_hold
    }

    /// The `min_hold`; `None` as for [`renew`](Self::renew).
    #[must_use]
    pub fn min_hold(&self) -> Option<Duration> {
        self.options().min_hold
    }

    fn options(&self) -> LockOptions {
        self.0.options()
    }
}

/// As `settle (src/orders.rs:12): order:<id>`.
impl fmt::Debug for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}:{}): {}", self.0, self.file(), self.line(), self.template())
    }
}

/// A pool has received its name: the metrics of its functions exist from now on, and functions that exclude each other are
/// reported.
pub(super) fn announce(pool: &PoolCore) {
    let mut by_template = BTreeMap::<_, Vec<_>>::new();
    for site in call_sites().into_iter().filter(|site| site.pool() == Some(&**pool.name())) {
        drop(pool.metrics.of(site.template()));
        if !site.0.is_computed() {
            by_template.entry(site.template()).or_default().push(site);
        }
    }
    for (template, sites) in by_template {
        let first = sites[0].0.given_name();
        // One given name for all of them means that it is intended.
        let is_meant = first.is_some() && sites.iter().all(|site| site.0.given_name() == first);
        if sites.len() > 1 && !is_meant {
            let named = |site: &CallSite| format!("{} ({}:{})", site.0, site.file(), site.line());
            let functions = sites.iter().map(named).collect::<Vec<_>>().join(", ");
            events::shared_template(template, pool.name(), functions);
        }
    }
}
