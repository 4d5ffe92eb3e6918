//! The return value of an annotated function if its body did not complete.

use crate::base::error::LockError;

/// A return type that can carry a [`LockError`].
///
/// Every `Result<T, E>` with `E: From<LockError>` can, and so can the responses of axum and actix-web with their features.
/// Implement it for a custom outcome type:
///
/// ```
/// use lock_runtime::{FromLockError, LockError};
///
/// enum Outcome { Done, Locked(LockError) }
///
/// impl FromLockError for Outcome {
///     fn from_lock_error(error: LockError) -> Self { Outcome::Locked(error) }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot carry a lock error",
    label = "a failed lock has to be returned as this type",
    note = "return `Result<_, E>` and write `impl From<LockError> for E`, or say what to return: `on_error = |error| ..`"
)]
pub trait FromLockError {
    /// The value for `error`.
    fn from_lock_error(error: LockError) -> Self;
}

#[diagnostic::do_not_recommend]
impl<T, E: From<LockError>> FromLockError for Result<T, E> {
    fn from_lock_error(error: LockError) -> Self {
        Err(error.into())
    }
}

/// A return type with a value for a skipped call, for `on_conflict = "skip"`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no value for a skipped call",
    label = "`on_conflict = \"skip\"` needs `()`, `Option<_>`, `Result<(), E>` or `Result<Option<_>, E>` here",
    note = "change the return type, or name a function to call instead: `on_conflict = path::to::fallback`"
)]
pub trait Skipped {
    /// The value of a call that did not run.
    fn skipped() -> Self;
}

impl Skipped for () {
    fn skipped() -> Self {}
}

impl<T> Skipped for Option<T> {
    fn skipped() -> Self {
        None
    }
}

impl<E> Skipped for Result<(), E> {
    fn skipped() -> Self {
        Ok(())
    }
}

impl<T, E> Skipped for Result<Option<T>, E> {
    fn skipped() -> Self {
        Ok(None)
    }
}
