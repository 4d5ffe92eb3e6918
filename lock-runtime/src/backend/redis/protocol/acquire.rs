//! Acquire requests to one server with scripts.

use std::time::Duration;

use redis::{Cmd, Value};

use crate::backend::redis::conn::path::Path;
use crate::backend::redis::net::handshake::PushSupport;
use crate::backend::redis::protocol::script::{ACQUIRE, By, WAIT_QUEUE};
use crate::backend::redis::protocol::scripted_server::{RouteHint, ScriptedServer, replace};
use crate::backend::redis::protocol::value::{
    ROUNDING, duration, fences, millis, unexpected, watch,
};
use crate::backend::redis::protocol::wait_queue::{LockValue, recheck_interval};
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, WaitMode};
use crate::base::clock::Instant;
use crate::base::jitter;

/// The command that carries an acquire request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestForm {
    /// `SET NX PX`.
    Set,
    /// `acquire.lua`: several keys, a fence, or a request that does not enqueue.
    Script,
    /// `wait_queue.lua`: the lock, or a position in its queue.
    Queue,
}

impl ScriptedServer {
    pub(crate) async fn acquire(
        &self,
        hint: RouteHint,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let now = self.clock.now();
        let forms = requests.iter().map(|request| self.form(request, now)).collect();
        self.acquire_as(forms, hint, requests).await
    }

    /// Sends each request in the form at its place.
    pub(crate) async fn acquire_as(
        &self,
        mut forms: Vec<RequestForm>,
        hint: RouteHint,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        // The message that grants the lock to a queued owner must not overtake the answer to its claim.
        let path =
            if forms.contains(&RequestForm::Queue) || requests.iter().any(|it| it.attempt > 0) {
                Path::Background
            } else {
                Path::Foreground
            };
        let command = |at: usize, by| self.command(&requests[at], forms[at], by);
        let mut answers = self.run_named(path, hint, false, requests.len(), command).await;
        let mut again = Vec::new();
        for (at, answer) in answers.iter().enumerate() {
            if let Ok(answer) = answer
                && let Some(form) = self.again(&requests[at], forms[at], answer)
            {
                forms[at] = form;
                again.push(at);
            }
        }
        if !again.is_empty() {
            let command = |n: usize, by| self.command(&requests[again[n]], forms[again[n]], by);
            let more = self.run_named(Path::Background, hint, true, again.len(), command).await;
            replace(&mut answers, &again, more);
        }
        let attempts = requests.iter().zip(forms).zip(answers);
        attempts.map(|((request, form), answer)| self.outcome(request, form, &answer?)).collect()
    }

    /// The form in which `request` is sent at `now`.
    pub(crate) fn form(&self, request: &AcquireRequest, now: Instant) -> RequestForm {
        let queues = request.enqueue && self.keeps_wait_queues();
        match (&*request.keys, request.attempt) {
            ([key], 0) if queues && self.contended.contains(key, now) => RequestForm::Queue,
            // The usual case in one plain command. It has to be the first attempt, as it does not recognise an earlier
            // one of the same owner. Its reply has no remaining time.
            ([_], 0) if !request.fencing => RequestForm::Set,
            ([_], 1..) if queues => RequestForm::Queue,
            _ => RequestForm::Script,
        }
    }

    fn command(&self, request: &AcquireRequest, form: RequestForm, by: By) -> Cmd {
        let value = LockValue::new(self.token(&request.owner), request.label);
        let ttl = millis(request.kept_for());
        let counter = request.fencing.then(|| self.keyspace.fence_counter(&request.keys));
        let fences = u64::from(request.extra_fences) + 1;
        match (form, &*request.keys) {
            (RequestForm::Set, [key]) => {
                let mut set = Cmd::with_capacity(6, 6 * 48);
                set.arg("SET").arg(key.as_str()).arg(value).arg("NX").arg("PX").arg(ttl);
                set
            }
            (RequestForm::Queue, [key]) => {
                let mut call = WAIT_QUEUE.call(by, 2 + usize::from(request.fencing), 5);
                call.arg(key.as_str()).arg(self.keyspace.wait_queue(key)).arg(counter);
                call.arg("claim").arg(value.token()).arg(ttl).arg(fences).arg(value.text());
                call
            }
            (_, keys) => {
                let mut call = ACQUIRE.call(by, keys.len() + usize::from(request.fencing), 4);
                for key in keys {
                    call.arg(key.as_str());
                }
                call.arg(counter).arg(value).arg(ttl).arg(keys.len()).arg(fences);
                call
            }
        }
    }

