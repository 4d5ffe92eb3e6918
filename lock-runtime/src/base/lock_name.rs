//! The name of a lock in errors, events and metrics.

use crate::base::key::Key;

/// The name of a lock without a template in events and metrics.
pub(crate) const UNNAMED: &str = "unnamed";

/// The name of a lock.
#[derive(Clone, Debug)]
pub(crate) enum LockName {
    /// Of an annotated function, or given by the program.
    Template(&'static str),
    /// Of a request without a template. Errors show it, events and metrics do not.
    Key(Key),
}

impl LockName {
    /// The name in errors.
    pub(crate) fn as_str(&self) -> &str {
        match self {
            Self::Template(template) => template,
            Self::Key(key) => key.as_str(),
        }
    }

    /// The name in events and metrics.
    pub(crate) const fn public(&self) -> &'static str {
        match self {
            Self::Template(template) => template,
            Self::Key(_) => UNNAMED,
        }
    }
}
