//! Byte streams to a server: TCP without Nagle's algorithm or a Unix socket, with TLS for `rediss://`.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use redis::RedisConnectionInfo;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::net::{TcpStream, lookup_host};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::backend::redis::net::progress::{ConnectProgress, ConnectStage};
use crate::backend::redis::net::shard_stream::ShardStream;
#[cfg(feature = "rediss")]
use crate::backend::redis::net::tls::TlsSettings;
use crate::backend::redis::url::Endpoint;
use crate::backend::{BackendError, FailureKind};
use crate::base::error::LockError;

const KEEPALIVE: Duration = Duration::from_secs(15);

/// The wait for one address before the next one is tried in parallel: the Connection Attempt Delay of RFC 8305.
const STAGGER: Duration = Duration::from_millis(250);

/// The wait for all addresses before each is tried once more in parallel. The first packets may have gone to a host
/// that another one has replaced since.
const AGAIN: Duration = Duration::from_secs(1);

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

    /// For connections on other runtimes: what may take long, or is the program's code, runs on `driver`.
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
        // Nagle's algorithm holds a second small request back behind an unanswered first.
        tcp.set_nodelay(true).map_err(|error| self.unreachable(error))?;
        // Detects a peer that has disappeared without closing the connection, also while nothing is sent.
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
            return race(addresses).await;
        };
        let (host, port) = (host.clone(), *port);
        let connecting = async move {
            let addresses = lookup_host((host.as_str(), port)).await?.collect();
            race(addresses).await?.into_std()
        };
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
            .remedy("check that the port speaks TLS and the certificate names the host; a private authority, or a certificate that signs itself, goes into the URL: `?ca=/path.pem`")
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

/// Connects to the first of `addresses` that answers (Happy Eyeballs, RFC 8305). The next address is tried after
/// [`STAGGER`], or at once if an attempt is refused. Dropping the future ends all attempts.
async fn race(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let addresses = interleaved(addresses);
    let mut waiting = addresses.iter();
    let mut attempts = JoinSet::new();
    let mut failure = None;
    loop {
        if let Some(address) = waiting.next() {
            attempts.spawn(TcpStream::connect(*address));
        }
        let is_last = waiting.len() == 0;
        let ended = tokio::select! {
            ended = attempts.join_next() => ended,
            () = sleep(if is_last { AGAIN } else { STAGGER }) => {
                if is_last {
                    waiting = addresses.iter();
                }
                continue;
            }
        };
        match ended {
            Some(Ok(Ok(stream))) => return Ok(stream),
            // The system lists the preferred address first, so its error is the most relevant one.
            Some(Ok(Err(error))) => {
                failure.get_or_insert(error);
            }
            Some(Err(_)) => {}
            None if is_last => {
                return Err(failure.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into()));
            }
            None => {}
        }
    }
}

/// Alternates between IPv4 and IPv6, starting with the family of the first address. The order within a family is kept.
fn interleaved(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let Some(first) = addresses.first().map(SocketAddr::is_ipv4) else { return addresses };
    let count = addresses.len();
    let (ones, others): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| address.is_ipv4() == first);
    let (mut ones, mut others) = (ones.into_iter(), others.into_iter());
    let mut all = Vec::with_capacity(count);
    while all.len() < count {
        all.extend(ones.next());
        all.extend(others.next());
    }
    all
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};

    use super::*;

    /// An address without answers: the kernel drops packets while the backlog of the listener is full.
    async fn silent() -> (SocketAddr, Vec<socket2::Socket>) {
        use socket2::{Domain, Socket, Type};
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        listener.listen(0).unwrap();
        let address = listener.local_addr().unwrap().as_socket().unwrap();
        let mut all = vec![listener];
        loop {
            let filler = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            filler.set_nonblocking(true).unwrap();
            let _ = filler.connect(&address.into());
            all.push(filler);
            if tokio::time::timeout(STAGGER, TcpStream::connect(address)).await.is_err() {
                return (address, all);
            }
        }
    }

    fn listening() -> (SocketAddr, TcpListener) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        (listener.local_addr().unwrap(), listener)
    }

    /// While the socket is there, no other one gets the port.
    fn refusing() -> (SocketAddr, socket2::Socket) {
        use socket2::{Domain, Socket, Type};
        let bound = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        bound.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        (bound.local_addr().unwrap().as_socket().unwrap(), bound)
    }

    async fn reached(addresses: Vec<SocketAddr>) -> io::Result<SocketAddr> {
        race(addresses).await?.peer_addr()
    }

    #[tokio::test]
    async fn silent_addresses_do_not_delay_the_one_that_answers_for_long() {
        let ((one, _one), (other, _other)) = (silent().await, silent().await);
        let (open, _listener) = listening();
        let (refusing, _bound) = refusing();
        assert_eq!(reached(vec![one, open]).await.unwrap(), open);
        assert_eq!(reached(vec![one, other, open]).await.unwrap(), open);
        assert_eq!(reached(vec![one, refusing, other, open]).await.unwrap(), open);
        // Silent addresses are tried until the caller gives up.
        let alone = tokio::time::timeout(2 * STAGGER, reached(vec![one, other])).await;
        assert!(alone.is_err(), "{alone:?}");
    }

    #[tokio::test]
    async fn the_first_address_that_answers_is_used_and_a_refusal_is_returned() {
        let (first, _first) = listening();
        let (second, _second) = listening();
        let ((refusing, _bound), (other, _other)) = (refusing(), refusing());
        assert_eq!(reached(vec![first, second]).await.unwrap(), first);
        assert_eq!(reached(vec![refusing, second]).await.unwrap(), second);
        let refused = reached(vec![refusing, other]).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        assert!(reached(Vec::new()).await.is_err());
    }

    #[test]
    fn address_families_alternate() {
        let v4 = |port| SocketAddr::from((IpAddr::V4(Ipv4Addr::LOCALHOST), port));
        let v6 = |port| SocketAddr::from((IpAddr::V6(Ipv6Addr::LOCALHOST), port));
        assert_eq!(
            interleaved(vec![v6(1), v6(2), v6(3), v4(1), v4(2)]),
            [v6(1), v4(1), v6(2), v4(2), v6(3)]
        );
        assert_eq!(interleaved(vec![v4(1), v4(2), v6(1)]), [v4(1), v6(1), v4(2)]);
        assert_eq!(interleaved(vec![v4(1), v4(2)]), [v4(1), v4(2)]);
        assert!(interleaved(Vec::new()).is_empty());
    }
}
