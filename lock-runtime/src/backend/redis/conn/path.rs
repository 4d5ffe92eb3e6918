//! Which of two connections a request takes.

/// The connection that a request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// The driver's connection.
    Background,
    /// The connection on the caller's runtime, if there is one. The order relative to requests on the driver's connection is
    /// unspecified.
    Foreground,
}
