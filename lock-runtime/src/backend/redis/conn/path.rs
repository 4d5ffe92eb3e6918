//! Which of two connections a request takes.

/// The connection that a request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// The driver's.
    Background,
    /// The one on the runtime of the caller, if there is one. Its order relative to requests on the driver's is open.
    Foreground,
}
