//! What is known of an annotated function at compile time.

use std::fmt;

use crate::base::key::Key;
use crate::base::lock_name::LockName;
use crate::base::options::LockOptions;

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
}

impl Site {
    /// The facts of a function whose key is written as `template`.
    pub const fn new(location: Location, template: &'static str, options: LockOptions) -> Self {
        Self { location, template, options, name: None }
    }

    /// Replaces the label `module::function`.
    #[must_use]
    pub const fn name(mut self, name: &'static str) -> Self {
        self.name = Some(name);
        self
    }

    pub(crate) const fn template(&self) -> &'static str {
        self.template
    }

    pub(crate) const fn options(&self) -> LockOptions {
        self.options
    }
}

/// The label in events: the given name, or `module::function`.
impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name {
            Some(name) => f.write_str(name),
            None => write!(f, "{}::{}", self.location.module, self.location.function),
        }
    }
}

/// The call for a lock that an error, an event or a metric is about.
#[derive(Clone, Debug)]
pub(crate) enum LockLabel {
    /// Of an annotated function.
    Site(&'static Site),
    /// Of the programmatic API.
    Request(LockName),
}

impl LockLabel {
    /// A request for `key` without a template.
    pub(crate) fn of_key(key: Key) -> Self {
        Self::Request(LockName::Key(key))
    }

    pub(crate) fn lock_name(&self) -> LockName {
        match self {
            Self::Site(site) => LockName::Template(site.template),
            Self::Request(name) => name.clone(),
        }
    }

    /// The name in events and metrics, without a key.
    pub(crate) const fn public_name(&self) -> &'static str {
        match self {
            Self::Site(site) => site.template,
            Self::Request(name) => name.public(),
        }
    }

    /// The label of an annotated function, for events.
    pub(crate) fn function(&self) -> Option<tracing::field::DisplayValue<&'static Site>> {
        match self {
            Self::Site(site) => Some(tracing::field::display(*site)),
            Self::Request(_) => None,
        }
    }
}
