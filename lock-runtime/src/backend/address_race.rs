//! Which of several addresses of a server is connected to.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpStream, lookup_host};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// The wait for one address before the next one is tried in parallel: the Connection Attempt Delay of RFC 8305.
const STAGGER: Duration = Duration::from_millis(250);

/// The wait for all addresses before each is tried once more in parallel. The first packets may have gone to a host
/// that another one has replaced since.
const AGAIN: Duration = Duration::from_secs(1);

/// Connects to the host, whose name is resolved for each connection: it may have another address.
pub(crate) async fn connect_by_name(host: &str, port: u16) -> io::Result<TcpStream> {
    connect_to_first(lookup_host((host, port)).await?.collect()).await
}

/// Connects to the first of `addresses` that answers (Happy Eyeballs, RFC 8305). The next address is tried after
/// [`STAGGER`], or at once if an attempt is refused. Dropping the future ends all attempts.
pub(crate) async fn connect_to_first(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
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

// `socket2` comes with Redis.
#[cfg(all(test, feature = "redis"))]
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
        connect_to_first(addresses).await?.peer_addr()
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
