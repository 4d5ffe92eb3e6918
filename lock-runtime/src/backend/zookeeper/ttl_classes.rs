//! The sessions of a pool: one for each class of ttls, opened when a lock needs it.
//!
//! A node lives as long as its session, so the timeout of a session bounds how long the lock of a dead process stays.
//! The timeout exceeds the ttl by a margin. The leader counts it from the last sign of life that it knows. That sign is older
//! than the grant or the renewal that it confirms, by at most:
//!
//! 1. The longest time that the leader may go without an answer, after which the connection is replaced: [`longest_silence`].
//! 2. The time between two requests to the leader: [`LONGEST_SIGN_INTERVAL`].
//! 3. Half a tick: a server reports signs of life to the leader at this interval. The margin allows for [`LONGEST_TICK`].
//! 4. [`SLACK`] for the way between the servers, and for a process that is not scheduled.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::timeout;

use crate::backend::BackendError;
use crate::backend::coordination::lifetime_classes::class_of;
use crate::backend::zookeeper::open_exchange::{LONGEST_SIGN_INTERVAL, longest_silence};
use crate::backend::zookeeper::server_error::{session_too_short, still_opening};
use crate::backend::zookeeper::session::{LiveSession, SessionClient, SessionSink};
use crate::backend::zookeeper::session_task::SessionTask;
use crate::backend::zookeeper::transport::EnsembleDialer;
use crate::base::clock::Clock;
use crate::base::mutex::Mutex;

/// The longest `tickTime` of servers with which sessions outlast the validity that their holders assume.
pub(crate) const LONGEST_TICK: Duration = Duration::from_secs(2);

/// A part of the margin: also how late a write to the network may be.
const SLACK: Duration = Duration::from_millis(500);

/// The requested timeouts, in seconds. The servers may agree to other timeouts.
const CLASSES: [u64; 24] = [
    3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 40, 60, 90, 120, 180, 240, 360, 600, 900, 1_800, 3_600,
    7_200, 21_600, 86_400,
];

/// The class of the first session. With the servers' default settings it is the longest one, and the pool's default ttl
/// belongs to it.
const FIRST: Duration = Duration::from_secs(40);

pub(crate) struct TtlClasses {
    dialer: Arc<EnsembleDialer>,
    clock: Clock,
    sink: Arc<dyn SessionSink>,
    /// By how much the timeout of a session exceeds the ttls of its locks.
    margin: Duration,
    /// By the timeout that was asked for.
    sessions: Mutex<Vec<(Duration, Arc<SessionClient>)>>,
    /// These get no further locks, and end after those that they have.
    retired: Mutex<Vec<Arc<SessionClient>>>,
    numbers: AtomicU64,
}

impl TtlClasses {
    /// Without a session: the first request for one opens it.
    pub(crate) fn new(
        dialer: Arc<EnsembleDialer>,
        clock: Clock,
        sink: Arc<dyn SessionSink>,
    ) -> Self {
        let margin = margin(dialer.limits.request);
        let (sessions, retired, numbers) = Default::default();
        Self { dialer, clock, sink, margin, sessions, retired, numbers }
    }

    /// The timeout that a session needs so that its nodes stay for `kept_for`.
    pub(crate) fn timeout_for(&self, kept_for: Duration) -> Duration {
        kept_for.saturating_add(self.margin)
    }

    /// The shortest timeout that the servers agree to: two ticks, unless `minSessionTimeout` is set.
    pub(crate) async fn shortest(&self) -> Result<Duration, BackendError> {
        self.dialer.shortest_session(self.dialer.servers.random()).await
    }

    /// The session that is always open, from the connect on. For requests that make no nodes of locks.
    pub(crate) async fn first(&self) -> Result<LiveSession, BackendError> {
        self.client(FIRST).opened().await
    }

    /// A session whose nodes stay for `kept_for` after a confirmed sign of life.
    ///
    /// # Errors
    /// `Rejected` if the servers allow no session that is long enough. `NotApplied` if it does not open in time.
    pub(crate) async fn holding(&self, kept_for: Duration) -> Result<LiveSession, BackendError> {
        let needed = self.timeout_for(kept_for);
        let class = class_of(&CLASSES, needed);
        if let Some(client) = self.known(needed, class) {
            return client.opened().await;
        }
        match self.longest() {
            Some(longest) if longest < needed => {
                return Err(session_too_short(kept_for, self.margin, longest));
            }
            _ => {}
        }
        let live = self.opened_in_time(class).await?;
        if live.timeout() < needed {
            return Err(session_too_short(kept_for, self.margin, live.timeout()));
        }
        Ok(live)
    }

