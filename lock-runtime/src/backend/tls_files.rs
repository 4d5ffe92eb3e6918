//! What the URL of a store says about TLS.

#[cfg(any(feature = "_sql", feature = "etcd", feature = "zookeeper"))]
use crate::base::error::{ErrorKind, LockError};

/// PEM files for a TLS connection. Without `ca` the system's root certificates apply.
#[derive(Clone, Debug, Default)]
pub(crate) struct TlsFiles {
    pub(crate) trust: Trust,
    pub(crate) ca: Option<String>,
    pub(crate) cert: Option<String>,
    pub(crate) key: Option<String>,
}

#[cfg(any(feature = "_sql", feature = "etcd", feature = "zookeeper"))]
impl TlsFiles {
    /// The files of a connection that is `encrypted`. `None` for one that is not.
    ///
    /// # Errors
    ///
    /// The files do not fit together, or are for TLS. Remedies say how to `encrypt`, and begin queries with `setting`.
    pub(crate) fn checked(
        self,
        encrypted: bool,
        encrypt: String,
        setting: &str,
    ) -> Result<Option<Self>, LockError> {
        let wrong = |cause: &'static str, remedy: String| {
            Err(LockError::new(ErrorKind::Config, cause).remedy(remedy))
        };
        let names_files = [&self.ca, &self.cert, &self.key].iter().any(|file| file.is_some());
        if !encrypted && (names_files || self.trust == Trust::Any) {
            return wrong("`ca`, `cert`, `key` and `insecure` are for TLS", encrypt);
        }
        if self.cert.is_some() != self.key.is_some() {
            let cause = "a client certificate needs both `cert` and `key`";
            return wrong(cause, format!("write `?{setting}cert=/path.pem&key=/path.key`"));
        }
        if self.trust == Trust::Any && self.ca.is_some() {
            let cause = "`insecure` accepts any certificate, and `ca` only those of an authority";
            return wrong(cause, "leave `insecure` out".to_owned());
        }
        Ok(encrypted.then_some(self))
    }
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
