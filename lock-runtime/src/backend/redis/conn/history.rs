//! What the attempts to connect to one target have shown.

use std::time::Duration;

use crate::backend::redis::net::handshake::{Dialect, HangUp};
use crate::backend::redis::net::transport::Dialer;
use crate::backend::{BackendError, Limits};

/// What earlier connections have shown.
#[derive(Default)]
pub(super) struct ConnectHistory {
    pub(super) dialer: Option<Dialer>,
    /// The address of the last server.
    server: Option<String>,
    /// The error by which the last server has shown that it is a replica, until a master is found.
    pub(super) replica: Option<BackendError>,
    /// The dialect of the last connection.
    pub(super) dialect: Option<Dialect>,
    /// How long the last successful attempt took.
    pub(super) took: Option<Duration>,
    /// Attempts since the last successful one.
    pub(super) failures: u32,
}

impl ConnectHistory {
    /// A connection to `server` is open. Returns the former server, if it was another one.
    pub(super) fn on_success(&mut self, dialect: Dialect, server: String) -> Option<String> {
        self.failures = 0;
        self.replica = None;
        self.dialect = Some(dialect);
        let former = self.server.replace(server);
        former.filter(|former| self.server.as_ref() != Some(former))
    }

    pub(super) fn on_failure(&mut self) {
        self.failures = self.failures.wrapping_add(1);
    }

    /// A hang-up of a server that has completed a handshake is a failure. Every eighth attempt is an exception: a
    /// proxy may be at the address by then. A server that was a proxy counts as one until it completes a handshake.
    pub(super) fn hang_up(&self) -> HangUp {
        const EVERY: u32 = 8;
        match self.dialect {
            Some(Dialect::Full | Dialect::Plain) if self.failures % EVERY != EVERY - 1 => {
                HangUp::Fail
            }
            Some(Dialect::Minimal) => HangUp::UseMinimal,
            _ => HangUp::TryMinimal,
        }
    }

    /// The time limit of the next attempt: four times the duration of the last successful one, as an attempt that
    /// hangs is better repeated. It doubles with each failure, as the link may have become slower.
    pub(super) fn limit(&self, limits: Limits) -> Duration {
        let Some(took) = self.took else { return limits.connect };
        let usual = took.saturating_mul(4).max(limits.request);
        usual.saturating_mul(1 << self.failures.min(16)).min(limits.connect)
    }
}
