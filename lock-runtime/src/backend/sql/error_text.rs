//! What the errors of both client libraries have in common.

use std::error::Error;

/// The text of the last cause of `error`, which names what happened.
pub(crate) fn root(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
