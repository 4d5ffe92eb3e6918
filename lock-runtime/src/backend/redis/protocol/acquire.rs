//! Acquire requests to one server with scripts.

use std::iter;
use std::ops::Range;
use std::slice;
use std::time::Duration;

use redis::Value;

use crate::backend::redis::conn::path::Path;
use crate::backend::redis::net::command::CommandWriter;
use crate::backend::redis::net::handshake::PushSupport;
use crate::backend::redis::protocol::script::{ACQUIRE, By, MINT, WAIT_QUEUE};
use crate::backend::redis::protocol::scripted_server::{
    RouteHint, ScriptedServer, SharedReplies, shared_calls,
};
use crate::backend::redis::protocol::value::{
    ROUNDING, duration, millis, minted, unexpected, watch,
};
use crate::backend::redis::protocol::wait_queue::{LockValue, recheck_interval};
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, FailureKind, WaitMode};
use crate::base::clock::Instant;
use crate::base::jitter;

/// The command that carries an acquire request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestForm {
    /// `SET NX PX`.
    Set,
    /// `SET NX PX` and the fence counter, see [`fence_transaction`](super::fence_transaction).
    Transaction,
    /// `mint.lua`: a lock that a transaction has taken without a fence.
    Mint,
    /// `acquire.lua`: several keys, a fence, or a request that does not enqueue.
    Script,
    /// `wait_queue.lua`: the lock, or a position in its queue.
    Queue,
}

/// What the server says about one request.
#[derive(Clone, Copy, Debug)]
pub(super) enum AcquireReply {
    /// `fence` is the first of `fences`, or 0 without any. `waiting` tokens are in the queue of the lock.
    Granted {
        fence: i64,
        fences: i64,
        waiting: i64,
    },
    /// The lock is taken, and needs a fence.
    WithoutFence,
    /// A transaction was refused, and the request is repeated as a script.
    Refused {
        may_be_held: bool,
    },
    Held {
        expires_in: Option<Duration>,
    },
    /// `has_channel`: the process of the holder receives messages.
    Queued {
        expires_in: Option<Duration>,
        rank: u64,
        has_channel: bool,
    },
}

/// The connection that `request` takes.
///
/// The message that grants the lock to a queued owner must not overtake the answer to its claim.
fn path(form: RequestForm, request: &AcquireRequest) -> Path {
    if form == RequestForm::Queue || request.attempt > 0 {
        Path::Background
    } else {
        Path::Foreground
    }
}

/// Whether both requests may be in one script: it mints the fences of all of its requests together.
fn may_share(one: &AcquireRequest, other: &AcquireRequest) -> bool {
    one.keys.len() == 1
        && other.keys.len() == 1
        && one.kept_for() == other.kept_for()
        && (one.fencing, one.extra_fences) == (other.fencing, other.extra_fences)
}

/// The reply to a request that was sent again. If the second one was not applied, the first one still is: its owner is in the
/// queue, or holds the lock.
fn reply_to_both(
    earlier: AcquireReply,
    later: Result<AcquireReply, BackendError>,
) -> Result<AcquireReply, BackendError> {
    match (earlier, later) {
        (AcquireReply::Queued { .. }, Err(error)) if error.kind() == FailureKind::NotApplied => {
            Ok(earlier)
        }
        (AcquireReply::WithoutFence | AcquireReply::Refused { may_be_held: true }, Err(error)) => {
            Err(error.after_a_part())
        }
        (_, later) => later,
    }
}