    /// The session of `class`. A server has longer to open it than a request waits for it: other requests of the same call use
    /// other sessions, and their answers would be lost at the end of the call.
    async fn opened_in_time(&self, class: Duration) -> Result<LiveSession, BackendError> {
        let (client, limit) = (self.client(class), opening_limit(self.dialer.limits.request));
        let opened = timeout(limit, client.opened()).await;
        opened.unwrap_or_else(|_| Err(still_opening(limit)))
    }

    /// The session with the shortest timeout that is long enough, unless a shorter class would serve too.
    fn known(&self, needed: Duration, class: Duration) -> Option<Arc<SessionClient>> {
        let sessions = self.sessions.lock();
        let timeouts = sessions.iter().filter_map(|(asked, client)| {
            let agreed = client.timeout().filter(|agreed| *agreed >= needed)?;
            // The servers' shortest timeout is longer than some classes.
            let is_shortest = agreed > *asked;
            (agreed <= class || is_shortest).then_some((agreed, client))
        });
        timeouts.min_by_key(|(agreed, _)| *agreed).map(|(_, client)| client.clone())
    }

    /// The longest timeout that the servers agree to, once they have shortened one.
    fn longest(&self) -> Option<Duration> {
        let sessions = self.sessions.lock();
        let agreed = sessions
            .iter()
            .filter_map(|(asked, client)| client.timeout().filter(|agreed| agreed < asked));
        agreed.max()
    }

    fn client(&self, class: Duration) -> Arc<SessionClient> {
        let mut sessions = self.sessions.lock();
        if let Some((_, client)) = sessions.iter().find(|(asked, _)| *asked == class) {
            return client.clone();
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        // A request waits for this session. A server that serves another one of the pool is up.
        let up = sessions.iter().find_map(|(_, client)| client.open()).map(|open| open.server);
        let server = up.unwrap_or_else(|| self.dialer.servers.random());
        let client = SessionTask::start(
            self.dialer.clone(),
            self.clock,
            self.sink.clone(),
            number,
            class,
            server,
        );
        sessions.push((class, client.clone()));
        client
    }

    /// From now on `session` gets no further locks: the next one opens another session.
    pub(crate) fn retire(&self, session: &LiveSession) {
        let mut sessions = self.sessions.lock();
        let is_it =
            |(_, client): &(Duration, Arc<SessionClient>)| client.number == session.number();
        if let Some(at) = sessions.iter().position(is_it) {
            let (_, client) = sessions.remove(at);
            let mut retired = self.retired.lock();
            retired.retain(|client| !client.has_ended());
            retired.push(client);
        }
    }

    /// All sessions that may be open.
    pub(crate) fn all(&self) -> Vec<Arc<SessionClient>> {
        let sessions = self.sessions.lock();
        let serving = sessions.iter().map(|(_, client)| client);
        serving.chain(self.retired.lock().iter()).cloned().collect()
    }
}

/// How long a request waits for a session that is being opened. Shorter than the limit for one of several requests, which does
/// not say that nothing was sent.
fn opening_limit(request_timeout: Duration) -> Duration {
    request_timeout * 3 / 4
}

fn margin(request_timeout: Duration) -> Duration {
    let silence = longest_silence(request_timeout) + LONGEST_SIGN_INTERVAL;
    silence + LONGEST_TICK / 2 + SLACK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_exceeds_the_ttl_by_the_margin() {
        let margin = margin(Duration::from_secs(1));
        assert_eq!(margin, Duration::from_secs(3));
        let class = |millis| class_of(&CLASSES, Duration::from_millis(millis) + margin).as_secs();
        assert_eq!([300, 1_000, 1_001, 30_000, 37_000].map(class), [4, 4, 5, 40, 40]);
        let day = Duration::from_secs(24 * 60 * 60);
        assert!((day..2 * day).contains(&class_of(&CLASSES, day + margin)));
        assert!(CLASSES.is_sorted());
    }
}
