//! Whether connections are encrypted.

use mysql_async::OptsBuilder;

use crate::backend::tls_files::TlsFiles;
use crate::base::error::LockError;

/// Settings of connections for TLS.
pub(crate) enum MysqlEncryption {
    Off,
    #[cfg(feature = "mysql-tls")]
    Tls(mysql_async::SslOpts),
}

impl MysqlEncryption {
    pub(crate) async fn new(files: Option<TlsFiles>) -> Result<Self, LockError> {
        match files {
            #[cfg(feature = "mysql-tls")]
            Some(files) => Ok(Self::Tls(tls::settings(files).await?)),
            _ => Ok(Self::Off),
        }
    }

    pub(crate) fn applied(&self, options: OptsBuilder) -> OptsBuilder {
        match self {
            Self::Off => options,
            #[cfg(feature = "mysql-tls")]
            Self::Tls(settings) => options.ssl_opts(settings.clone()),
        }
    }
}

#[cfg(feature = "mysql-tls")]
mod tls {
    use mysql_async::{ClientIdentity, SslOpts};
    use rustls::crypto::{CryptoProvider, ring};

    use crate::backend::tls::{client_config, root_certificates, wrong};
    use crate::backend::tls_files::{TlsFiles, Trust};
    use crate::base::error::LockError;

    /// The certificates of `files`, read once. The client library makes its own settings of rustls from them.
    pub(super) async fn settings(files: TlsFiles) -> Result<SslOpts, LockError> {
        // Finds what is wrong with the files before the first connection does.
        client_config(files.clone()).await?;
        tokio::task::spawn_blocking(move || read(&files))
            .await
            .map_err(|_| wrong("certificates could not be read"))?
    }

    fn read(files: &TlsFiles) -> Result<SslOpts, LockError> {
        // The library uses the provider of the process, and panics where the build has several and none is chosen.
        if CryptoProvider::get_default().is_none() {
            let _ = ring::default_provider().install_default();
        }
        let roots = root_certificates(files.ca.as_deref())?;
        let roots = roots.iter().map(|root| root.as_ref().to_vec().into()).collect();
        let mut settings = SslOpts::default()
            .with_disable_built_in_roots(true)
            .with_root_certs(roots)
            .with_danger_accept_invalid_certs(files.trust == Trust::Any);
        if let (Some(cert), Some(key)) = (&files.cert, &files.key) {
            let read = |path: &str| {
                let bytes = std::fs::read(path);
                bytes.map_err(|error| wrong(format!("{path} cannot be read: {error}")))
            };
            let identity = ClientIdentity::new(read(cert)?.into(), read(key)?.into());
            settings = settings.with_client_identity(Some(identity));
        }
        Ok(settings)
    }
}