impl ScriptedServer {
    pub(crate) async fn acquire(
        &self,
        hint: RouteHint,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        if hint == RouteHint::Direct {
            let forms = requests.iter().map(|request| self.form(request)).collect();
            return self.acquire_as(forms, hint, requests).await;
        }
        // The lock and its queue may be at two servers, and a command with both is refused. Until the slot has moved, the request
        // leaves the queue out and polls.
        let form = |request: &AcquireRequest| match self.form(request) {
            RequestForm::Queue if !request.fencing => RequestForm::Script,
            form => form,
        };
        let forms = requests.iter().map(form).collect();
        let mut outcomes = self.acquire_as(forms, hint, requests).await;
        for outcome in outcomes.iter_mut().flatten() {
            match outcome {
                // The next request may go to the other server, and nothing reports a change there.
                AcquireOutcome::Contended { wait_mode: mode @ WaitMode::Watch { .. }, .. } => {
                    *mode = WaitMode::Poll;
                }
                AcquireOutcome::Acquired { contended, .. } => *contended = None,
                AcquireOutcome::Contended { .. } => {}
            }
        }
        outcomes
    }

    /// Sends one request in `form`.
    pub(crate) async fn acquire_one(
        &self,
        form: RequestForm,
        hint: RouteHint,
        request: &AcquireRequest,
    ) -> Result<AcquireOutcome, BackendError> {
        let reply = if form == RequestForm::Transaction {
            let requests = slice::from_ref(request);
            let mut replies = self.run_transactions(path(form, request), requests).await;
            replies.pop().unwrap_or_else(|| Err(unexpected(&Value::Nil)))?
        } else {
            self.reply(path(form, request), hint, false, form, request).await?
        };
        let Some(again) = self.again(request, form, reply) else {
            return self.outcome(request, form, reply);
        };
        let later = self.reply(Path::Background, hint, true, again, request).await;
        self.outcome(request, again, reply_to_both(reply, later)?)
    }

