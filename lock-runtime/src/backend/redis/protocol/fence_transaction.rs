//! Grants with a fence by plain commands in one transaction. A script takes the server three times as long.
//!
//! `SET NX PX` for each lock, then `TIME`, and `INCRBY` of the fence counter. The counter follows the server's clock, so fences
//! increase across a loss of the data, or of the last writes (see `fence.lua`). `INCRBY` does not move it to the clock, so a
//! transaction counts only if the counter is at most [`MAX_LAG`] behind. A grant by another one gets its fence by `mint.lua`,
//! which takes no lock: it may arrive after the undo of the grant. Scripts also move the counter, see `counter_clock.rs`.

use redis::Value;

use crate::backend::AcquireRequest;
use crate::backend::redis::conn::answer_sign::AnswerSign;
use crate::backend::redis::conn::path::Path;
use crate::backend::redis::conn::prelude::Prelude;
use crate::backend::redis::net::command::CommandWriter;
use crate::backend::redis::protocol::acquire::AcquireReply;
use crate::backend::redis::protocol::counter_clock::MAX_LAG;
use crate::backend::redis::protocol::scripted_server::{
    MAX_SHARED, RouteHint, ScriptedServer, SharedReplies,
};
use crate::backend::redis::protocol::value::millis;
use crate::backend::redis::protocol::wait_queue::LockValue;

/// As in `fence.lua`: a greater number is no fence.
const MAX_FENCE: i64 = 1 << 53;

/// The commands of a transaction, without those for its locks.
const OWN_COMMANDS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransactionCommand {
    Multi,
    /// The grant to the request at this place.
    Set(usize),
    Time,
    /// A fence for each of so many grants.
    IncrBy(usize),
    Exec,
}

/// What the server has made of a transaction.
#[derive(Debug)]
enum TransactionResult {
    /// `first_fence` is `None` if the counter is too far behind the clock, or is no number.
    Executed { grants: Vec<Value>, first_fence: Option<i64> },
    /// Whether each lock may be held.
    Refused { may_be_held: Vec<bool> },
}

impl ScriptedServer {
    /// Whether the first attempt of `request` is sent in a transaction.
    pub(super) fn grants_by_transaction(&self, request: &AcquireRequest) -> bool {
        // A request that does not wait asks for the remaining time, too.
        request.fencing
            && request.enqueue
            && request.extra_fences == 0
            && self.counter_clock.is_close()
            && self.max_shared(RouteHint::Direct) > 1
    }

    /// The reply to each of `requests`, first attempts for one key each.
    pub(super) async fn run_transactions(
        &self,
        path: Path,
        requests: &[AcquireRequest],
    ) -> SharedReplies<AcquireReply> {
        let commands = commands(requests.len());
        let command = |at: usize, out: &mut CommandWriter<'_>| {
            self.write_command(requests, commands[at], out);
        };
        let sign = |answers: &[Value]| sign(&commands, answers);
        let sent = self.connection.send_raw(path, Prelude::None, commands.len(), &command, sign);
        let mut answers = match sent.await {
            Ok(answers) => answers.into_iter(),
            Err(error) => return requests.iter().map(|_| Err(error.clone())).collect(),
        };
        let mut replies = Vec::with_capacity(requests.len());
        for requests in requests.chunks(MAX_SHARED) {
            let answers = answers.by_ref().take(requests.len() + OWN_COMMANDS).collect();
            let result = TransactionResult::new(answers);
            match &result {
                TransactionResult::Executed { first_fence: Some(_), .. } => {}
                TransactionResult::Executed { .. } => self.counter_clock.lags(),
                TransactionResult::Refused { .. } => self.counter_clock.pause(),
            }
            replies.extend(result.replies().map(Ok));
        }
        replies
    }

    fn write_command(
        &self,
        requests: &[AcquireRequest],
        command: TransactionCommand,
        out: &mut CommandWriter<'_>,
    ) {
        match command {
            TransactionCommand::Multi => out.arg("MULTI"),
            TransactionCommand::Set(at) => {
                let request = &requests[at];
                let value = LockValue::new(self.token(&request.owner), request.label);
                out.arg("SET").arg(request.keys[0].as_str()).arg(value);
                out.arg("NX").arg("PX").arg(millis(request.kept_for()))
            }
            TransactionCommand::Time => out.arg("TIME"),
            TransactionCommand::IncrBy(count) => {
                out.arg("INCRBY").arg(self.keyspace.fence_counter(&requests[0].keys)).arg(count)
            }
            TransactionCommand::Exec => out.arg("EXEC"),
        };
    }
}

