//! Which of several addresses of a server is connected to.

use std::future::Future;
#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
use std::io;
#[cfg(feature = "_sql")]
use std::net::IpAddr;
use std::net::SocketAddr;
use std::time::Duration;

#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
use tokio::net::TcpStream;
use tokio::net::lookup_host;
use tokio::time::sleep;

use crate::backend::first_ended::first_ended;

/// When the next attempt begins, beside the unanswered ones.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// The wait for one address before the next one is tried.
    next: Duration,
    /// The wait for all addresses before each is tried once more.
    again: Option<Duration>,
}

#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
impl Pace {
    /// The next one after the Connection Attempt Delay of RFC 8305. All once more, since the first packets may have gone to a
    /// host that another one has replaced since.
    const TCP: Self =
        Self { next: Duration::from_millis(250), again: Some(Duration::from_secs(1)) };
}

/// Connects to the host. Its name is resolved for each connection: it may have another address.
#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
pub(crate) async fn connect_by_name(host: &str, port: u16) -> io::Result<TcpStream> {
    connect_to_first(lookup_host((host, port)).await?.collect()).await
}

/// Connects to the first of `addresses` that answers (Happy Eyeballs, RFC 8305). Dropping the future ends all attempts.
#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
pub(crate) async fn connect_to_first(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let connected = race(&interleaved(addresses), Pace::TCP, TcpStream::connect).await;
    connected.map_err(|error| error.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into()))
}

/// Logs in at the first address of a host that lets it. The next one is tried after `stagger`, which is several round trips
/// long. `log_in` gets `None` if the name has no address, and reports that.
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
        Err(Some(error)) => Err(error),
        Err(None) => log_in(None).await,
    }
}

/// Returns the first success. The next address is tried after [`Pace::next`], or at once if an attempt fails. If all fail,
/// the result is the first error: the system lists the preferred address first. It is `None` without an address.
async fn race<T, E, F>(
    addresses: &[SocketAddr],
    pace: Pace,
    attempt: impl Fn(SocketAddr) -> F,
) -> Result<T, Option<E>>
where
    F: Future<Output = Result<T, E>>,
{
    let mut waiting = addresses.iter();
    let mut attempts = Vec::new();
    let mut failure = None;
    loop {
        if let Some(address) = waiting.next() {
            attempts.push(Box::pin(attempt(*address)));
        }
        if attempts.is_empty() {
            return Err(failure);
        }
        let is_last = waiting.len() == 0;
        let pause = if is_last { pace.again } else { Some(pace.next) };
        tokio::select! {
            ended = first_ended(&mut attempts) => match ended {
                Ok(success) => return Ok(success),
                Err(error) => {
                    failure.get_or_insert(error);
                }
            },
            () = sleep(pause.unwrap_or_default()), if pause.is_some() => {
                if is_last {
                    waiting = addresses.iter();
                }
            }
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
    use std::future::pending;
    use std::net::{Ipv4Addr, Ipv6Addr};
    use std::sync::Mutex;

    use tokio::time::Instant;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, port))
    }

    /// The result of a race, and when each port was tried. Port 1 never answers, port 2 refuses at once, others are reached
    /// after four seconds.
    async fn raced(ports: &[u16], pace: Pace) -> (Result<u16, Option<u16>>, Vec<(u16, Duration)>) {
        #[allow(clippy::disallowed_methods)]
        let (began, tried) = (Instant::now(), Mutex::new(Vec::new()));
        let addresses: Vec<_> = ports.iter().copied().map(address).collect();
        let attempt = |address: SocketAddr| {
            tried.lock().unwrap().push((address.port(), began.elapsed()));
            async move {
                match address.port() {
                    1 => pending().await,
                    2 => Err(2),
                    port => {
                        sleep(4 * SECOND).await;
                        Ok(port)
                    }
                }
            }
        };
        let limit = 60 * SECOND;
        let result = tokio::time::timeout(limit, race(&addresses, pace, attempt)).await;
        (result.unwrap_or(Err(Some(1))), tried.into_inner().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_address_is_tried_beside_one_without_an_answer() {
        let pace = Pace { next: SECOND, again: None };
        let (result, tried) = raced(&[1, 1, 3], pace).await;
        assert_eq!(result, Ok(3));
        assert_eq!(tried, [(1, Duration::ZERO), (1, SECOND), (3, 2 * SECOND)]);
        // It is waited for, although the next one is tried as well.
        let (result, tried) = raced(&[3, 4], pace).await;
        assert_eq!((result, tried), (Ok(3), vec![(3, Duration::ZERO), (4, SECOND)]));
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_address_is_tried_at_once_behind_a_refusal() {
        let pace = Pace { next: SECOND, again: None };
        let (result, tried) = raced(&[2, 3], pace).await;
        assert_eq!((result, tried), (Ok(3), vec![(2, Duration::ZERO), (3, Duration::ZERO)]));
        assert_eq!(raced(&[2, 2], pace).await.0, Err(Some(2)));
        assert_eq!(raced(&[], pace).await.0, Err(None));
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_without_an_answer_are_tried_again_if_the_pace_says_so() {
        let (_, tried) = raced(&[1], Pace { next: SECOND, again: None }).await;
        assert_eq!(tried.len(), 1);
        let (_, tried) = raced(&[1, 1], Pace { next: SECOND, again: Some(20 * SECOND) }).await;
        let times: Vec<_> = tried.iter().map(|(_, at)| at.as_secs()).collect();
        assert_eq!(times, [0, 1, 21, 22, 42, 43]);
    }

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
            if tokio::time::timeout(Pace::TCP.next, TcpStream::connect(address)).await.is_err() {
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
        let alone = tokio::time::timeout(2 * Pace::TCP.next, reached(vec![one, other])).await;
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
