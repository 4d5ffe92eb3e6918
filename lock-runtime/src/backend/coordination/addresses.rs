//! The addresses of a cluster, and streams to them.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};

use crate::backend::address_race::connect_by_name;
use crate::backend::tls_files::TlsFiles;
use crate::base::error::LockError;
use crate::base::jitter;

pub(crate) trait ServerStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ServerStream for S {}

/// Host and port of each server of a cluster, and how to connect to them.
pub(crate) struct ServerAddresses {
    all: Vec<(String, u16)>,
    #[cfg(any(feature = "etcd-tls", feature = "zookeeper-tls"))]
    tls: Option<tokio_rustls::TlsConnector>,
}

fn random_below(count: usize) -> usize {
    let nanos = jitter::below(Duration::from_secs(1)).as_nanos();
    usize::try_from(nanos).unwrap_or_default() % count.max(1)
}

impl ServerAddresses {
    /// Reads the certificate files. `protocol` is the one that TLS requests, if the servers have several.
    pub(crate) async fn new(
        all: Vec<(String, u16)>,
        tls: Option<TlsFiles>,
        protocol: Option<&'static [u8]>,
    ) -> Result<Self, LockError> {
        #[cfg(any(feature = "etcd-tls", feature = "zookeeper-tls"))]
        let tls = match tls {
            Some(files) => {
                let mut config = crate::backend::tls::client_config(files).await?;
                config.alpn_protocols = protocol.into_iter().map(Vec::from).collect();
                Some(tokio_rustls::TlsConnector::from(std::sync::Arc::new(config)))
            }
            None => None,
        };
        #[cfg(not(any(feature = "etcd-tls", feature = "zookeeper-tls")))]
        let _ = (tls, protocol);
        Ok(Self {
            all,
            #[cfg(any(feature = "etcd-tls", feature = "zookeeper-tls"))]
            tls,
        })
    }

    pub(crate) fn count(&self) -> usize {
        self.all.len()
    }

    /// The position of a random server, so that the pools of a cluster use all servers.
    pub(crate) fn random(&self) -> usize {
        random_below(self.count())
    }

    /// The position of another random server, if there are several. So the pools of a server that ends divide among all others.
    pub(crate) fn other_than(&self, server: usize) -> usize {
        let others = self.count().saturating_sub(1);
        (server + 1 + random_below(others)) % self.count().max(1)
    }

    /// Host and port of the server at this position, for error texts.
    pub(crate) fn name(&self, server: usize) -> String {
        match self.all.get(server) {
            Some((host, port)) if host.contains(':') => format!("[{host}]:{port}"),
            Some((host, port)) => format!("{host}:{port}"),
            None => String::new(),
        }
    }

    pub(crate) async fn connect(&self, server: usize) -> std::io::Result<Box<dyn ServerStream>> {
        let Some((host, port)) = self.all.get(server) else {
            return Err(std::io::ErrorKind::NotFound.into());
        };
        let tcp = connect_by_name(host, *port).await?;
        tcp.set_nodelay(true)?;
        #[cfg(any(feature = "etcd-tls", feature = "zookeeper-tls"))]
        if let Some(connector) = &self.tls {
            let name = rustls::pki_types::ServerName::try_from(host.clone())
                .map_err(std::io::Error::other)?;
            return Ok(Box::new(connector.connect(name, tcp).await?));
        }
        Ok(Box::new(tcp))
    }
}
