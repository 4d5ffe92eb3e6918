//! Releases at one server with scripts.

use std::ops::Range;
use std::time::Duration;

use redis::Value;

use crate::backend::redis::conn::path::Path;
use crate::backend::redis::keyspace::Keyspace;
use crate::backend::redis::net::command::CommandWriter;
use crate::backend::redis::protocol::script::{By, RELEASE, WAIT_QUEUE};
use crate::backend::redis::protocol::scripted_server::{
    RouteHint, ScriptedServer, SharedReplies, replace, shared_calls,
};
use crate::backend::redis::protocol::value::{millis, unexpected};
use crate::backend::redis::protocol::wait_queue::{QueueToken, ValueStart, recheck_interval};
use crate::backend::{BackendError, FailureKind, ReleaseOutcome, ReleaseRequest};
use crate::base::jitter;
use crate::base::key::Key;

/// The command that carries a release request.
enum ReleaseCommand<'a> {
    Delete(Deletion<'a>),
    Queue(QueueRelease<'a>),
}

/// By `release.lua`: frees an uncontended lock.
struct Deletion<'a> {
    key: &'a Key,
    token: QueueToken,
}

/// By `wait_queue.lua`: serves the wait queue of each key.
struct QueueRelease<'a> {
    request: &'a ReleaseRequest,
    token: QueueToken,
    successor: Option<(QueueToken, Duration)>,
}

impl ScriptedServer {
    pub(crate) async fn release(
        &self,
        hint: RouteHint,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        match requests {
            [request] => vec![self.release_one(hint, request).await],
            _ => Box::pin(self.release_all(hint, requests)).await,
        }
    }

    async fn release_one(
        &self,
        hint: RouteHint,
        request: &ReleaseRequest,
    ) -> Result<ReleaseOutcome, BackendError> {
        let answer = match self.release_command(request) {
            ReleaseCommand::Delete(deletion) => {
                let command = |by, out: &mut CommandWriter<'_>| {
                    delete([&deletion].into_iter(), by, out);
                };
                let answer = self.run_one(Path::Foreground, hint, false, &command).await?;
                match outcome(answer)? {
                    0 if self.cannot_notify(request) => return Err(cannot_notify()),
                    0 => {
                        let release = self.queue_release(request);
                        Box::pin(self.run_queue_release(hint, &release)).await?
                    }
                    deleted => deleted,
                }
            }
            ReleaseCommand::Queue(release) => {
                Box::pin(self.run_queue_release(hint, &release)).await?
            }
        };
        self.released(request, answer)
    }

    async fn run_queue_release(
        &self,
        hint: RouteHint,
        release: &QueueRelease<'_>,
    ) -> Result<i64, BackendError> {
        let command = |by, out: &mut CommandWriter<'_>| release.command(&self.keyspace, by, out);
        outcome(self.run_one(Path::Background, hint, false, &command).await?)
    }

    async fn release_all(
        &self,
        hint: RouteHint,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let commands: Vec<_> =
            requests.iter().map(|request| self.release_command(request)).collect();
        let deletes = |at: usize| commands[at].deletion().is_some();
        let path =
            if (0..commands.len()).all(deletes) { Path::Foreground } else { Path::Background };
        let most = self.max_shared(hint);
        let calls = shared_calls(commands.len(), |_| most, |a, b| deletes(a) && deletes(b));
        let command =
            |call: Range<usize>, by, out: &mut CommandWriter<'_>| match &commands[call.start] {
                ReleaseCommand::Queue(release) => release.command(&self.keyspace, by, out),
                ReleaseCommand::Delete(_) => {
                    let deletions = commands[call].iter().filter_map(ReleaseCommand::deletion);
                    delete(deletions, by, out);
                }
            };
        let split = |call: Range<usize>, answer, answers: &mut Vec<_>| {
            split(call.len(), answer, answers);
        };
        let mut answers = self.run_shared(path, hint, false, &calls, &command, &split).await;
        // A lock that was not deleted is contended or not held: the script of the wait queue finds out.
        let not_deleted = |at: &usize| deletes(*at) && matches!(answers[*at], Ok(0));
        let again: Vec<_> = (0..answers.len()).filter(not_deleted).collect();
        let refused = |at: &usize| self.cannot_notify(&requests[*at]);
        let (refused, again): (Vec<_>, Vec<_>) = again.into_iter().partition(refused);
        for at in refused {
            answers[at] = Err(cannot_notify());
        }
        if !again.is_empty() {
            let queued: Vec<_> =
                again.iter().map(|at| self.queue_release(&requests[*at])).collect();
            let command = |at: usize, by, out: &mut CommandWriter<'_>| {
                queued[at].command(&self.keyspace, by, out);
            };
            let more = self.run_named(Path::Background, hint, false, queued.len(), &command).await;
            let more = more.into_iter().map(|answer| outcome(answer?)).collect();
            replace(&mut answers, &again, more);
        }
        let outcomes = requests.iter().zip(answers);
        outcomes.map(|(request, answer)| self.released(request, answer?)).collect()
    }

    fn release_command<'a>(&self, request: &'a ReleaseRequest) -> ReleaseCommand<'a> {
        match &*request.lease.keys {
            [key]
                if request.free_after.is_zero()
                    && request.successor.is_none()
                    && !self.contended.contains(key) =>
            {
                let token = self.token(&request.lease.owner);
                ReleaseCommand::Delete(Deletion { key, token })
            }
            _ => ReleaseCommand::Queue(self.queue_release(request)),
        }
    }

    fn queue_release<'a>(&self, request: &'a ReleaseRequest) -> QueueRelease<'a> {
        let token = self.token(&request.lease.owner);
        let successor = request.successor.filter(|_| self.keeps_wait_queues());
        let successor = successor.map(|next| (self.token(&next.owner), next.ttl));
        QueueRelease { request, token, successor }
    }

    /// Whether the wait queue of a lock that `request` breaks may have waiters that this login cannot notify.
    fn cannot_notify(&self, request: &ReleaseRequest) -> bool {
        request.forced.is_some() && !self.keeps_wait_queues()
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
                request.lease.keys.iter().for_each(|key| self.contended.note(key.as_str()));
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
        .remedy("allow the channels `lock_runtime:*` for the login, or use one of the services")
}

