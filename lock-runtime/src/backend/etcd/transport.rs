//! Connections to the members of a cluster.

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::backend::Limits;
use crate::backend::credentials::Provider;
use crate::backend::etcd::url::{EtcdCluster, EtcdLogin};
#[cfg(feature = "etcd-tls")]
use crate::backend::tls_files::TlsFiles;
use crate::backend::{BackendError, FailureKind};
use crate::base::error::LockError;

pub(crate) trait MemberStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> MemberStream for S {}

/// Opens connections to the members of one cluster.
pub(crate) struct MemberDialer {
    pub(crate) cluster: EtcdCluster,
    pub(crate) limits: Limits,
    credentials: Option<Provider>,
    #[cfg(feature = "etcd-tls")]
    tls: Option<tokio_rustls::TlsConnector>,
}

impl MemberDialer {
    /// Reads the certificate files.
    pub(crate) async fn new(
        cluster: EtcdCluster,
        credentials: Option<Provider>,
        limits: Limits,
    ) -> Result<Self, LockError> {
        #[cfg(feature = "etcd-tls")]
        let tls = match cluster.tls.clone() {
            Some(files) => Some(connector(files).await?),
            None => None,
        };
        Ok(Self {
            cluster,
            limits,
            credentials,
            #[cfg(feature = "etcd-tls")]
            tls,
        })
    }

    /// Host and port, for error texts.
    pub(crate) fn name(&self, member: usize) -> String {
        match self.cluster.members.get(member) {
            Some((host, port)) if host.contains(':') => format!("[{host}]:{port}"),
            Some((host, port)) => format!("{host}:{port}"),
            None => String::new(),
        }
    }

    /// The login of the next connection.
    pub(crate) async fn login(&self) -> Result<Option<EtcdLogin>, BackendError> {
        let Some(provider) = &self.credentials else { return Ok(self.cluster.login.clone()) };
        let given = provider.credentials().await?;
        let url_user = || self.cluster.login.as_ref().map(|login| login.user.as_str());
        let Some(user) = given.user().or_else(url_user) else {
            let message = "the provider of credentials has named no user, and neither has the URL";
            return Err(BackendError::new(FailureKind::Rejected, message)
                .remedy("return `Credentials::new(user, password)`, or name a user in the URL"));
        };
        Ok(Some(EtcdLogin { user: user.to_owned(), password: given.secret().to_owned() }))
    }

    pub(crate) async fn connect(&self, member: usize) -> std::io::Result<Box<dyn MemberStream>> {
        let Some((host, port)) = self.cluster.members.get(member) else {
            return Err(std::io::ErrorKind::NotFound.into());
        };
        let tcp = TcpStream::connect((host.as_str(), *port)).await?;
        tcp.set_nodelay(true)?;
        #[cfg(feature = "etcd-tls")]
        if let Some(connector) = &self.tls {
            let name = rustls::pki_types::ServerName::try_from(host.clone())
                .map_err(std::io::Error::other)?;
            return Ok(Box::new(connector.connect(name, tcp).await?));
        }
        Ok(Box::new(tcp))
    }
}

#[cfg(feature = "etcd-tls")]
async fn connector(files: TlsFiles) -> Result<tokio_rustls::TlsConnector, LockError> {
    let mut config = crate::backend::tls::client_config(files).await?;
    // The server speaks its API by HTTP/2 only with a client that asks for it.
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(tokio_rustls::TlsConnector::from(std::sync::Arc::new(config)))
}