impl TransactionResult {
    /// From the answers to the commands of one transaction.
    fn new(mut answers: Vec<Value>) -> Self {
        let (ended, is_begun) = (answers.pop(), answers.first() == Some(&Value::Okay));
        let count = answers.len() + 1 - OWN_COMMANDS;
        let sets = answers.into_iter().skip(1).take(count);
        match ended {
            Some(Value::Array(mut grants)) if grants.len() == count + 2 => {
                let first_fence = first_fence(&grants.split_off(count), count);
                Self::Executed { grants, first_fence }
            }
            ended if is_begun => {
                let may_be_held = !ended.is_some_and(|it| is_discarded(&it));
                Self::Refused { may_be_held: vec![may_be_held; count] }
            }
            // Each command has been run on its own.
            _ => Self::Refused { may_be_held: sets.map(|set| set == Value::Okay).collect() },
        }
    }

    fn replies(self) -> impl Iterator<Item = AcquireReply> {
        let (grants, first_fence, may_be_held) = match self {
            Self::Executed { grants, first_fence } => (grants, first_fence, Vec::new()),
            Self::Refused { may_be_held } => (Vec::new(), None, may_be_held),
        };
        let granted = move |(grant, at): (Value, i64)| match (grant, first_fence) {
            (Value::Okay, Some(first)) => {
                AcquireReply::Granted { fence: first + at, fences: 1, waiting: 0 }
            }
            (Value::Okay, None) => AcquireReply::WithoutFence,
            (Value::Nil, _) => AcquireReply::Held { expires_in: None },
            _ => AcquireReply::Refused { may_be_held: true },
        };
        let refused =
            may_be_held.into_iter().map(|held| AcquireReply::Refused { may_be_held: held });
        grants.into_iter().zip(0..).map(granted).chain(refused)
    }
}

/// What the answers to transactions show of their connection. A server that refuses `EXEC` without `EXECABORT` leaves the
/// transaction open: one without the command, and one before 6.2 that denies it.
fn sign(commands: &[TransactionCommand], answers: &[Value]) -> AnswerSign {
    let mut is_begun = false;
    for (command, answer) in commands.iter().zip(answers) {
        match command {
            TransactionCommand::Multi => is_begun = *answer == Value::Okay,
            TransactionCommand::Exec => {
                let is_ended = matches!(answer, Value::Array(_)) || is_discarded(answer);
                if is_begun && !is_ended {
                    return AnswerSign::InTransaction;
                }
            }
            _ => {}
        }
    }
    if is_begun { AnswerSign::Served } else { AnswerSign::NotServed }
}

fn is_discarded(answer: &Value) -> bool {
    matches!(answer, Value::ServerError(error) if error.code() == "EXECABORT")
}

/// The transactions for `count` requests.
fn commands(count: usize) -> Vec<TransactionCommand> {
    let mut commands = Vec::with_capacity(count + OWN_COMMANDS);
    for start in (0..count).step_by(MAX_SHARED) {
        let end = count.min(start + MAX_SHARED);
        commands.push(TransactionCommand::Multi);
        commands.extend((start..end).map(TransactionCommand::Set));
        commands.extend([
            TransactionCommand::Time,
            TransactionCommand::IncrBy(end - start),
            TransactionCommand::Exec,
        ]);
    }
    commands
}

/// The first of `count` fences, from the results of `TIME` and `INCRBY`. `None` if the counter is too far behind the clock.
fn first_fence(counted: &[Value], count: usize) -> Option<i64> {
    let [Value::Array(time), Value::Int(last)] = counted else { return None };
    let [seconds, micros] = time.as_slice() else { return None };
    let now = number(seconds)?.checked_mul(1_000_000)?.checked_add(number(micros)?)?;
    let first = last.checked_sub(i64::try_from(count).ok()?)?.checked_add(1)?;
    (first > 0 && *last < MAX_FENCE && first >= now.saturating_sub(MAX_LAG)).then_some(first)
}

