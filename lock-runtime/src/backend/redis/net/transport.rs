//! Byte streams to a server: TCP without Nagle's algorithm or a Unix socket, with TLS for `rediss://`.

use std::io;
use std::time::Duration;

use redis::RedisConnectionInfo;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::net::{TcpStream, lookup_host};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::backend::address_race::{connect_by_name, connect_to_first};
use crate::backend::redis::net::progress::{ConnectProgress, ConnectStage};
use crate::backend::redis::net::shard_stream::ShardStream;
#[cfg(feature = "rediss")]
use crate::backend::redis::net::tls::TlsSettings;
use crate::backend::redis::url::Endpoint;
use crate::backend::{BackendError, FailureKind};
use crate::base::error::LockError;

const KEEPALIVE: Duration = Duration::from_secs(15);

pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Opens streams to one endpoint.
#[derive(Clone)]
pub(crate) struct Dialer {
    endpoint: Endpoint,
    /// Whether streams end where the server takes a shard channel away.
    has_shard_channel: bool,
    /// Where names are resolved, sockets are connected and credentials are asked for, if not on the current runtime.
    connects_on: Option<Handle>,
    #[cfg(feature = "rediss")]
    tls: Option<TlsSettings>,
}

impl Dialer {
    /// Reads the certificate files. Later connections reuse them.
    pub(crate) async fn new(endpoint: Endpoint) -> Result<Self, LockError> {
        #[cfg(feature = "rediss")]
        {
            let tls = match endpoint.tls.clone() {
                Some(files) => Some(TlsSettings::new(&endpoint.host, files).await?),
                None => None,
            };
            Ok(Self { endpoint, has_shard_channel: false, connects_on: None, tls })
        }
        #[cfg(not(feature = "rediss"))]
        {
            if endpoint.tls.is_some() {
                return Err(LockError::new(
                    crate::base::error::ErrorKind::Config,
                    "`rediss://` is not a store that this build knows",
                )
                .remedy("enable the feature `rediss` of lock-runtime"));
            }
            Ok(Self { endpoint, has_shard_channel: false, connects_on: None })
        }
    }

    /// A dialer to `endpoint` with the same certificates.
    pub(crate) fn to(&self, endpoint: Endpoint) -> Result<Self, LockError> {
        Ok(Self {
            #[cfg(feature = "rediss")]
            tls: self.tls.as_ref().map(|tls| tls.to(&endpoint.host)).transpose()?,
            has_shard_channel: self.has_shard_channel,
            connects_on: self.connects_on.clone(),
            endpoint,
        })
    }

    /// For connections that may subscribe to a shard channel.
    pub(crate) fn with_shard_channel(self) -> Self {
        Self { has_shard_channel: true, ..self }
    }

    /// For connections on other runtimes: work that may take long, or is the program's code, runs on `driver`.
    pub(crate) fn connecting_on(self, driver: &Handle) -> Self {
        Self { connects_on: Some(driver.clone()), ..self }
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(crate) async fn dial(
        &self,
        progress: &ConnectProgress,
    ) -> Result<Box<dyn Stream>, BackendError> {
        let stream = self.open(progress).await?;
        Ok(if self.has_shard_channel { Box::new(ShardStream::new(stream)) } else { stream })
    }

    /// The user and password of the next log-in, from the provider of credentials if there is one.
    pub(crate) async fn login(
        &self,
        progress: &ConnectProgress,
    ) -> Result<RedisConnectionInfo, BackendError> {
        let Endpoint { login, credentials, .. } = &self.endpoint;
        let Some(provider) = credentials else { return Ok(login.clone()) };
        progress.note(ConnectStage::Credentials);
        let login = match &self.connects_on {
            None => provider.log_in(login).await?,
            Some(driver) => {
                let (provider, login) = (provider.clone(), login.clone());
                on(driver, async move { provider.log_in(&login).await }).await?
            }
        };
        progress.note(ConnectStage::Started);
        Ok(login)
    }

    async fn open(&self, progress: &ConnectProgress) -> Result<Box<dyn Stream>, BackendError> {
        #[cfg(unix)]
        if let Some(path) = &self.endpoint.socket {
            progress.note(ConnectStage::Address);
            let stream =
                UnixStream::connect(path).await.map_err(|error| self.unreachable(error))?;
            progress.note(ConnectStage::Socket);
            return Ok(Box::new(stream));
        }
        let tcp = self.connect(progress).await.map_err(|error| self.unreachable(error))?;
        progress.note(ConnectStage::Socket);
        // Nagle's algorithm holds back a second small request while the first is unanswered.
        tcp.set_nodelay(true).map_err(|error| self.unreachable(error))?;
        // Detects a peer that has disappeared without closing the connection, even while nothing is sent.
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
        SockRef::from(&tcp)
            .set_tcp_keepalive(&keepalive)
            .map_err(|error| self.unreachable(error))?;
        #[cfg(feature = "rediss")]
        if let Some(tls) = &self.tls {
            let stream = tls.connect(tcp).await.map_err(|error| self.untrusted(error))?;
            progress.note(ConnectStage::Tls);
            return Ok(Box::new(stream));
        }
        Ok(Box::new(tcp))
    }

    async fn connect(&self, progress: &ConnectProgress) -> io::Result<TcpStream> {
        let Endpoint { host, port, .. } = &self.endpoint;
        // Resolved for each connection: after a failover the name may have another address.
        let Some(driver) = &self.connects_on else {
            let addresses = lookup_host((host.as_str(), *port)).await?.collect();
            progress.note(ConnectStage::Address);
            return connect_to_first(addresses).await;
        };
        let (host, port) = (host.clone(), *port);
        let connecting = async move { connect_by_name(&host, port).await?.into_std() };
        TcpStream::from_std(on(driver, connecting).await?)
    }

    fn unreachable(&self, error: io::Error) -> BackendError {
        let message = format!("Redis at {} is not reachable: {error}", self.endpoint);
        BackendError::new(FailureKind::NotApplied, message)
            .remedy("check that the server is up and reachable, and the host and port in the URL")
            .because(error)
    }

    #[cfg(feature = "rediss")]
    fn untrusted(&self, error: io::Error) -> BackendError {
        let message = format!("no TLS connection to Redis at {}: {error}", self.endpoint);
        BackendError::new(FailureKind::NotApplied, message)
            .remedy("check that the port speaks TLS and the certificate names the host; a private authority or a self-signed certificate goes into the URL: `?ca=/path.pem`")
            .because(error)
    }
}

/// Runs `work` on `runtime`. Dropping the future ends it.
///
/// # Panics
/// If `work` does.
async fn on<T: Send + 'static>(
    runtime: &Handle,
    work: impl Future<Output = T> + Send + 'static,
) -> T {
    let mut tasks = JoinSet::new();
    tasks.spawn_on(work, runtime);
    match tasks.join_next().await {
        Some(Ok(done)) => done,
        Some(Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // The driver ends, and the connection with it.
        Some(Err(_)) | None => std::future::pending().await,
    }
}
