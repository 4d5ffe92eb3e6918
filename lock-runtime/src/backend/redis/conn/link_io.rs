//! How requests use an open connection, and what its silence shows.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisError, Value};

use crate::backend::redis::conn::prelude::Prelude;
use crate::backend::redis::net::command::{WriteCommand, WriteNthCommand, library_command};
use crate::backend::redis::net::direct::DirectConnection;
use crate::backend::redis::net::io_task::SharedIo;
use crate::base::clock::{Clock, Instant};
use crate::base::mutex::Mutex;

/// The maximum of unanswered requests that were given up on one connection.
const MAX_UNANSWERED: usize = 10_000;

/// An open connection, as requests use it.
pub(super) struct LinkIo {
    requests: LinkRequests,
    pub(super) io: Arc<SharedIo>,
    request_timeout: Duration,
    unanswered: Mutex<UnansweredTracker>,
}

/// What an open connection sends its requests with.
pub(super) enum LinkRequests {
    /// The driver's connection, with pushes.
    Multiplexed(MultiplexedConnection),
    /// A connection on the runtime of callers.
    Direct(DirectConnection),
}

/// Requests that were given up since the connection last answered one.
#[derive(Default)]
struct UnansweredTracker {
    /// When the first of them was sent.
    since: Option<Instant>,
    count: usize,
    /// When the last answer to any request arrived. A connection with late answers is slow, not silent.
    answered_at: Option<Instant>,
    /// Whether a task waits for the moment at which the connection is silent.
    is_watched: bool,
    /// Whether it was found silent, which ends it.
    was_silent: bool,
}

impl LinkIo {
    pub(super) fn new(
        requests: LinkRequests,
        io: Arc<SharedIo>,
        request_timeout: Duration,
    ) -> Arc<Self> {
        Arc::new(Self { requests, io, request_timeout, unanswered: Mutex::default() })
    }

    /// Sends one command, which may be written on this thread. An error of the server is a value.
    pub(super) async fn send(&self, command: &Cmd) -> Result<Value, RedisError> {
        match &self.requests {
            LinkRequests::Multiplexed(requests) => {
                let mut requests = requests.clone();
                self.io.run_inline(requests.req_packed_command(command)).await
            }
            // The runtime of a caller may not run its I/O task for a long time, so a request does not wait for the task.
            LinkRequests::Direct(requests) => self.io.write_inline(requests.send(command)).await,
        }
    }

    /// Sends several commands in one write. One reply per command, in order.
    pub(super) async fn send_all(&self, commands: &Pipeline) -> Result<Vec<Value>, RedisError> {
        match &self.requests {
            LinkRequests::Multiplexed(requests) => {
                let (mut requests, count) = (requests.clone(), commands.len());
                self.io.run_inline(requests.req_packed_commands(commands, 0, count)).await
            }
            LinkRequests::Direct(requests) => {
                self.io.write_inline(requests.send_all(commands)).await
            }
        }
    }

    /// As [`send`](Self::send), with the command that `command` writes.
    pub(super) async fn send_written(
        &self,
        command: &WriteCommand<'_>,
    ) -> Result<Value, RedisError> {
        match &self.requests {
            LinkRequests::Multiplexed(_) => self.send(&library_command(command)).await,
            LinkRequests::Direct(requests) => {
                let mut packed = requests.empty_commands(1);
                packed.add(command);
                self.io.write_inline(requests.send_packed(packed)).await
            }
        }
    }

    /// As [`send_all`](Self::send_all), with `count` commands that `command` writes, each after `prelude`.
    pub(super) async fn send_all_written(
        &self,
        prelude: Prelude,
        count: usize,
        command: &WriteNthCommand<'_>,
    ) -> Result<Vec<Value>, RedisError> {
        let commands = count * prelude.commands_for_one();
        match &self.requests {
            LinkRequests::Multiplexed(_) => {
                let mut all = Pipeline::with_capacity(commands);
                prelude.before_each(count, command, |write| {
                    all.add_command(library_command(write));
                });
                self.send_all(&all).await
            }
            LinkRequests::Direct(requests) => {
                let mut packed = requests.empty_commands(commands);
                prelude.before_each(count, command, |write| packed.add(write));
                self.io.write_inline(requests.send_all_packed(packed)).await
            }
        }
    }

