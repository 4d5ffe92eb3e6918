//! The end of a program: signals, servers and pools, in this order.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use once_cell::sync::Lazy;
use tokio::sync::watch;

use crate::api::named_pools::shutdown;
use crate::base::clock::{Clock, TwoClocks};
use crate::base::error::{ErrorKind, LockError};
use crate::exec::driver::Driver;
use crate::lock::shutdown::ShutdownReport;

/// Waits for SIGTERM or SIGINT (Ctrl-C elsewhere), then shuts down all installed pools.
///
/// Calls in progress may end within the grace period, and every later call gets [`ErrorKind::PoolClosed`]. A server, or a loop
/// that has to finish what it has taken, runs in [`serve`]: it stops first, and the pools afterwards. From the first poll on,
/// the signals no longer end the process on their own. A second signal ends the grace period.
///
/// If the future is dropped before a signal, the pools stay open, and the signals stay without effect. A shutdown that has begun
/// completes in the background.
///
/// # Errors
/// [`ErrorKind::Config`] if the signal handlers cannot be installed.
pub async fn shutdown_on_signal(grace: Duration) -> Result<ShutdownReport, LockError> {
    let mut received = signals()?;
    let _ = received.wait_for(|count| *count >= 1).await;
    let second = pin!(async { drop(received.wait_for(|count| *count >= 2).await) });
    Ok(shutdown_by(grace, second).await)
}

/// Shuts all installed pools down. Their grace period ends no later than `no_grace`.
async fn shutdown_by(
    grace: Duration,
    no_grace: Pin<&mut impl Future<Output = ()>>,
) -> ShutdownReport {
    let mut shutting_down = pin!(shutdown(grace));
    tokio::select! {
        biased;
        report = &mut shutting_down => return report,
        () = no_grace => {}
    }
    let _zeros = shutdown(Duration::ZERO).await;
    shutting_down.await
}

/// Resolves when the server must stop. The server then accepts no further connections, and finishes the requests that it has.
///
/// A clone resolves at the same moment, for a program with several servers.
#[must_use = "futures do nothing unless awaited"]
pub struct Stopped {
    stopped: watch::Receiver<bool>,
    waiting: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Stopped {
    fn new(stopped: watch::Receiver<bool>) -> Self {
        let mut receiver = stopped.clone();
        let waiting = Box::pin(async move {
            // Without a sender the server is dropped anyway.
            let _ = receiver.wait_for(|stopped| *stopped).await;
        });
        Self { stopped, waiting }
    }
}

impl Clone for Stopped {
    fn clone(&self) -> Self {
        Self::new(self.stopped.clone())
    }
}

impl fmt::Debug for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stopped").field(&*self.stopped.borrow()).finish()
    }
}

impl Future for Stopped {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.waiting.as_mut().poll(cx)
    }
}

/// How a server and the pools ended.
#[non_exhaustive]
#[derive(Debug)]
pub struct Served<T> {
    /// What the server returned. `None` if it had requests left after the grace period, and was dropped.
    pub output: Option<T>,
    /// The end of the locks.
    pub locks: ShutdownReport,
}

/// Runs a server until SIGTERM or SIGINT (Ctrl-C elsewhere), stops the server first, and shuts down all installed pools
/// afterwards. A server is any future that ends after the stop signal, such as the loop of a consumer.
///
/// `server` builds the server's future from the stop signal. Open requests can still use locks for `grace`. After that the
/// pools are shut down: remaining bodies are cancelled, and all locks are released. The server has another second for their
/// responses. A second signal ends the grace period. If the server ends on its own, the pools are shut down too. The first
/// signal after that ends their grace period.
///
/// ```no_run
/// use std::time::Duration;
///
/// # async fn program(routes: axum::Router) -> Result<(), Box<dyn std::error::Error>> {
/// lock_runtime::init("redis://127.0.0.1:6379").await?;
/// let listener = tokio::net::TcpListener::bind("0.0.0.0:8080").await?;
/// let served = lock_runtime::serve(Duration::from_secs(10), |stopped| {
///     axum::serve(listener, routes).with_graceful_shutdown(stopped)
/// })
/// .await?;
/// println!("{:?}", served.locks);
/// served.output.transpose()?; // an error of the server
/// # Ok(())
/// # }
/// ```
///
/// From the first poll on, the signals no longer end the process on their own, also after `serve` has returned: a program
/// that goes on has to end by itself.
///
/// Dropping the future drops the server. The pools stay open.
///
/// # Errors
/// [`ErrorKind::Config`] if the signal handlers cannot be installed. The server has not been polled then.
pub async fn serve<S: IntoFuture>(
    grace: Duration,
    server: impl FnOnce(Stopped) -> S,
) -> Result<Served<S::Output>, LockError> {
    let mut received = signals()?;
    let mut second = received.clone();
    let first = async move { drop(received.wait_for(|count| *count >= 1).await) };
    let second = async move { drop(second.wait_for(|count| *count >= 2).await) };
    serve_by(first, second, grace, server).await
}

