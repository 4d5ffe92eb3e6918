//! Conversions between Redis values and lock types.

use std::time::Duration;

use redis::Value;

use crate::backend::redis::net::command::CommandWriter;
use crate::backend::redis::protocol::wait_queue::is_of;
use crate::backend::{BackendError, FailureKind, LeaseStatus, Owner, WaitMode};
use crate::base::fence::Fence;
use crate::base::jitter;
use crate::base::key::Key;

/// Redis rounds an expiry to a millisecond.
pub(crate) const ROUNDING: Duration = Duration::from_millis(1);

/// Rounds up: `PEXPIRE` with zero deletes the key.
pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// `None` if the value is negative: the remaining time is unknown, or the key does not expire.
pub(crate) fn duration(millis: i64) -> Option<Duration> {
    u64::try_from(millis).ok().map(Duration::from_millis)
}

/// The fence in a reply, which has 0 if there is no fence.
pub(crate) fn minted(number: i64) -> Option<Fence> {
    if number > 0 { Fence::try_from(number).ok() } else { None }
}

/// Reads the values of `keys`. A key of another type has no value in the reply.
pub(crate) fn read_holders(keys: &[Key], out: &mut CommandWriter<'_>) {
    out.arg("MGET");
    for key in keys {
        out.arg(key.as_str());
    }
}

/// `Held` if every value in the reply to [`read_holders`] is a token of `owner`.
pub(crate) fn lease_status(owner: &Owner, reply: &Value) -> LeaseStatus {
    let is_owned =
        |value: &Value| matches!(value, Value::BulkString(holder) if is_of(holder, owner));
    LeaseStatus::of(matches!(reply, Value::Array(values) if values.iter().all(is_owned)))
}

/// Waits for a push. Rechecks when the lease expires, and after at most 800 ms in case a push is lost.
pub(super) fn watch(expires_in: Option<Duration>) -> WaitMode {
    let recheck = jitter::below(Duration::from_millis(800));
    let retry_after = expires_in.map_or(recheck, |expires_in| recheck.min(expires_in + ROUNDING));
    WaitMode::Watch { retry_after }
}

#[cold]
pub(crate) fn unexpected(reply: &Value) -> BackendError {
    BackendError::new(
        FailureKind::MaybeApplied,
        format!("Redis sent an unexpected reply: {reply:?}"),
    )
    .remedy("check that no proxy between this process and the server rewrites replies")
}
