//! Grants with a fence by plain commands in one transaction. A script takes the server three times as long.
//!
//! `SET NX PX` for each lock, then `TIME`, and `INCRBY` of the fence counter. The counter follows the server's clock, so fences
//! increase across a loss of the data, or of the last writes (see `fence.lua`). `INCRBY` does not move it to the clock, so a
//! transaction counts only if the counter is at most [`MAX_LAG`] behind. A grant by another one is sent again as a script, which
//! recognises its owner. Scripts also move the counter, see `counter_clock.rs`.

use redis::Value;

use crate::backend::AcquireRequest;
use crate::backend::redis::conn::connection::ServerAnswer;
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
    /// The results of all commands.
    Executed(Vec<Value>),
    /// Nothing has been applied.
    Discarded,
    /// `MULTI` was refused, so each command has been run on its own.
    NotBegun,
    /// A command has failed in the transaction, or `EXEC` was refused.
    Failed,
}

impl ScriptedServer {
    /// Whether the first attempt of `request` is sent in a transaction.
    pub(super) fn grants_by_transaction(&self, request: &AcquireRequest) -> bool {
        request.fencing
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
        let sent = self.connection.send_after(path, Prelude::None, commands.len(), &command);
        let mut answers = match sent.await {
            Ok(answers) => answers.into_iter(),
            Err(error) => return requests.iter().map(|_| Err(error.clone())).collect(),
        };
        let mut replies = Vec::with_capacity(requests.len());
        let mut may_be_open = false;
        for requests in requests.chunks(MAX_SHARED) {
            let count = requests.len();
            let result = TransactionResult::new(answers.by_ref().take(count + OWN_COMMANDS), count);
            may_be_open |= matches!(result, TransactionResult::Failed);
            replies.extend(self.replies_to_transaction(count, &result).map(Ok));
        }
        if may_be_open {
            // Otherwise the next commands on this connection would be part of the transaction. An error says that there is none.
            let discard = |_: usize, out: &mut CommandWriter<'_>| {
                out.arg("DISCARD");
            };
            let _ = self.connection.send_after(path, Prelude::None, 1, &discard).await;
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

    fn replies_to_transaction(
        &self,
        count: usize,
        result: &TransactionResult,
    ) -> impl Iterator<Item = AcquireReply> {
        let (grants, first) = match result {
            TransactionResult::Executed(results) => {
                let (grants, counted) = results.split_at(count);
                (grants, first_fence(counted, count))
            }
            _ => (&[][..], None),
        };
        match result {
            TransactionResult::Executed(_) if first.is_some() => {}
            TransactionResult::Executed(_) => self.counter_clock.lags(),
            TransactionResult::NotBegun => self.counter_clock.refuse(),
            TransactionResult::Discarded | TransactionResult::Failed => {
                self.counter_clock.pause();
            }
        }
        let is_discarded = matches!(result, TransactionResult::Discarded);
        (0..count).zip(0..).map(move |(at, nth)| match (grants.get(at), first) {
            (Some(Value::Okay), Some(first)) => {
                AcquireReply::Granted { fence: first + nth, fences: 1, waiting: 0 }
            }
            (Some(Value::Nil), _) => AcquireReply::Held { expires_in: None },
            // The script, which follows, is answered with the reason.
            _ => AcquireReply::NoFence { is_held: !is_discarded },
        })
    }
}

impl TransactionResult {
    /// From the answers to the commands of a transaction with `count` grants.
    fn new(mut answers: impl Iterator<Item = ServerAnswer>, count: usize) -> Self {
        let is_begun = matches!(answers.next(), Some(Ok(_)));
        match answers.last() {
            _ if !is_begun => Self::NotBegun,
            Some(Ok(Value::Array(results))) if results.len() == count + 2 => {
                Self::Executed(results)
            }
            Some(Err(error)) if error.code() == Some("EXECABORT") => Self::Discarded,
            _ => Self::Failed,
        }
    }
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
