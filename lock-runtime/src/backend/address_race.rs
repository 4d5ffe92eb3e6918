//! Selects the address of a server to connect to.

#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
use std::io;
#[cfg(feature = "_sql")]
use std::net::IpAddr;
use std::net::SocketAddr;
use std::time::Duration;

#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
use tokio::net::TcpStream;
use tokio::net::lookup_host;

use crate::backend::race::{Pace, race};

/// The next address follows after the Connection Attempt Delay of RFC 8305. All are tried again after each second, until the
/// timeout of the caller: earlier packets may have gone to a host that has been replaced since.
#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
const TCP: Pace = Pace { next: Duration::from_millis(250), again: Some(Duration::from_secs(1)) };

/// Connects to the host. Its name is resolved for each connection, as the address may have changed.
#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
pub(crate) async fn connect_by_name(host: &str, port: u16) -> io::Result<TcpStream> {
    connect_to_first(lookup_host((host, port)).await?.collect()).await
}

/// Connects to the first of `addresses` that answers (Happy Eyeballs, RFC 8305). Dropping the future ends all attempts.
#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
pub(crate) async fn connect_to_first(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let connected = race(&interleaved(addresses), TCP, TcpStream::connect).await;
    connected.map_err(|errors| preferred(errors).unwrap_or(io::ErrorKind::AddrNotAvailable.into()))
}

/// Logs in at the first address of a host that allows it. The next address is tried after `stagger`, which is several round
/// trips long. `log_in` gets `None` if the name has no address, and reports that.
#[cfg(feature = "_sql")]
pub(crate) async fn log_in_by_name<T, E, F>(
    (host, port): (&str, u16),
    stagger: Duration,
    log_in: impl Fn(Option<IpAddr>) -> F,
) -> Result<T, E>
where
    F: Future<Output = Result<T, E>>,
{
    let addresses = lookup_host((host, port)).await.into_iter().flatten().collect();
    let pace = Pace { next: stagger, again: None };
    match race(&interleaved(addresses), pace, |address| log_in(Some(address.ip()))).await {
        Ok(session) => Ok(session),
        Err(errors) => match preferred(errors) {
            Some(error) => Err(error),
            None => log_in(None).await,
        },
    }
}

/// The first error: the system lists the preferred address first. `None` if there was no address.
fn preferred<E>(errors: Vec<E>) -> Option<E> {
    errors.into_iter().next()
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
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn address_families_alternate() {
        let v4 = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let v6 = |port| SocketAddr::from((Ipv6Addr::LOCALHOST, port));
        assert_eq!(
            interleaved(vec![v6(1), v6(2), v6(3), v4(1), v4(2)]),
            [v6(1), v4(1), v6(2), v4(2), v6(3)]
        );
        assert_eq!(interleaved(vec![v4(1), v4(2), v6(1)]), [v4(1), v6(1), v4(2)]);
        assert_eq!(interleaved(vec![v4(1), v4(2)]), [v4(1), v4(2)]);
        assert!(interleaved(Vec::new()).is_empty());
    }
}

// `socket2` comes with Redis.
#[cfg(all(test, feature = "redis"))]
mod tcp_tests {
    use std::net::{Ipv4Addr, TcpListener};

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
            if tokio::time::timeout(TCP.next, TcpStream::connect(address)).await.is_err() {
                return (address, all);
            }
        }
    }

    fn listening() -> (SocketAddr, TcpListener) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        (listener.local_addr().unwrap(), listener)
    }

    /// While this socket exists, no other socket gets the port.
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
        let alone = tokio::time::timeout(2 * TCP.next, reached(vec![one, other])).await;
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
}
