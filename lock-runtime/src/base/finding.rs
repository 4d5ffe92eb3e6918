//! What the checks of a store found.

use crate::base::backend_error::Warning;

/// What one check of a store found. With the feature `serde` it can be serialized.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// What was checked: `version`, `eviction`, `clock` and so on; `store` for checks without a name of their own.
    pub check: &'static str,
    /// The verdict of the check.
    pub verdict: Verdict,
    /// The server, where a store has several.
    pub server: Option<String>,
    /// What the check found.
    pub text: String,
    /// What to do about it. `None` if it is good.
    pub remedy: Option<&'static str>,
}

/// The verdict of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// As it should be.
    Good,
    /// Locks could be lost, refused or late.
    Warning,
    /// The login is not allowed to read it.
    Unknown,
    /// No lock can be acquired.
    Bad,
}

impl Finding {
    /// A check that has found nothing wrong.
    #[must_use]
    pub fn good(check: &'static str, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { check, verdict: Verdict::Good, server: None, text, remedy: None }
    }

    /// A check that has led to a warning.
    #[must_use]
    pub fn warning(check: &'static str, warning: &Warning) -> Self {
        let (text, remedy) = (warning.text().to_owned(), Some(warning.remedy()));
        Self { check, verdict: Verdict::Warning, server: None, text, remedy }
    }

    /// A check that the login is not allowed to make.
    #[must_use]
    pub fn unknown(check: &'static str, text: impl Into<String>, remedy: &'static str) -> Self {
        let text = text.into();
        Self { check, verdict: Verdict::Unknown, server: None, text, remedy: Some(remedy) }
    }

    /// A check that has found that no lock can be acquired.
    #[must_use]
    pub fn bad(check: &'static str, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { check, verdict: Verdict::Bad, server: None, text, remedy: None }
    }

    /// The same finding, for one server among several.
    #[must_use]
    pub fn at(mut self, server: impl Into<String>) -> Self {
        self.server = Some(server.into());
        self
    }
}

#[cfg(feature = "serde")]
mod serialized {
    use serde::{Serialize, Serializer};

    use super::{Finding, Verdict};
    use crate::base::serialized_fields::serialized_fields;

    serialized_fields!(Finding, it => {
        check: it.check,
        verdict: it.verdict,
        server: it.server,
        text: it.text,
        remedy: it.remedy,
    });

    /// `good`, `warning`, `unknown` or `bad`.
    impl Serialize for Verdict {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.serialize_str(match self {
                Self::Good => "good",
                Self::Warning => "warning",
                Self::Unknown => "unknown",
                Self::Bad => "bad",
            })
        }
    }
}
