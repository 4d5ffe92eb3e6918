//! Releases at one server with scripts.

use std::ops::Range;
use std::time::Duration;

use redis::{Cmd, Value};

use crate::backend::redis::conn::path::Path;
use crate::backend::redis::keyspace::Keyspace;
use crate::backend::redis::protocol::script::{By, RELEASE, WAIT_QUEUE};
use crate::backend::redis::protocol::scripted_server::{
    RouteHint, ScriptedServer, replace, shared_calls,
};
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
        let path = if commands.iter().all(ReleaseCommand::deletes) {
            Path::Foreground
        } else {
            Path::Background
        };
        let may_share = |a: usize, b: usize| commands[a].deletes() && commands[b].deletes();
        let calls = shared_calls(commands.len(), self.max_shared(hint), may_share);
        let command = |call, by| ReleaseCommand::command(&commands[call], &self.keyspace, by);
        let split = |call: Range<usize>, answer, answers: &mut Vec<_>| {
            split(call.len(), answer, answers);
        };
        let mut answers = self.run_shared(path, hint, false, &calls, command, split).await;
        // A lock that was not deleted is contended or not held: the script of the wait queue finds out.
        let not_deleted = |at: &usize| {
            matches!((&commands[*at], &answers[*at]), (ReleaseCommand::Delete { .. }, Ok(0)))
        };
        let again: Vec<_> = (0..answers.len()).filter(not_deleted).collect();
        let refused = |at: &usize| requests[*at].forced.is_some() && !self.keeps_wait_queues();
        let (refused, again): (Vec<_>, Vec<_>) = again.into_iter().partition(refused);
        for at in refused {
            answers[at] = Err(cannot_notify());
        }
        if !again.is_empty() {
            let queued: Vec<_> =
                again.iter().map(|at| self.queue_release(&requests[*at])).collect();
            let calls = shared_calls(queued.len(), 1, |_, _| false);
            let command = |call, by| ReleaseCommand::command(&queued[call], &self.keyspace, by);
            let more = self.run_shared(Path::Background, hint, false, &calls, command, split);
            replace(&mut answers, &again, more.await);
        }
        let outcomes = requests.iter().zip(answers);
        outcomes.map(|(request, answer)| self.released(request, answer?)).collect()
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
        answer: i64,
    ) -> Result<ReleaseOutcome, BackendError> {
        match answer {
            0 => Ok(ReleaseOutcome::NotHeld),
            1 => Ok(ReleaseOutcome::Freed),
            2 => Ok(ReleaseOutcome::SuccessorGranted),
            3 => {
                let now = self.clock.now();
                request.lease.keys.iter().for_each(|key| self.contended.note(key.as_str(), now));
                let retry_after = jitter::below(recheck_interval(0));
                Ok(ReleaseOutcome::SuccessorQueued { retry_after })
            }
            other => Err(unexpected(&Value::Int(other))),
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

/// Adds the outcomes of a command for `count` locks: a number, or the digits of `release.lua`.
fn split(count: usize, answer: Value, outcomes: &mut Vec<Result<i64, BackendError>>) {
    match answer {
        Value::Int(outcome) if count == 1 => outcomes.push(Ok(outcome)),
        Value::BulkString(digits) if digits.len() == count => {
            let outcome = |digit| Ok(i64::from(digit) - i64::from(b'0'));
            outcomes.extend(digits.into_iter().map(outcome));
        }
        other => outcomes.extend((0..count).map(|_| Err(unexpected(&other)))),
    }
}

impl ReleaseCommand<'_> {
    fn deletes(&self) -> bool {
        matches!(self, Self::Delete { .. })
    }

    /// The command for `releases`: one, or several that each delete a lock.
    fn command(releases: &[Self], keyspace: &Keyspace, by: By) -> Cmd {
        if let [Self::Queue { request, token, successor }] = releases {
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
            return call;
        }
        let mut call = RELEASE.call(by, releases.len(), releases.len());
        for release in releases {
            if let Self::Delete { key, .. } = release {
                call.arg(key.as_str());
            }
        }
        for release in releases {
            if let Self::Delete { token, .. } = release {
                call.arg(ValueStart(*token));
            }
        }
        call
    }
}
