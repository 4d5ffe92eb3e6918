//! What is known about an annotated function at compile time.

use std::fmt;
use std::panic;

use once_cell::race::OnceBox;
use once_cell::sync::OnceCell;

use crate::base::error::LockError;
use crate::base::key::Key;
use crate::base::lock_name::{LockName, UNNAMED};
use crate::base::options::{Defaults, LockOptions};
use crate::base::policy::Policy;
use crate::base::shared_policy::{PolicyCache, SharedPolicy};

/// Where an annotated function is written.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Location {
    pub module: &'static str,
    pub function: &'static str,
    pub file: &'static str,
    pub line: u32,
}

/// The static facts of one annotated function. The attribute puts one in a `static` per function.
#[derive(Debug)]
pub struct Site {
    location: Location,
    template: &'static str,
    options: LockOptions,
    name: Option<&'static str>,
    /// Whether the template is the text of an expression.
    is_computed: bool,
    /// `None` if the pool is given by an expression.
    pool: Option<&'static str>,
    /// What grants say about the location, once there has been a grant.
    location_text: OnceCell<String>,
    /// The policy of the options in the first pool that a call used.
    policy: OnceBox<(Defaults, Policy)>,
}

impl Site {
    /// The facts of a function whose key is written as `template`.
    pub const fn new(location: Location, template: &'static str, options: LockOptions) -> Self {
        Self {
            location,
            template,
            options,
            name: None,
            is_computed: false,
            pool: Some(DEFAULT_POOL),
            location_text: OnceCell::new(),
            policy: OnceBox::new(),
        }
    }

    /// The location as `text` renders it the first time.
    pub(crate) fn location_text(&self, text: impl FnOnce(&Location) -> String) -> &str {
        self.location_text.get_or_init(|| text(&self.location))
    }

    /// The options, completed with a pool's `defaults`. Most programs have one pool, so the first result is kept.
    fn policy(&'static self, defaults: &Defaults) -> Result<SharedPolicy, LockError> {
        let (of, policy) = self.policy.get_or_try_init(|| {
            Policy::new(&self.options, defaults).map(|policy| Box::new((*defaults, policy)))
        })?;
        if of == defaults {
            return Ok(SharedPolicy::OfSite(policy));
        }
        Policy::new(&self.options, defaults).map(SharedPolicy::from)
    }

    /// Replaces the label `module::function`.
    #[must_use]
    pub const fn name(mut self, name: &'static str) -> Self {
        self.name = Some(name);
        self
    }

    /// A key is given by an expression.
    #[must_use]
    pub const fn computed_key(mut self) -> Self {
        self.is_computed = true;
        self
    }

    /// Replaces the pool `default`.
    #[must_use]
    pub const fn pool(mut self, pool: &'static str) -> Self {
        self.pool = Some(pool);
        self
    }

    /// The pool is given by an expression.
    #[must_use]
    pub const fn computed_pool(mut self) -> Self {
        self.pool = None;
        self
    }

    pub(crate) const fn template(&self) -> &'static str {
        self.template
    }

    pub(crate) const fn options(&self) -> LockOptions {
        self.options
    }

    pub(crate) const fn location(&self) -> Location {
        self.location
    }

    pub(crate) const fn given_name(&self) -> Option<&'static str> {
        self.name
    }

    pub(crate) const fn is_computed(&self) -> bool {
        self.is_computed
    }

    pub(crate) const fn pool_name(&self) -> Option<&'static str> {
        self.pool
    }
}

/// The options of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CallOptions<'a> {
    /// The arguments of the attribute.
    OfSite(&'static Site),
    Given(&'a LockOptions),
}

impl CallOptions<'_> {
    /// The options, completed with the defaults of the pool that `cache` belongs to.
    ///
    /// # Errors
    /// [`Config`](crate::ErrorKind::Config) if they exclude each other, or one is out of bounds.
    pub(crate) fn policy(&self, cache: &PolicyCache) -> Result<SharedPolicy, LockError> {
        match self {
            Self::OfSite(site) => site.policy(cache.defaults()),
            Self::Given(options) => cache.policy(options),
        }
    }

    /// # Errors
    /// [`Config`](crate::ErrorKind::Config) for so many keys.
    pub(crate) fn check_key_count(&self, keys: usize) -> Result<(), LockError> {
        match self {
            Self::OfSite(site) => site.options.check_key_count(keys),
            Self::Given(options) => options.check_key_count(keys),
        }
    }
}

/// The name of the pool of annotated functions that name none.
pub(crate) const DEFAULT_POOL: &str = "default";

/// The label in events: the given name, or `module::function`.
impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name {
            Some(name) => f.write_str(name),
            None => write!(f, "{}::{}", self.location.module, self.location.function),
        }
    }
}

/// An annotated function of this program. Expansions register one each before `main`.
#[derive(Debug)]
pub struct RegisteredSite(pub &'static Site);

inventory::collect!(RegisteredSite);

/// All annotated functions of this program.
pub(crate) fn registered() -> impl Iterator<Item = &'static Site> {
    inventory::iter::<RegisteredSite>.into_iter().map(|registered| registered.0)
}

/// The call for a lock that an error, an event or a metric is about.
#[derive(Clone, Debug)]
pub(crate) enum LockLabel {
    /// Of an annotated function.
    Site(&'static Site),
    /// Of the programmatic API: the template, and where the program gives it.
    Template(&'static str, &'static panic::Location<'static>),
    /// Of the programmatic API, without a template: the key, and where the program gives it.
    Key(Key, &'static panic::Location<'static>),
}

impl LockLabel {
    pub(crate) fn lock_name(&self) -> LockName {
        match self {
            Self::Site(site) => LockName::Template(site.template),
            Self::Template(template, _) => LockName::Template(template),
            Self::Key(key, _) => LockName::Key(key.clone()),
        }
    }

    /// The name in events and metrics, without a key.
    pub(crate) const fn public_name(&self) -> &'static str {
        match self {
            Self::Site(site) => site.template,
            Self::Template(template, _) => template,
            Self::Key(..) => UNNAMED,
        }
    }

    /// The label of an annotated function, for events.
    pub(crate) fn function(&self) -> Option<tracing::field::DisplayValue<&'static Site>> {
        match self {
            Self::Site(site) => Some(tracing::field::display(*site)),
            Self::Template(..) | Self::Key(..) => None,
        }
    }
}