    /// The form in which to repeat a request at once after this answer, if it has to be.
    fn again(
        &self,
        request: &AcquireRequest,
        form: RequestForm,
        answer: &Value,
    ) -> Option<RequestForm> {
        let tracks = self.reports_changes();
        match (form, answer) {
            // A request that does not wait still reports the remaining time.
            (RequestForm::Set, Value::Nil) if !request.enqueue => Some(RequestForm::Script),
            (RequestForm::Script, Value::Array(parts)) if tracks => {
                let is_held = matches!(parts.as_slice(), [Value::Int(0), ..]);
                (is_held && request.attempt > 0).then_some(RequestForm::Script)
            }
            // A key is tracked only if it is read behind `CLIENT CACHING YES`. Needed for a holder that sends no
            // messages, and at the head of the queue for a lock that is deleted from outside.
            (RequestForm::Queue, Value::Array(parts)) if tracks => match parts.as_slice() {
                [Value::Int(0), _, Value::Int(rank), Value::Int(has_channel)] => {
                    (*has_channel == 0 || (*rank == 0 && request.attempt > 0))
                        .then_some(RequestForm::Queue)
                }
                _ => None,
            },
            _ => None,
        }
    }

    fn outcome(
        &self,
        request: &AcquireRequest,
        form: RequestForm,
        answer: &Value,
    ) -> Result<AcquireOutcome, BackendError> {
        // Without the right to publish, this process cannot tell a holder that it waits; so the holder's knowledge of
        // waiters would not be complete.
        let knows_waiters = self.keeps_wait_queues();
        let parts = match (form, answer) {
            (RequestForm::Set, Value::Okay) => {
                return Ok(AcquireOutcome::Acquired {
                    fence: None,
                    reserved_fences: 0,
                    contended: knows_waiters.then_some(false),
                });
            }
            // The reply of the script will have the rest.
            (RequestForm::Set, Value::Nil) => {
                let wait_mode = WaitMode::Watch { retry_after: Duration::ZERO };
                return Ok(AcquireOutcome::Contended { expires_in: None, wait_mode });
            }
            (RequestForm::Script | RequestForm::Queue, Value::Array(parts)) => parts.as_slice(),
            _ => return Err(unexpected(answer)),
        };
        match parts {
            [Value::Int(1), Value::BulkString(fence), waiting @ ..] => {
                let fences = if request.fencing {
                    Some(fences(fence).ok_or_else(|| unexpected(answer))?)
                } else {
                    None
                };
                let has_waiters = matches!(waiting, [Value::Int(1..)]);
                if let (true, [key]) = (has_waiters, &*request.keys) {
                    self.contended.note(key.as_str(), self.clock.now());
                }
                Ok(AcquireOutcome::Acquired {
                    fence: fences.map(|(first, _)| first),
                    reserved_fences: fences.map_or(0, |(_, count)| count.saturating_sub(1)),
                    contended: knows_waiters.then_some(has_waiters),
                })
            }
            [Value::Int(0), Value::Int(expires_in)] => {
                let expires_in = duration(*expires_in);
                let wait_mode = self.wait_mode(request, expires_in);
                Ok(AcquireOutcome::Contended { expires_in, wait_mode })
            }
            [Value::Int(0), Value::Int(expires_in), Value::Int(rank), Value::Int(_)] => {
                let expires_in = duration(*expires_in);
                let rank = u64::try_from(*rank).unwrap_or_default();
                if let [key] = &*request.keys {
                    self.contended.note(key.as_str(), self.clock.now());
                }
                let recheck = jitter::below(recheck_interval(rank));
                let retry_after = match expires_in {
                    Some(expires_in) if rank == 0 => recheck.min(expires_in + ROUNDING),
                    _ => recheck,
                };
                let wait_mode = WaitMode::Queued { retry_after };
                Ok(AcquireOutcome::Contended { expires_in, wait_mode })
            }
            _ => Err(unexpected(answer)),
        }
    }

    /// How a request waits that is not in the queue.
    fn wait_mode(&self, request: &AcquireRequest, expires_in: Option<Duration>) -> WaitMode {
        let PushSupport { tracking, queue } = self.connection.push_support();
        // Only the next attempt enqueues or starts tracking. A request that does not wait has no next attempt.
        if request.attempt == 0
            && (request.enqueue || request.keys.len() > 1)
            && (tracking || queue)
        {
            return WaitMode::Watch { retry_after: Duration::ZERO };
        }
        if tracking { watch(expires_in) } else { WaitMode::Poll }
    }
}