/// Like [`serve`], until `signal` resolves. Dropping the future drops the server, and the pools stay open. Under a paused clock
/// of tokio, the grace period is of that clock.
///
/// # Errors
/// [`ErrorKind::Config`] if the driver thread cannot be started.
pub async fn serve_until<S: IntoFuture>(
    signal: impl Future<Output = ()>,
    grace: Duration,
    server: impl FnOnce(Stopped) -> S,
) -> Result<Served<S::Output>, LockError> {
    serve_by(signal, std::future::pending(), grace, server).await
}

/// How many servers of this process have been told to stop, and have not ended.
static STOPPING: Lazy<watch::Sender<usize>> = Lazy::new(|| watch::Sender::new(0));

/// Resolves while a server stops. For responses without an end of their own, which would keep the server from ending.
#[cfg(any(feature = "actix", feature = "axum"))]
pub(crate) fn stopping() -> impl Future<Output = ()> + Send {
    let mut stopping = STOPPING.subscribe();
    async move {
        // The sender lives as long as the process.
        let _ = stopping.wait_for(|count| *count > 0).await;
    }
}

/// A server that has been told to stop, until it is dropped.
struct StoppingServer;

impl StoppingServer {
    fn begin() -> Self {
        STOPPING.send_modify(|count| *count += 1);
        Self
    }
}

impl Drop for StoppingServer {
    fn drop(&mut self) {
        STOPPING.send_modify(|count| *count -= 1);
    }
}

/// The server stops at `signal`, and its grace ends no later than `no_grace`.
async fn serve_by<S: IntoFuture>(
    signal: impl Future<Output = ()>,
    no_grace: impl Future<Output = ()>,
    grace: Duration,
    server: impl FnOnce(Stopped) -> S,
) -> Result<Served<S::Output>, LockError> {
    /// What a server may take for the responses of cancelled bodies.
    const LAST_RESPONSES: Duration = Duration::from_secs(1);
    // The runtime of this call may have no timers. A paused clock has them, and no other clock fits it.
    let (driver, clock) = if TwoClocks::is_paused() {
        (Driver::current()?, Clock::runtime())
    } else {
        (Driver::background()?, Clock::Boot)
    };
    let pause =
        |pause: Duration| driver.run(async move { clock.sleep_until(clock.now() + pause).await });
    let (stop, stopped) = watch::channel(false);
    let (mut signal, mut no_grace) = (pin!(signal), pin!(no_grace));
    let mut server = pin!(server(Stopped::new(stopped)).into_future());
    tokio::select! {
        biased;
        output = &mut server => {
            // No signal has begun this shutdown: the first one ends its grace period.
            let no_grace = pin!(async {
                tokio::select! {
                    () = signal => {}
                    () = no_grace => {}
                }
            });
            return Ok(Served { output: Some(output), locks: shutdown_by(grace, no_grace).await });
        }
        () = &mut signal => {}
    }
    let end = clock.now() + grace;
    stop.send_replace(true);
    let _stopping = StoppingServer::begin();
    tokio::select! {
        biased;
        output = &mut server => {
            // The rest of the grace period is for work that is not the server's.
            let rest = end.since(clock.now());
            return Ok(Served { output: Some(output), locks: shutdown_by(rest, no_grace).await });
        }
        _ = pause(grace) => {}
        () = &mut no_grace => {}
    }
    // Bodies end when they are polled, which may be the work of the server's future.
    let mut locks = pin!(shutdown(Duration::ZERO));
    let mut output = None;
    let locks = loop {
        tokio::select! {
            biased;
            locks = &mut locks => break locks,
            ended = &mut server, if output.is_none() => output = Some(ended),
        }
    };
    if output.is_none() {
        output = tokio::select! {
            biased;
            ended = &mut server => Some(ended),
            _ = pause(LAST_RESPONSES) => None,
        };
    }
    Ok(Served { output, locks })
}

/// How many signals were received since this call.
fn signals() -> Result<watch::Receiver<u32>, LockError> {
    let driver = Driver::background()?;
    let (count, received) = watch::channel(0);
    let listening = {
        let _context = driver.enter();
        listen(count)
    };
    driver.spawn(listening.map_err(|error| unheard(&error))?);
    Ok(received)
}

#[cold]
fn unheard(error: &std::io::Error) -> LockError {
    LockError::new(ErrorKind::Config, format!("signals cannot be listened to: {error}"))
}

/// Registers for the signals. The future counts them, until no receiver is left.
#[cfg(unix)]
fn listen(count: watch::Sender<u32>) -> std::io::Result<impl Future<Output = ()> + Send> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                () = count.closed() => return,
            }
            count.send_modify(|count| *count += 1);
        }
    })
}

#[cfg(not(unix))]
fn listen(count: watch::Sender<u32>) -> std::io::Result<impl Future<Output = ()> + Send> {
    Ok(async move {
        loop {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                () = count.closed() => return,
            }
            count.send_modify(|count| *count += 1);
        }
    })
}
