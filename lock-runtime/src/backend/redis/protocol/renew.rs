//! Renewals at one server with scripts.

use redis::Value;

use crate::backend::redis::conn::path::Path;
use crate::backend::redis::conn::prelude::Prelude;
use crate::backend::redis::net::command::CommandWriter;
use crate::backend::redis::protocol::script::RENEW;
use crate::backend::redis::protocol::scripted_server::{RouteHint, ScriptedServer, shared_calls};
use crate::backend::redis::protocol::value::{millis, unexpected};
use crate::backend::redis::server_error;
use crate::backend::{BackendError, LeaseRef, LeaseStatus};

/// Locks per script. The server runs one script at a time, and this many locks take it about a millisecond.
const MAX_LOCKS: usize = 256;

/// Locks per script while reads are tracked: the server then notes all keys of a script at each of its reads.
const MAX_TRACKED_LOCKS: usize = 16;

impl ScriptedServer {
    pub(crate) async fn renew(
        &self,
        hint: RouteHint,
        leases: &[LeaseRef],
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        let were_tagged = self.keyspace.is_tagged();
        let outcomes = self.renew_once(hint, leases).await;
        let crosses = |outcome: &Result<LeaseStatus, _>| {
            outcome.as_ref().is_err_and(server_error::is_across_slots)
        };
        if were_tagged || !outcomes.iter().any(crosses) {
            return outcomes;
        }
        // From now on leases share a command only within a slot.
        self.keyspace.use_tags();
        self.renew_once(hint, leases).await
    }

    /// Sends leases with the same ttl and number of keys together.
    async fn renew_once(
        &self,
        hint: RouteHint,
        leases: &[LeaseRef],
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        let max_locks = match (hint, self.prelude(hint, true)) {
            (RouteHint::Separate | RouteHint::Asking, _) => 1,
            _ if self.may_spread_keys() => 1,
            (RouteHint::Direct, Prelude::Caching) => MAX_TRACKED_LOCKS,
            (RouteHint::Direct, _) => MAX_LOCKS,
        };
        let may_share = |a: usize, b: usize| {
            let (a, b) = (&leases[a], &leases[b]);
            a.kept_for() == b.kept_for()
                && a.keys.len() == b.keys.len()
                && match (a.keys.first(), b.keys.first()) {
                    (Some(a), Some(b)) => self.keyspace.may_share_a_script(a, b),
                    _ => true,
                }
        };
        let most = |first: usize| (max_locks / leases[first].keys.len().max(1)).max(1);
        let calls = shared_calls(leases.len(), most, may_share);
        let command = |at: usize, by, out: &mut CommandWriter<'_>| {
            let chunk = &leases[calls[at].clone()];
            let (ttl, locks) = (chunk[0].kept_for(), chunk[0].keys.len());
            let call = RENEW.call(out, by, locks * chunk.len());
            for key in chunk.iter().flat_map(|lease| lease.keys.iter()) {
                call.arg(key.as_str());
            }
            call.arg(millis(ttl)).arg(locks);
            for lease in chunk {
                call.arg(lease.owner.as_bytes());
            }
        };
        // The script reads the locks, so tracking reports a lock that is deleted or overwritten.
        let answers = self.run(Path::Background, hint, true, calls.len(), &command).await;
        let mut outcomes = Vec::with_capacity(leases.len());
        for (call, answer) in calls.iter().zip(answers) {
            let chunk = &leases[call.clone()];
            match answer {
                Ok(Value::BulkString(digits)) if digits.len() == chunk.len() => {
                    for (lease, digit) in chunk.iter().zip(digits) {
                        outcomes.push(self.renewed(lease, i64::from(digit) - i64::from(b'0')));
                    }
                }
                Ok(Value::Array(parts)) if parts.len() == chunk.len() => {
                    for (lease, part) in chunk.iter().zip(parts) {
                        outcomes.push(match part {
                            Value::Int(outcome) => self.renewed(lease, outcome),
                            Value::BulkString(error) => Err(self
                                .connection
                                .script_failure(&String::from_utf8_lossy(&error))),
                            other => Err(unexpected(&other)),
                        });
                    }
                }
                Ok(other) => outcomes.extend(chunk.iter().map(|_| Err(unexpected(&other)))),
                Err(error) => outcomes.extend(chunk.iter().map(|_| Err(error.clone()))),
            }
        }
        outcomes
    }

    fn renewed(&self, lease: &LeaseRef, outcome: i64) -> Result<LeaseStatus, BackendError> {
        match outcome {
            1 => Ok(LeaseStatus::Held),
            2 => {
                lease.keys.iter().for_each(|key| self.push_handler.contended(key.as_str()));
                Ok(LeaseStatus::Held)
            }
            0 => Ok(LeaseStatus::NotHeld),
            other => Err(unexpected(&Value::Int(other))),
        }
    }
}
