//! `redis://` and `rediss://`: one Redis or Valkey server, 6.2 or newer.
//!
//! A lock is a plain string key that holds its owner's token and expires: `SET NX PX` to take it, a
//! compare-and-delete to free it. This is the format of redsync, node-redlock, redis-py, rslock
//! and Spring, so that a key can be shared with services in other languages.

mod endpoint;
mod node;
mod reply;
mod script;
mod stream;
#[cfg(feature = "rediss")]
mod tls;

use std::time::Duration;

use redis::{Pipeline, RedisError, Value};

use self::endpoint::Endpoint;
use self::node::Node;
use self::script::{ACQUIRE, By, RELEASE, RENEW, Script};
use self::stream::Dialer;
use super::{Attempt, Backend, BackendError, Claim, Failure, Held, LeaseRef, Release, Released};
use crate::clock::Clock;
use crate::error::LockError;
use crate::fence::Fence;
use crate::key::Key;

/// The one counter that all fences of a database come from, behind the pool's prefix. One counter
/// instead of one per lock keeps the store's memory bounded.
const FENCE_COUNTER: &str = "lock_runtime:fence";

pub(crate) struct Redis {
    node: Node,
    fence_counter: String,
}

impl Redis {
    pub(crate) async fn connect(
        url: &str,
        prefix: &str,
        clock: Clock,
        patience: Duration,
    ) -> Result<Self, LockError> {
        let dialer = Dialer::new(Endpoint::parse(url)?).await?;
        let node = Node::connect(dialer, clock, patience).await.map_err(LockError::backend)?;
        // Whoever may not run scripts could take a lock by plain `SET` and never free it. With no keys the
        // release does nothing.
        node.send(&RELEASE.call(By::Text, &[], None, &[])).await.map_err(LockError::backend)?;
        Ok(Self { node, fence_counter: [prefix, FENCE_COUNTER].concat() })
    }

    /// Calls a script by its hash, and by its text if the server does not know it yet.
    async fn call(
        &self,
        script: &Script,
        keys: &[Key],
        last_key: Option<&str>,
        args: &[&[u8]],
    ) -> Result<Value, BackendError> {
        match self.node.try_send(&script.call(By::Hash, keys, last_key, args)).await? {
            Ok(answer) => Ok(answer),
            Err(error) if reply::is_unknown_script(&error) => {
                self.node.send(&script.call(By::Text, keys, last_key, args)).await
            }
            Err(error) => Err(self.node.failure(error)),
        }
    }

    /// Calls a script for each of `leases`, in one write. The span is the script's second argument.
    async fn call_all(
        &self,
        script: &Script,
        leases: &[(&LeaseRef, Duration)],
    ) -> Vec<Result<Held, BackendError>> {
        let calls = |by: By, leases: &mut dyn Iterator<Item = &(&LeaseRef, Duration)>| {
            let mut calls = Pipeline::with_capacity(leases.size_hint().0);
            for (lease, span) in leases {
                let millis = millis(*span);
                let args = [lease.owner.as_bytes(), millis.as_bytes()];
                calls.add_command(script.call(by, &lease.keys, None, &args));
            }
            calls
        };
        let mut answers = match self.node.send_all(&calls(By::Hash, &mut leases.iter())).await {
            Ok(answers) => answers,
            Err(error) => return leases.iter().map(|_| Err(error.clone())).collect(),
        };
        let unknown = |answer: &Result<Value, RedisError>| matches!(answer, Err(error) if reply::is_unknown_script(error));
        if answers.iter().any(unknown) {
            let mut again = answers
                .iter()
                .zip(leases)
                .filter(|(answer, _)| unknown(answer))
                .map(|(_, lease)| lease);
            match self.node.send_all(&calls(By::Text, &mut again)).await {
                Ok(texts) => {
                    let places = answers.iter_mut().filter(|answer| unknown(answer));
                    for (place, answer) in places.zip(texts) {
                        *place = answer;
                    }
                }
                Err(error) => return leases.iter().map(|_| Err(error.clone())).collect(),
            }
        }
        answers.into_iter().map(|answer| self.held(answer)).collect()
    }