fn number(text: &Value) -> Option<i64> {
    match text {
        Value::BulkString(digits) => std::str::from_utf8(digits).ok()?.parse().ok(),
        Value::Int(number) => Some(*number),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(now: (&str, &str), last: i64) -> [Value; 2] {
        let text = |part: &str| Value::BulkString(part.as_bytes().to_vec());
        [Value::Array(vec![text(now.0), text(now.1)]), Value::Int(last)]
    }

    #[test]
    fn a_transaction_is_bounded() {
        use TransactionCommand::{Exec, IncrBy, Multi, Set, Time};
        assert_eq!(commands(2), [Multi, Set(0), Set(1), Time, IncrBy(2), Exec]);
        assert_eq!(commands(0), []);
        for (count, expected) in [(MAX_SHARED, 1), (MAX_SHARED + 1, 2), (3 * MAX_SHARED, 3)] {
            let all = commands(count);
            assert_eq!(all.len(), count + expected * OWN_COMMANDS);
            let counted: usize =
                all.iter().map(|it| if let IncrBy(some) = it { *some } else { 0 }).sum();
            assert_eq!(counted, count);
            let longest = all.split(|it| *it == Exec).map(<[_]>::len).max().unwrap();
            assert_eq!(longest, MAX_SHARED + OWN_COMMANDS - 1);
        }
    }

    fn queued() -> Value {
        Value::SimpleString("QUEUED".to_owned())
    }

    fn refusal(text: &str) -> Value {
        redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap()
    }

    #[test]
    fn a_refused_transaction_tells_what_may_be_held() {
        let held = |answers: &[Value]| match TransactionResult::new(answers.to_vec()) {
            TransactionResult::Refused { may_be_held } => may_be_held,
            executed @ TransactionResult::Executed { .. } => panic!("{executed:?}"),
        };
        let (denied, queued) = (refusal("NOPERM no"), queued());
        let aborted = refusal("EXECABORT Transaction discarded");
        let begun = |ended| [Value::Okay, queued.clone(), queued.clone(), queued.clone(), ended];
        assert_eq!(held(&begun(aborted.clone())), [false]);
        assert_eq!(held(&begun(denied.clone())), [true]);
        assert_eq!(held(&begun(Value::Array(Vec::new()))), [true]);
        let none = refusal("ERR EXEC without MULTI");
        let apart = [
            denied.clone(),
            Value::Okay,
            Value::Nil,
            denied.clone(),
            Value::Array(Vec::new()),
            Value::Int(1),
            none,
        ];
        assert_eq!(held(&apart), [true, false, false]);
        let signs = |answers: &[Value], count| sign(&commands(count), answers);
        assert_eq!(signs(&begun(aborted), 1), AnswerSign::Served);
        assert_eq!(signs(&begun(denied), 1), AnswerSign::InTransaction);
        assert_eq!(signs(&begun(Value::Array(Vec::new())), 1), AnswerSign::Served);
        assert_eq!(signs(&apart, 3), AnswerSign::NotServed);
    }

    #[test]
    fn fences_count_if_the_counter_is_close_to_the_clock() {
        let now = ("1795388736", "000500");
        let clock = 1_795_388_736_000_500;
        for (last, count, first) in [
            (clock, 1, Some(clock)),
            (clock, 8, Some(clock - 7)),
            (clock - MAX_LAG, 1, Some(clock - MAX_LAG)),
            (clock - MAX_LAG, 2, None),
            (clock - MAX_LAG - 1, 1, None),
            // The clock was set back.
            (clock + 3_600_000_000, 1, Some(clock + 3_600_000_000)),
            // The counter was lost.
            (8, 8, None),
            (MAX_FENCE - 1, 1, Some(MAX_FENCE - 1)),
            (MAX_FENCE, 1, None),
            (-1, 1, None),
            (i64::MIN, 1, None),
        ] {
            assert_eq!(first_fence(&counted(now, last), count), first, "{count} up to {last}");
        }
        // A server without a clock: its numbers are above 0.
        assert_eq!(first_fence(&counted(("0", "7"), 3), 3), Some(1));
        assert_eq!(first_fence(&counted(("0", "7"), 3), 4), None);
        assert_eq!(first_fence(&counted(("soon", "7"), clock), 1), None);
        assert_eq!(first_fence(&[Value::Nil, Value::Int(clock)], 1), None);
    }
}
