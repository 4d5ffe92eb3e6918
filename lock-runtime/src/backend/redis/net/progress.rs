//! How far an attempt to connect has come, for the error when its time limit expires.

use std::time::Duration;

use tokio::time::timeout;

use crate::backend::{BackendError, FailureKind};
use crate::base::clock::{Clock, Instant};
use crate::base::mutex::Mutex;

/// The last step that a connection attempt has completed or begun.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ConnectStage {
    #[default]
    Started,
    /// The provider of credentials has been called.
    Credentials,
    /// The host name is resolved.
    Address,
    Socket,
    #[cfg_attr(not(feature = "rediss"), allow(dead_code))]
    Tls,
    /// The server has answered the log-in.
    LogIn,
}

/// The stage of one connection attempt.
#[derive(Debug, Default)]
pub(crate) struct ConnectProgress(Mutex<ConnectStage>);

impl ConnectProgress {
    pub(crate) fn note(&self, stage: ConnectStage) {
        *self.0.lock() = stage;
    }

    /// The error of an attempt that has exceeded `limit`.
    pub(crate) fn too_slow(&self, server: &str, limit: Duration) -> BackendError {
        let stage = *self.0.lock();
        let (so_far, remedy) = match stage {
            ConnectStage::Started => ("its name is not resolved", CHECK_REACH),
            ConnectStage::Credentials => {
                ("the provider of credentials has not answered", CHECK_PROVIDER)
            }
            ConnectStage::Address => ("there is no TCP connection", CHECK_REACH),
            ConnectStage::Socket => {
                ("there is a TCP connection, and no answer over it", CHECK_REACH)
            }
            ConnectStage::Tls => {
                ("there is a TLS connection, and no answer to the log-in", CHECK_SLOW)
            }
            ConnectStage::LogIn => ("the log-in is answered, and what follows is not", CHECK_SLOW),
        };
        slow(server, limit, so_far, remedy)
    }
}

const CHECK_REACH: &str = "check that the server is up and reachable, and that the port speaks Redis, with TLS for `rediss://` and without for `redis://`; a slow link needs a longer `connect_timeout` of the builder, or `?connect_timeout=10s` in the URL";

const CHECK_PROVIDER: &str = "have `.credentials(..)` of the builder answer faster, for example with a token that it keeps and renews, or choose a longer `connect_timeout`";

const CHECK_SLOW: &str = "check the server and the network to it; a slow link needs a longer `connect_timeout` of the builder, or `?connect_timeout=10s` in the URL";

fn slow(server: &str, limit: Duration, so_far: &str, remedy: &'static str) -> BackendError {
    let message = format!("Redis at {server} did not answer within {limit:?}: {so_far}");
    BackendError::new(FailureKind::NotApplied, message).remedy(remedy)
}

/// The time limit for opening a store: connecting, and the first requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenDeadline {
    clock: Clock,
    until: Instant,
    limit: Duration,
}

impl OpenDeadline {
    pub(crate) fn start(clock: Clock, limit: Duration) -> Self {
        Self { clock, until: clock.now() + limit, limit }
    }

    /// Runs `request` over the new connection to `server` in the time that is left. The timeout error names `what`.
    pub(crate) async fn run<T>(
        self,
        server: &str,
        what: &str,
        request: impl Future<Output = Result<T, BackendError>>,
    ) -> Result<T, BackendError> {
        let left = self.until.since(self.clock.now());
        timeout(left, request).await.unwrap_or_else(|_| {
            let so_far = format!("it is connected, and {what} is not answered");
            Err(slow(server, self.limit, &so_far, CHECK_SLOW))
        })
    }
}
