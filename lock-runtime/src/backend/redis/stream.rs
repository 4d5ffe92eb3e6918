//! A byte stream to a server: TCP without delay, and TLS over it where the URL says so.

use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::endpoint::Endpoint;
use crate::backend::{BackendError, Failure};
use crate::error::LockError;

const KEEPALIVE: Duration = Duration::from_secs(15);

pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Opens streams to one endpoint.
#[derive(Clone)]
pub(super) struct Dialer {
    endpoint: Endpoint,
    #[cfg(feature = "rediss")]
    tls: Option<super::tls::Connector>,
}

impl Dialer {
    /// Reads certificates, once.
    pub(super) async fn new(endpoint: Endpoint) -> Result<Self, LockError> {
        #[cfg(feature = "rediss")]
        {
            let tls = match endpoint.tls.clone() {
                Some(files) => Some(super::tls::Connector::new(&endpoint.host, files).await?),
                None => None,
            };
            Ok(Self { endpoint, tls })
        }
        #[cfg(not(feature = "rediss"))]
        {
            if endpoint.tls.is_some() {
                return Err(LockError::new(
                    crate::error::ErrorKind::Config,
                    "`rediss://` is not a store that this build knows",
                )
                .remedy("enable the feature `rediss` of lock-runtime"));
            }
            Ok(Self { endpoint })
        }
    }

    /// The same for another server, with what was read once.
    pub(super) fn to(&self, endpoint: Endpoint) -> Result<Self, LockError> {
        Ok(Self {
            #[cfg(feature = "rediss")]
            tls: self.tls.as_ref().map(|tls| tls.to(&endpoint.host)).transpose()?,
            endpoint,
        })
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(super) async fn dial(&self) -> Result<Box<dyn Stream>, BackendError> {
        let Endpoint { host, port, .. } = &self.endpoint;
        let tcp = TcpStream::connect((host.as_str(), *port))
            .await
            .map_err(|error| self.unreachable(error))?;
        // Nagle's algorithm holds a second small request back behind an unanswered first.
        tcp.set_nodelay(true).map_err(|error| self.unreachable(error))?;
        // Notices a peer that is gone without a word, also while nothing is sent.
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
        SockRef::from(&tcp)
            .set_tcp_keepalive(&keepalive)
            .map_err(|error| self.unreachable(error))?;
        #[cfg(feature = "rediss")]
        if let Some(tls) = &self.tls {
            let stream = tls.connect(tcp).await.map_err(|error| self.untrusted(error))?;
            return Ok(Box::new(stream));
        }
        Ok(Box::new(tcp))
    }

    fn unreachable(&self, error: io::Error) -> BackendError {
        let message = format!("Redis at {} is not reachable: {error}", self.endpoint);
        BackendError::new(Failure::NotNow, message)
            .remedy("check that the server is up and reachable, and the host and port in the URL")
            .because(error)
    }

    #[cfg(feature = "rediss")]
    fn untrusted(&self, error: io::Error) -> BackendError {
        let message = format!("no TLS connection to Redis at {}: {error}", self.endpoint);
        BackendError::new(Failure::NotNow, message)
            .remedy("check that the port speaks TLS and the certificate names the host; a private authority goes into the URL: `?ca=/path.pem`")
            .because(error)
    }
}
