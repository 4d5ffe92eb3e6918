//! Releases at one server with scripts.

use std::time::Duration;

use redis::{Cmd, Value};

use crate::backend::redis::conn::path::Path;
use crate::backend::redis::keyspace::Keyspace;
use crate::backend::redis::protocol::script::{By, RELEASE, WAIT_QUEUE};
use crate::backend::redis::protocol::scripted_server::{RouteHint, ScriptedServer, replace};
use crate::backend::redis::protocol::value::{millis, unexpected};
use crate::backend::redis::protocol::wait_queue::{
    QueueToken, ValueStart, recheck_interval, reservation_time,
};
use crate::backend::{BackendError, FailureKind, ReleaseOutcome, ReleaseRequest};
use crate::base::clock::Instant;
use crate::base::jitter;
use crate::base::key::Key;

/// The command that carries a release request.
enum ReleaseCommand<'a> {
    /// `release.lua`: frees an uncontended lock.
    Delete { key: &'a Key, token: QueueToken },
    /// `wait_queue.lua`: serves the wait queue of each key.
    Queue {
        request: &'a ReleaseRequest,
        token: QueueToken,
        successor: Option<(QueueToken, Duration)>,
    },
}

impl ScriptedServer {
    pub(crate) async fn release(
        &self,
        hint: RouteHint,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let now = self.clock.now();
        let commands: Vec<_> =
            requests.iter().map(|request| self.release_command(request, now)).collect();
        let command = |at: usize, by| commands[at].command(&self.keyspace, by);
        let is_delete =
            |command: &ReleaseCommand<'_>| matches!(command, ReleaseCommand::Delete { .. });
        let path = if commands.iter().all(is_delete) { Path::Foreground } else { Path::Background };
        let mut answers = self.run_named(path, hint, false, requests.len(), command).await;
        // A lock that was not deleted is contended or not held: the script of the wait queue finds out.
        let not_deleted = |at: &usize| {
            matches!(
                (&commands[*at], &answers[*at]),
                (ReleaseCommand::Delete { .. }, Ok(Value::Int(0)))
            )
        };
        let again: Vec<_> = (0..answers.len()).filter(not_deleted).collect();
        let refused = |at: &usize| requests[*at].forced.is_some() && !self.keeps_wait_queues();
        let (refused, again): (Vec<_>, Vec<_>) = again.into_iter().partition(refused);
        for at in refused {
            answers[at] = Err(cannot_notify());
        }
        if !again.is_empty() {
            let command =
                |n: usize, by| self.queue_release(&requests[again[n]]).command(&self.keyspace, by);
            let more = self.run_named(Path::Background, hint, false, again.len(), command).await;
            replace(&mut answers, &again, more);
        }
        let outcomes = requests.iter().zip(answers);
        outcomes.map(|(request, answer)| self.released(request, &answer?)).collect()
    }

    fn release_command<'a>(&self, request: &'a ReleaseRequest, now: Instant) -> ReleaseCommand<'a> {
        match &*request.lease.keys {
            [key]
                if request.free_after.is_zero()
                    && request.successor.is_none()
                    && !self.contended.contains(key, now) =>
            {
                ReleaseCommand::Delete { key, token: self.token(&request.lease.owner) }
            }
            _ => self.queue_release(request),
        }
    }

    fn queue_release<'a>(&self, request: &'a ReleaseRequest) -> ReleaseCommand<'a> {
        let token = self.token(&request.lease.owner);
        let successor = request.successor.filter(|_| self.keeps_wait_queues());
        let successor = successor.map(|next| (self.token(&next.owner), next.ttl));
        ReleaseCommand::Queue { request, token, successor }
    }

    fn released(
        &self,
        request: &ReleaseRequest,
        answer: &Value,
    ) -> Result<ReleaseOutcome, BackendError> {
        match answer {
            Value::Int(0) => Ok(ReleaseOutcome::NotHeld),
            Value::Int(1) => Ok(ReleaseOutcome::Freed),
            Value::Int(2) => Ok(ReleaseOutcome::SuccessorGranted),
            Value::Int(3) => {
                let now = self.clock.now();
                request.lease.keys.iter().for_each(|key| self.contended.note(key.as_str(), now));
                let retry_after = jitter::below(recheck_interval(0));
                Ok(ReleaseOutcome::SuccessorQueued { retry_after })
            }
            other => Err(unexpected(other)),
        }
    }
}

/// The wait queue of a lock loses its waiters if they are taken from it and not notified.
#[cold]
fn cannot_notify() -> BackendError {
    let text = "the lock has another holder by now, or one with a wait queue that this login cannot notify";
    BackendError::new(FailureKind::Rejected, text)
        .remedy("allow the channels `lock_runtime:*` to the login, or use one of the services")
}

impl ReleaseCommand<'_> {
    fn command(&self, keyspace: &Keyspace, by: By) -> Cmd {
        match self {
            Self::Delete { key, token } => {
                let mut call = RELEASE.call(by, 1, 1);
                call.arg(key.as_str()).arg(ValueStart(*token));
                call
            }
            Self::Queue { request, token, successor } => {
                let ReleaseRequest { lease, free_after, barging_window, .. } = request;
                let mut call = WAIT_QUEUE.call(by, 2 * lease.keys.len(), 7);
                for key in lease.keys.iter() {
                    call.arg(key.as_str());
                }
                for key in lease.keys.iter() {
                    call.arg(keyspace.wait_queue(key));
                }
                call.arg("release").arg(token.as_bytes()).arg(millis(*free_after));
                call.arg(millis(reservation_time(lease.ttl)));
                match successor {
                    Some((token, ttl)) => call.arg(token.as_bytes()).arg(millis(*ttl)),
                    None => call.arg("").arg("0"),
                };
                call.arg(millis(*barging_window));
                call
            }
        }
    }
}