    async fn one_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let ttl = millis(claim.ttl);
        // The usual case in one plain command. It cannot recognise its own earlier try, so it must be
        // the first; and it cannot say when the lock will be free.
        if let ([key], false, 0) = (&*claim.keys, claim.fencing, claim.attempt) {
            let mut set = redis::cmd("SET");
            set.arg(key.as_str()).arg(claim.owner.as_bytes()).arg("NX").arg("PX").arg(&ttl);
            match self.node.send(&set).await? {
                Value::Okay => return Ok(Attempt::granted(None)),
                Value::Nil => {}
                other => return Err(unexpected(&other)),
            }
        }
        let fencing = if claim.fencing { "1" } else { "0" };
        let args = [claim.owner.as_bytes(), ttl.as_bytes(), fencing.as_bytes()];
        let counter = claim.fencing.then_some(self.fence_counter.as_str());
        attempt(&self.call(&ACQUIRE, &claim.keys, counter, &args).await?)
    }

    fn held(&self, answer: Result<Value, RedisError>) -> Result<Held, BackendError> {
        match answer {
            Ok(Value::Int(1)) => Ok(Held::Yes),
            Ok(Value::Int(0)) => Ok(Held::No),
            Ok(other) => Err(unexpected(&other)),
            Err(error) => Err(self.node.failure(error)),
        }
    }
}

impl Backend for Redis {
    async fn acquire(&self, claims: &[Claim]) -> Vec<Result<Attempt, BackendError>> {
        let mut v = Vec::new();
        for c in claims {
            v.push(self.one_acquire(c).await);
        }
        v
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<Held, BackendError>> {
        let leases: Vec<_> = leases.iter().map(|lease| (lease, lease.ttl)).collect();
        self.call_all(&RENEW, &leases).await
    }

    async fn release(&self, releases: &[Release]) -> Vec<Result<Released, BackendError>> {
        let leases: Vec<_> =
            releases.iter().map(|release| (&release.lease, release.keep_for)).collect();
        self.call_all(&RELEASE, &leases)
            .await
            .into_iter()
            .map(|h| h.map(|h| if h == Held::Yes { Released::Yes } else { Released::No }))
            .collect()
    }

    async fn holds(&self, lease: &LeaseRef) -> Result<Held, BackendError> {
        let mut get = redis::cmd("MGET");
        for key in lease.keys.iter() {
            get.arg(key.as_str());
        }
        let Value::Array(holders) = self.node.send(&get).await? else {
            return Ok(Held::No);
        };
        let ours = |holder: &Value| matches!(holder, Value::BulkString(owner) if owner == lease.owner.as_bytes());
        Ok(if holders.iter().all(ours) { Held::Yes } else { Held::No })
    }

    async fn health(&self) -> Result<(), BackendError> {
        self.node.send(&redis::cmd("PING")).await.map(drop)
    }

    async fn close(&self) {
        self.node.close();
    }
}

fn attempt(answer: &Value) -> Result<Attempt, BackendError> {
    let Value::Array(parts) = answer else { return Err(unexpected(answer)) };
    match parts.as_slice() {
        [Value::Int(1), Value::BulkString(fence)] if fence.is_empty() => Ok(Attempt::granted(None)),
        [Value::Int(1), Value::BulkString(fence)] => {
            let number = std::str::from_utf8(fence).ok().and_then(|text| text.parse().ok());
            let fence = Fence::new(number.ok_or_else(|| unexpected(answer))?);
            Ok(Attempt::granted(Some(fence)))
        }
        [Value::Int(0), Value::Int(free_in)] => {
            let free_in = u64::try_from(*free_in).ok().map(Duration::from_millis);
            Ok(Attempt::busy(free_in))
        }
        _ => Err(unexpected(answer)),
    }
}

/// Rounded up: `PEXPIRE` with zero deletes the key.
fn millis(span: Duration) -> String {
    span.as_nanos().div_ceil(1_000_000).to_string()
}

#[cold]
fn unexpected(answer: &Value) -> BackendError {
    BackendError::new(
        Failure::Unknown,
        format!("Redis gave an answer that does not fit: {answer:?}"),
    )
    .remedy("a proxy between here and the server may be rewriting answers")
}
