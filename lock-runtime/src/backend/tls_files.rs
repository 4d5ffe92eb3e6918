//! What the URL of a store says about TLS.

/// PEM files for a TLS connection. Without `ca` the system's root certificates apply.
#[derive(Clone, Debug, Default)]
pub(crate) struct TlsFiles {
    pub(crate) trust: Trust,
    pub(crate) ca: Option<String>,
    pub(crate) cert: Option<String>,
    pub(crate) key: Option<String>,
}

/// Which server certificates are accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Trust {
    /// Certificates signed by a trusted authority.
    #[default]
    Verified,
    /// All certificates: `?insecure`.
    Any,
}
