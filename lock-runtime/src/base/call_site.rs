//! What is known of an annotated function at compile time.

use std::borrow::Cow;
use std::fmt;

use crate::base::key::Key;
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

    pub(crate) const fn location(&self) -> Location {
        self.location
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

/// The name of a lock in errors and events.
#[derive(Clone, Debug)]
pub(crate) enum LockLabel {
    /// An annotated function: the template.
    Site(&'static Site),
    /// The programmatic API: the key.
    Key(Key),
}

impl LockLabel {
    pub(crate) fn template(&self) -> Cow<'static, str> {
        match self {
            Self::Site(site) => Cow::Borrowed(site.template),
            Self::Key(key) => Cow::Owned(key.to_string()),
        }
    }

    /// The label of an annotated function, for events.
    pub(crate) fn name(&self) -> Option<tracing::field::DisplayValue<&'static Site>> {
        match self {
            Self::Site(site) => Some(tracing::field::display(*site)),
            Self::Key(_) => None,
        }
    }
}

impl fmt::Display for LockLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Site(site) => f.write_str(site.template),
            Self::Key(key) => key.fmt(f),
        }
    }
}
