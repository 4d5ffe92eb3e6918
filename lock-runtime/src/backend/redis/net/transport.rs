//! A byte stream to a server: TCP without delay, and TLS over it where the URL says so.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use redis::RedisConnectionInfo;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::net::{TcpStream, lookup_host};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::backend::redis::conn::shard_channel::UntilTakenAway;
use crate::backend::redis::net::handshake::{Progress, Reached};
use crate::backend::redis::url::Endpoint;
use crate::backend::{BackendError, FailureKind};
use crate::base::error::LockError;

const KEEPALIVE: Duration = Duration::from_secs(15);

/// How long one address of a name may be silent before the next one is tried beside it: the Connection
/// AcquireOutcome Delay of RFC 8305.
const STAGGER: Duration = Duration::from_millis(250);

/// How long all of them may be silent before they are tried once more beside that. The first packets may have gone to
/// a host that another one has replaced since.
const AGAIN: Duration = Duration::from_secs(1);

pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Opens streams to one endpoint.
#[derive(Clone)]
pub(crate) struct Dialer {
    endpoint: Endpoint,
    /// Whether streams end where a shard channel is taken away.
    is_of_a_shard: bool,
    #[cfg(feature = "rediss")]
    tls: Option<crate::backend::redis::net::tls::Connector>,
}

impl Dialer {
    /// Reads certificates, once.
    pub(crate) async fn new(endpoint: Endpoint) -> Result<Self, LockError> {
        #[cfg(feature = "rediss")]
        {
            let tls = match endpoint.tls.clone() {
                Some(files) => Some(
                    crate::backend::redis::net::tls::Connector::new(&endpoint.host, files).await?,
                ),
                None => None,
            };
            Ok(Self { endpoint, is_of_a_shard: false, tls })
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
            Ok(Self { endpoint, is_of_a_shard: false })
        }
    }

    /// The same for another server, with what was read once.
    pub(crate) fn to(&self, endpoint: Endpoint) -> Result<Self, LockError> {
        Ok(Self {
            #[cfg(feature = "rediss")]
            tls: self.tls.as_ref().map(|tls| tls.to(&endpoint.host)).transpose()?,
            is_of_a_shard: self.is_of_a_shard,
            endpoint,
        })
    }

    /// For connections on which a shard channel may be heard.
    pub(crate) fn of_a_shard(self) -> Self {
        Self { is_of_a_shard: true, ..self }
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(crate) async fn dial(&self, progress: &Progress) -> Result<Box<dyn Stream>, BackendError> {
        let stream = self.open(progress).await?;
        Ok(if self.is_of_a_shard { Box::new(UntilTakenAway::new(stream)) } else { stream })
    }

    /// How to log in now.
    pub(crate) async fn login(
        &self,
        progress: &Progress,
    ) -> Result<RedisConnectionInfo, BackendError> {
        let Endpoint { login, credentials, .. } = &self.endpoint;
        let Some(provider) = credentials else { return Ok(login.clone()) };
        progress.note(Reached::Provider);
        let login = provider.log_in(login).await?;
        progress.note(Reached::Nothing);
        Ok(login)
    }

    async fn open(&self, progress: &Progress) -> Result<Box<dyn Stream>, BackendError> {
        #[cfg(unix)]
        if let Some(path) = &self.endpoint.socket {
            progress.note(Reached::Address);
            let stream =
                UnixStream::connect(path).await.map_err(|error| self.unreachable(error))?;
            progress.note(Reached::Socket);
            return Ok(Box::new(stream));
        }
        let Endpoint { host, port, .. } = &self.endpoint;
        // Asked anew each time: after a failover the name may lead elsewhere.
        let addresses = lookup_host((host.as_str(), *port)).await;
        let addresses = addresses.map_err(|error| self.unreachable(error))?.collect();
        progress.note(Reached::Address);
        let tcp = race(addresses).await.map_err(|error| self.unreachable(error))?;
        progress.note(Reached::Socket);
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
            progress.note(Reached::Tls);
            return Ok(Box::new(stream));
        }
        Ok(Box::new(tcp))
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

/// Connects to whichever of `addresses` answers first (Happy Eyeballs, RFC 8305): each gets a moment before the
/// next is tried beside it, and one that refuses gives way to the next at once. Dropped, it ends all attempts.
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
            // The first address is the one that the system prefers, so its failure says most.
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

/// The families of addresses in turns, that of the first one first; in each the order of the system stays.
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

    /// An address that swallows packets: the kernel drops what comes while its backlog is full.
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

    fn refusing() -> SocketAddr {
        listening().0
    }

    async fn reached(addresses: Vec<SocketAddr>) -> io::Result<SocketAddr> {
        race(addresses).await?.peer_addr()
    }

    #[tokio::test]
    async fn addresses_that_swallow_packets_do_not_keep_the_one_that_answers_away() {
        let ((one, _one), (other, _other)) = (silent().await, silent().await);
        let (open, _listener) = listening();
        assert_eq!(reached(vec![one, open]).await.unwrap(), open);
        assert_eq!(reached(vec![one, other, open]).await.unwrap(), open);
        assert_eq!(reached(vec![one, refusing(), other, open]).await.unwrap(), open);
        // They are tried as long as there is time.
        let alone = tokio::time::timeout(2 * STAGGER, reached(vec![one, other])).await;
        assert!(alone.is_err(), "{alone:?}");
    }

    #[tokio::test]
    async fn the_first_that_answers_is_taken_and_refusals_are_told() {
        let (first, _first) = listening();
        let (second, _second) = listening();
        assert_eq!(reached(vec![first, second]).await.unwrap(), first);
        assert_eq!(reached(vec![refusing(), second]).await.unwrap(), second);
        let refused = reached(vec![refusing(), refusing()]).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        assert!(reached(Vec::new()).await.is_err());
    }

    #[test]
    fn families_take_turns() {
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