/// The outcome of a command for one lock.
fn outcome(answer: Value) -> Result<i64, BackendError> {
    match answer {
        Value::Int(outcome) => Ok(outcome),
        Value::BulkString(digit) if digit.len() == 1 => Ok(outcome_of(digit[0])),
        other => Err(unexpected(&other)),
    }
}

/// Adds the outcomes of a command for `count` locks.
fn split(count: usize, answer: Value, outcomes: &mut SharedReplies<i64>) {
    match answer {
        Value::BulkString(digits) if digits.len() == count => {
            outcomes.extend(digits.into_iter().map(|digit| Ok(outcome_of(digit))));
        }
        answer if count == 1 => outcomes.push(outcome(answer)),
        other => outcomes.extend((0..count).map(|_| Err(unexpected(&other)))),
    }
}

/// From a digit of `release.lua`.
fn outcome_of(digit: u8) -> i64 {
    i64::from(digit) - i64::from(b'0')
}

impl<'a> ReleaseCommand<'a> {
    fn deletion(&self) -> Option<&Deletion<'a>> {
        match self {
            Self::Delete(deletion) => Some(deletion),
            Self::Queue(_) => None,
        }
    }
}

fn delete<'a>(
    deletions: impl Iterator<Item = &'a Deletion<'a>> + Clone,
    by: By,
    out: &mut CommandWriter<'_>,
) {
    let call = RELEASE.call(out, by, deletions.clone().count());
    for deletion in deletions.clone() {
        call.arg(deletion.key.as_str());
    }
    for deletion in deletions {
        call.arg(ValueStart(deletion.token));
    }
}

impl QueueRelease<'_> {
    fn command(&self, keyspace: &Keyspace, by: By, out: &mut CommandWriter<'_>) {
        let ReleaseRequest { lease, free_after, barging_window, .. } = self.request;
        let call = WAIT_QUEUE.call(out, by, 2 * lease.keys.len());
        for key in lease.keys.iter() {
            call.arg(key.as_str());
        }
        for key in lease.keys.iter() {
            call.arg(keyspace.wait_queue(key));
        }
        call.arg("release").arg(self.token.as_bytes()).arg(millis(*free_after));
        call.arg(millis(lease.reservation_time()));
        match &self.successor {
            Some((token, ttl)) => call.arg(token.as_bytes()).arg(millis(*ttl)),
            None => call.arg("").arg("0"),
        };
        call.arg(millis(*barging_window));
    }
}