    async fn reply(
        &self,
        path: Path,
        hint: RouteHint,
        is_tracked: bool,
        form: RequestForm,
        request: &AcquireRequest,
    ) -> Result<AcquireReply, BackendError> {
        let command = |by, out: &mut CommandWriter<'_>| {
            self.command(slice::from_ref(request), form, by, out);
        };
        let sent = request.fencing.then(|| self.counter_clock.now());
        let reply = self.read(form, &self.run_one(path, hint, is_tracked, &command).await?);
        self.note_fence(sent, &reply);
        reply
    }

    /// A script that was sent at `sent` has this reply.
    fn note_fence(&self, sent: Option<Instant>, reply: &Result<AcquireReply, BackendError>) {
        if let (Some(sent), Ok(AcquireReply::Granted { fence: 1.., .. })) = (sent, reply) {
            self.counter_clock.moved(sent);
        }
    }

    /// Sends each request in the form at its place.
    pub(crate) async fn acquire_as(
        &self,
        mut forms: Vec<RequestForm>,
        hint: RouteHint,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let mut paths = iter::zip(&forms, requests).map(|(form, request)| path(*form, request));
        let path = if paths.all(|it| it == Path::Foreground) {
            Path::Foreground
        } else {
            Path::Background
        };
        let are_transactions = forms.iter().all(|form| *form == RequestForm::Transaction);
        if !are_transactions {
            let transactions = forms.iter_mut().filter(|form| **form == RequestForm::Transaction);
            transactions.for_each(|form| *form = RequestForm::Script);
        }
        let is_script = |at: usize| forms[at] == RequestForm::Script;
        let may_share = |a: usize, b: usize| {
            is_script(a) && is_script(b) && may_share(&requests[a], &requests[b])
        };
        let mut replies = if are_transactions {
            self.run_transactions(path, requests).await
        } else {
            let most = self.max_shared(hint);
            let calls = shared_calls(requests.len(), |_| most, may_share);
            self.replies(path, hint, false, &forms, requests, &calls).await
        };
        let mut again = Vec::new();
        for (at, reply) in replies.iter().enumerate() {
            if let Ok(reply) = reply
                && let Some(form) = self.again(&requests[at], forms[at], *reply)
            {
                forms[at] = form;
                again.push(at);
            }
        }
        let (mint, again): (Vec<_>, Vec<_>) =
            again.into_iter().partition(|at| forms[*at] == RequestForm::Mint);
        if !mint.is_empty() {
            let requests: Vec<_> = mint.iter().map(|at| requests[*at].clone()).collect();
            let forms = vec![RequestForm::Mint; requests.len()];
            let calls = shared_calls(requests.len(), |_| self.max_shared(hint), |_, _| true);
            let path = Path::Background;
            let more = self.replies(path, hint, false, &forms, &requests, &calls).await;
            for (at, later) in iter::zip(mint, more) {
                replies[at] = reply_to_both(AcquireReply::WithoutFence, later);
            }
        }
        if !again.is_empty() {
            let calls: Vec<_> = again.iter().map(|at| *at..at + 1).collect();
            let more = self.replies(Path::Background, hint, true, &forms, requests, &calls).await;
            for (at, later) in iter::zip(again, more) {
                if let Ok(earlier) = &replies[at] {
                    replies[at] = reply_to_both(*earlier, later);
                }
            }
        }
        let attempts = requests.iter().zip(forms).zip(replies);
        attempts.map(|((request, form), reply)| self.outcome(request, form, reply?)).collect()
    }

    /// Sends a command for each of `calls`, ranges of requests in one form. Returns a reply for each of their requests.
    async fn replies(
        &self,
        path: Path,
        hint: RouteHint,
        is_tracked: bool,
        forms: &[RequestForm],
        requests: &[AcquireRequest],
        calls: &[Range<usize>],
    ) -> SharedReplies<AcquireReply> {
        let command = |call: Range<usize>, by, out: &mut CommandWriter<'_>| {
            let form = forms[call.start];
            self.command(&requests[call], form, by, out);
        };
        let split = |call: Range<usize>, answer, replies: &mut Vec<_>| {
            self.split(forms[call.start], call.len(), &answer, replies);
        };
        let sent = Some(self.counter_clock.now());
        let replies = self.run_shared(path, hint, is_tracked, calls, &command, &split).await;
        replies.iter().for_each(|reply| self.note_fence(sent, reply));
        replies
    }

    /// The form in which `request` is sent now.
    pub(crate) fn form(&self, request: &AcquireRequest) -> RequestForm {
        let queues = request.enqueue && self.keeps_wait_queues();
        match (&*request.keys, request.attempt) {
            ([key], 0) if queues && self.contended.contains(key) => RequestForm::Queue,
            // The usual case in one plain command. It has to be the first attempt, as the command does not recognise
            // an earlier attempt by the same owner. Its reply has no remaining time.
            ([_], 0) if !request.fencing => RequestForm::Set,
            ([_], 0) if self.grants_by_transaction(request) => RequestForm::Transaction,
            ([_], 1..) if queues => RequestForm::Queue,
            _ => RequestForm::Script,
        }
    }

    /// Writes the command for `requests`: one, or several that share a script.
    fn command(
        &self,
        requests: &[AcquireRequest],
        form: RequestForm,
        by: By,
        out: &mut CommandWriter<'_>,
    ) {
        let [request, ..] = requests else { return };
        let value =
            |request: &AcquireRequest| LockValue::new(self.token(&request.owner), request.label);
        let ttl = millis(request.kept_for());
        let counter = request.fencing.then(|| self.keyspace.fence_counter(&request.keys));
        let fences = counter.as_ref().map_or(0, |_| u64::from(request.extra_fences) + 1);
        match (form, &*request.keys) {
            (RequestForm::Set, [key]) => {
                out.arg("SET").arg(key.as_str()).arg(value(request)).arg("NX").arg("PX").arg(ttl);
            }
            (RequestForm::Mint, _) => {
                let call = MINT.call(out, by, requests.len() + 1);
                for request in requests {
                    call.arg(request.keys[0].as_str());
                }
                call.arg(counter);
                for request in requests {
                    call.arg(value(request));
                }
            }
            (RequestForm::Queue, [key]) => {
                let value = value(request);
                let call = WAIT_QUEUE.call(out, by, 2 + usize::from(request.fencing));
                call.arg(key.as_str()).arg(self.keyspace.wait_queue(key)).arg(counter);
                call.arg("claim").arg(value.token()).arg(ttl).arg(fences).arg(value.text());
            }
            (_, keys) => {
                let locks = keys.len() * requests.len();
                let call = ACQUIRE.call(out, by, locks + usize::from(request.fencing));
                for key in requests.iter().flat_map(|request| request.keys.iter()) {
                    call.arg(key.as_str());
                }
                call.arg(counter).arg(ttl).arg(keys.len()).arg(fences);
                for request in requests {
                    call.arg(value(request));
                }
            }
        }
    }

    /// Adds the replies to the `count` requests of a command in `form`.
    fn split(
        &self,
        form: RequestForm,
        count: usize,
        answer: &Value,
        replies: &mut SharedReplies<AcquireReply>,
    ) {
        match (form, answer) {
            (RequestForm::Script | RequestForm::Mint, Value::Array(parts))
                if parts.len() == 1 + count =>
            {
                let read = |part| self.read_script(&parts[0], part, answer);
                replies.extend(parts[1..].iter().map(read));
            }
            _ if count == 1 => replies.push(self.read(form, answer)),
            _ => replies.extend((0..count).map(|_| Err(unexpected(answer)))),
        }
    }

    /// The reply to one request in `form`.
    fn read(&self, form: RequestForm, answer: &Value) -> Result<AcquireReply, BackendError> {
        match (form, answer) {
            (RequestForm::Set, Value::Okay) => {
                Ok(AcquireReply::Granted { fence: 0, fences: 0, waiting: 0 })
            }
            // The reply of the script will have the remaining time.
            (RequestForm::Set, Value::Nil) => Ok(AcquireReply::Held { expires_in: None }),
            (RequestForm::Script | RequestForm::Mint, Value::Array(parts)) => {
                match parts.as_slice() {
                    [fences, part] => self.read_script(fences, part, answer),
                    _ => Err(unexpected(answer)),
                }
            }
            (RequestForm::Queue, Value::Array(parts)) => match parts.as_slice() {
                [Value::Int(1), Value::Int(fence), Value::Int(fences), Value::Int(waiting)] => {
                    Ok(AcquireReply::Granted { fence: *fence, fences: *fences, waiting: *waiting })
                }
                [Value::Int(0), Value::Int(expires_in), Value::Int(rank), Value::Int(channel)] => {
                    Ok(AcquireReply::Queued {
                        expires_in: duration(*expires_in),
                        rank: u64::try_from(*rank).unwrap_or_default(),
                        has_channel: *channel != 0,
                    })
                }
                _ => Err(unexpected(answer)),
            },
            _ => Err(unexpected(answer)),
        }
    }

    /// The reply of `acquire.lua` to one request, a part of its `answer`. It grants `fences` each.
    fn read_script(
        &self,
        fences: &Value,
        reply: &Value,
        answer: &Value,
    ) -> Result<AcquireReply, BackendError> {
        let Value::Int(fences) = *fences else { return Err(unexpected(answer)) };
        match reply {
            Value::Int(fence @ 0..) => {
                Ok(AcquireReply::Granted { fence: *fence, fences, waiting: 0 })
            }
            Value::Int(-1) => Ok(AcquireReply::Held { expires_in: None }),
            Value::Int(held) => Ok(AcquireReply::Held { expires_in: duration(-1 - held) }),
            Value::BulkString(error) => {
                Err(self.connection.script_failure(&String::from_utf8_lossy(error)))
            }
            other => Err(unexpected(other)),
        }
    }

    /// The form in which to repeat a request immediately after this reply, if it has to be repeated.
    fn again(
        &self,
        request: &AcquireRequest,
        form: RequestForm,
        reply: AcquireReply,
    ) -> Option<RequestForm> {
        let tracks = self.reports_changes();
        match (form, reply) {
            // A request that does not wait still reports the remaining time.
            (RequestForm::Set | RequestForm::Transaction, AcquireReply::Held { .. })
                if !request.enqueue =>
            {
                Some(RequestForm::Script)
            }
            (_, AcquireReply::WithoutFence) => Some(RequestForm::Mint),
            (_, AcquireReply::Refused { .. }) => Some(RequestForm::Script),
            (RequestForm::Script, AcquireReply::Held { .. }) if tracks => {
                (request.attempt > 0).then_some(RequestForm::Script)
            }
            // A key is tracked only if it is read after `CLIENT CACHING YES`. Needed for a holder that sends no
            // messages, and at the head of the queue for a lock that is deleted from outside.
            (RequestForm::Queue, AcquireReply::Queued { rank, has_channel, .. }) if tracks => {
                (!has_channel || (rank == 0 && request.attempt > 0)).then_some(RequestForm::Queue)
            }
            _ => None,
        }
    }

    fn outcome(
        &self,
        request: &AcquireRequest,
        form: RequestForm,
        reply: AcquireReply,
    ) -> Result<AcquireOutcome, BackendError> {
        match reply {
            AcquireReply::Granted { fence, fences, waiting } => {
                let fence = if request.fencing {
                    Some(minted(fence).ok_or_else(|| unexpected(&Value::Int(fence)))?)
                } else {
                    None
                };
                if let (1.., [key]) = (waiting, &*request.keys) {
                    self.contended.note(key.as_str());
                }
                let reserved = u32::try_from(fences.max(1) - 1).unwrap_or(u32::MAX);
                // Without the right to publish, this process cannot tell a holder that it waits; so the holder's
                // knowledge of waiters would be incomplete.
                let granted = AcquireOutcome::acquired(fence).with_reserved_fences(reserved);
                let knows = self.keeps_wait_queues();
                Ok(if knows { granted.with_contended(waiting > 0) } else { granted })
            }
            AcquireReply::WithoutFence | AcquireReply::Refused { .. } => {
                Err(unexpected(&Value::Nil))
            }
            AcquireReply::Held { expires_in } => {
                let wait_mode = match form {
                    RequestForm::Set | RequestForm::Transaction => {
                        WaitMode::Watch { retry_after: Duration::ZERO }
                    }
                    _ => self.wait_mode(request, expires_in),
                };
                Ok(AcquireOutcome::Contended { expires_in, wait_mode })
            }
            AcquireReply::Queued { expires_in, rank, .. } => {
                if let [key] = &*request.keys {
                    self.contended.note(key.as_str());
                }
                let recheck = jitter::below(recheck_interval(rank));
                let retry_after = match expires_in {
                    Some(expires_in) if rank == 0 => recheck.min(expires_in + ROUNDING),
                    _ => recheck,
                };
                let wait_mode = WaitMode::Queued { retry_after };
                Ok(AcquireOutcome::Contended { expires_in, wait_mode })
            }
        }
    }

    /// How a request that is not in the queue waits.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_first_of_two_requests_did_stands_if_the_second_one_was_not_applied() {
        let queued = AcquireReply::Queued { expires_in: None, rank: 0, has_channel: true };
        let held = AcquireReply::Held { expires_in: None };
        let granted = AcquireReply::Granted { fence: 0, fences: 0, waiting: 0 };
        let failed = |kind| Err(BackendError::new(kind, "planned"));
        assert!(matches!(reply_to_both(queued, Ok(granted)), Ok(AcquireReply::Granted { .. })));
        let later = failed(FailureKind::NotApplied);
        assert!(matches!(reply_to_both(queued, later), Ok(AcquireReply::Queued { rank: 0, .. })));
        assert!(reply_to_both(queued, failed(FailureKind::MaybeApplied)).is_err());
        let kind = |earlier, later| reply_to_both(earlier, failed(later)).unwrap_err().kind();
        assert_eq!(kind(held, FailureKind::NotApplied), FailureKind::NotApplied);
        for later in [FailureKind::NotApplied, FailureKind::Rejected] {
            assert_eq!(kind(AcquireReply::Refused { may_be_held: false }, later), later);
            for held in [AcquireReply::WithoutFence, AcquireReply::Refused { may_be_held: true }] {
                assert_eq!(kind(held, later), FailureKind::MaybeApplied);
            }
        }
    }
}
