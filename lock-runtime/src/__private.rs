//! Names that expansions of `#[distributed_lock]` use. Not public API: it changes with any release.

pub use core::future::Future;
pub use core::time::Duration;

pub use inventory::submit;

pub use crate::api::enter::Entering;
pub use crate::api::entered::Entered as Entry;
pub use crate::api::guard::LockGuard;
pub use crate::api::locked_future::Locked;
pub use crate::api::pool::LockPool;
pub use crate::attribute::call::{Call, enter};
pub use crate::attribute::key_template::{IntoKey, KeyPart, KeyWriter, constant_key, template};
pub use crate::attribute::return_type::{FromLockError, Skipped};
pub use crate::base::call_site::{Location, RegisteredSite, Site};
pub use crate::base::error::LockError;
pub use crate::base::key::Key;
pub use crate::base::options::{LockOptions, OnLost, ReleaseMode, Renew, Wait};

/// A key without placeholders.
///
/// # Errors
/// [`InvalidKey`](crate::ErrorKind::InvalidKey) if it is empty.
pub fn literal(text: &'static str) -> Result<Key, LockError> {
    Key::from_static(text).checked()
}

/// `key = expression`.
///
/// # Errors
/// [`InvalidKey`](crate::ErrorKind::InvalidKey) if it is empty.
pub fn key(value: impl IntoKey) -> Result<Key, LockError> {
    value.into_key().checked()
}

/// `keys = expression`.
pub fn keys<I>(values: I) -> Vec<Result<Key, LockError>>
where
    I: IntoIterator,
    I::Item: IntoKey,
{
    values.into_iter().map(key).collect()
}

/// `on_error = { .. closure }`: gives the closure its type before the body runs.
pub fn conversion<R, F: FnOnce(LockError) -> R>(convert: F) -> F {
    convert
}

/// `on_error = expression`: gives the closure its type.
pub fn on_error<R>(convert: impl FnOnce(LockError) -> R, error: LockError) -> R {
    convert(error)
}
