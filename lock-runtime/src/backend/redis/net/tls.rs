//! TLS connections to Redis.

use std::io;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::backend::tls::{client_config, wrong};
use crate::backend::tls_files::TlsFiles;
use crate::base::error::LockError;

/// The TLS configuration for one server.
#[derive(Clone)]
pub(crate) struct TlsSettings {
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl TlsSettings {
    pub(crate) async fn new(host: &str, files: TlsFiles) -> Result<Self, LockError> {
        let name = name(host)?;
        let config = client_config(files).await?;
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), name })
    }

    /// The same configuration for another server.
    pub(crate) fn to(&self, host: &str) -> Result<Self, LockError> {
        Ok(Self { connector: self.connector.clone(), name: name(host)? })
    }

    pub(crate) async fn connect(&self, tcp: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.connector.connect(self.name.clone(), tcp).await
    }
}

fn name(host: &str) -> Result<ServerName<'static>, LockError> {
    ServerName::try_from(host.to_owned())
        .map_err(|_| wrong(format!("`{host}` is not a name that a certificate can have")))
}