    /// Answers arrive in the order of the requests: an answer to a request sent at `sent` shows that all earlier ones
    /// were served.
    pub(super) fn note_answer(&self, sent: Instant, now: Instant) {
        let mut unanswered = self.unanswered.lock();
        if unanswered.since.is_some_and(|since| since <= sent) {
            (unanswered.since, unanswered.count) = (None, 0);
        }
        unanswered.answered_at = Some(now);
    }

    /// A request sent at `sent` was given up.
    pub(super) fn note_unanswered(&self, sent: Instant) {
        let mut unanswered = self.unanswered.lock();
        // A request with a shorter time limit may have been given up before a request that was sent earlier.
        unanswered.since = Some(unanswered.since.map_or(sent, |since| since.min(sent)));
        unanswered.count += 1;
    }

    /// Whether requests stay unanswered. The caller then ends the connection.
    pub(super) fn check_silence(&self, now: Instant) -> bool {
        let mut unanswered = self.unanswered.lock();
        let is_silent = unanswered.count > MAX_UNANSWERED
            || unanswered.silent_at(self.request_timeout).is_some_and(|at| at <= now);
        unanswered.was_silent |= is_silent;
        is_silent
    }

    /// Whether the connection was ended because it was silent.
    pub(super) fn was_silent(&self) -> bool {
        self.unanswered.lock().was_silent
    }

    /// Whether the caller has to start a task that waits until the connection is silent.
    pub(super) fn begin_watch(&self) -> bool {
        !mem::replace(&mut self.unanswered.lock().is_watched, true)
    }

    /// Resolves once the connection is silent, or has no unanswered request. Later requests on a silent connection would only
    /// reach their time limits.
    pub(super) async fn until_silent(&self, clock: Clock) {
        while let Some(silent_at) = self.watch(clock.now()) {
            clock.sleep_until(silent_at).await;
        }
    }

    /// When the connection is silent if no answer arrives until then. The watch ends if it is silent at `now`, or if there is
    /// nothing to wait for.
    fn watch(&self, now: Instant) -> Option<Instant> {
        let mut unanswered = self.unanswered.lock();
        let silent_at = unanswered.silent_at(self.request_timeout).filter(|at| *at > now);
        unanswered.is_watched = silent_at.is_some();
        silent_at
    }

    pub(super) fn has_ended(&self) -> bool {
        self.io.has_ended()
    }
}

impl UnansweredTracker {
    fn silent_at(&self, request_timeout: Duration) -> Option<Instant> {
        let since = self.since?;
        Some(self.answered_at.map_or(since, |answered| answered.max(since)) + request_timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::redis::net::direct;
    use crate::backend::redis::net::io_task::IoTask;

    /// The time limits of requests differ.
    #[tokio::test]
    async fn silence_begins_with_the_first_request_that_was_sent() {
        let (stream, _server) = tokio::io::duplex(10);
        let (requests, io) = direct::connection(stream);
        let timeout = Duration::from_secs(3);
        let task = IoTask::spawn(io);
        let link = LinkIo::new(LinkRequests::Direct(requests), task.io(), timeout);
        let at = |secs| Instant::ORIGIN + Duration::from_secs(secs);
        link.note_unanswered(at(11));
        link.note_unanswered(at(10));
        assert!(!link.check_silence(at(12)));
        assert!(link.check_silence(at(13)));
        // An answer to an earlier request is a sign of life.
        link.note_answer(at(9), at(11));
        assert!(link.begin_watch() && !link.begin_watch());
        assert_eq!(link.watch(at(13)), Some(at(14)));
        assert!(!link.check_silence(at(13)) && link.check_silence(at(14)));
        link.note_answer(at(12), at(12));
        assert_eq!(link.watch(at(13)), None);
        assert!(link.begin_watch());
        assert!(!link.check_silence(at(20)), "an answer to a later request covers both");
    }
}
