//! One acquire, from the caller's side: a place in line, and the wait for a guard.

pub(crate) mod attempt;
pub(crate) mod first_request;
mod multi_key;
pub(crate) mod run;
mod stepwise;

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::api::guard::LockGuard;
use crate::backend::{AcquireRequest, Owner};
use crate::base::call_site::Subject;
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::base::options::Policy;
use crate::exec::driver::Driver;
use crate::lease::tracker::Errand;
use crate::lock::acquire::first_request::FirstAsk;
use crate::lock::core::Engine;
use crate::queue::permit::Turn;
use crate::queue::wait_queue::{Entered, Newcomer, Waiting, Wish};

/// What one acquire is asked for.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) subject: Subject,
    /// The keys as the caller named them, sorted and distinct.
    pub(crate) keys: Arc<[Key]>,
    /// The keys as the store knows them.
    pub(crate) wire: Arc<[Key]>,
    pub(crate) policy: Policy,
}

impl Ask {
    pub(crate) fn new(engine: &Engine, subject: Subject, keys: Arc<[Key]>, policy: Policy) -> Self {
        let wire = if engine.key_prefix.is_empty() {
            keys.clone()
        } else {
            keys.iter().map(|key| key.prefixed(&engine.key_prefix)).collect()
        };
        Self { subject, keys, wire, policy }
    }

    /// What the store is asked on behalf of `owner`.
    pub(crate) fn claim(&self, owner: Owner) -> AcquireRequest {
        AcquireRequest {
            keys: self.wire.clone(),
            owner,
            ttl: self.policy.ttl.get(),
            min_hold: self.policy.min_hold,
            fencing: self.policy.fencing,
            extra_fences: 0,
            attempt: 0,
            enqueue: self.wire.len() == 1 && self.policy.waits(),
        }
    }
}

/// Acquires all keys of `ask`.
///
/// Dropping the future at any await leaves nothing behind: a place in line is given up, a request that
/// is on its way is awaited by the driver, and what it may have been granted is released.
pub(crate) async fn acquire(engine: Arc<Engine>, ask: Arc<Ask>) -> Result<LockGuard, LockError> {
    let errand = engine.registry.admit().ok_or_else(LockError::shutdown)?;
    let newcomer = Newcomer::new(engine.clock.now(), ask.policy.wait);
    let guard = match &*ask.wire {
        [_] => {
            let (waiting, _errand) = one_key(&engine, ask, newcomer, errand)?;
            waiting.await?
        }
        // Rare, and not to make every future longer.
        _ => Box::pin(several_keys(&engine, ask, newcomer, errand)).await?,
    };
    // The grant may have run out on its way here, while this thread was blocked or the machine slept.
    guard.picked_up()
}

/// Joins the line of the key; who is alone asks the store at once, and takes the errand along.
fn one_key(
    engine: &Arc<Engine>,
    ask: Arc<Ask>,
    newcomer: Newcomer,
    errand: Errand,
) -> Result<(Waiting<LockGuard>, Option<Errand>), LockError> {
    let wire = ask.wire.clone();
    let key = &wire[0];
    let (reply, answer) = oneshot::channel();
    let wish = |(ask, reply)| Wish::Lease { ask, reply };
    let (id, entered) = engine.queue.enter(key, &newcomer, (ask, reply), wish)?;
    let waiting = waiting(engine, key, id, answer);
    let Entered::First((ask, reply)) = entered else {
        return Ok((waiting, Some(errand)));
    };
    let turn = Turn::new(engine, wire.clone());
    let claim = ask.claim(Owner::random()?);
    let Newcomer { now: since, deadline, .. } = newcomer;
    let first = FirstAsk { id, turn, ask, claim, since, deadline, errand, reply };
    engine.outbox.ask(engine, first);
    Ok((waiting, None))
}

/// Has the driver take the turns of all keys, and ask the store.
async fn several_keys(
    engine: &Arc<Engine>,
    ask: Arc<Ask>,
    newcomer: Newcomer,
    errand: Errand,
) -> Result<LockGuard, LockError> {
    let (reply, answer) = oneshot::channel();
    multi_key::start(engine, ask, newcomer, errand, reply)?;
    answer.await.unwrap_or_else(|_| Err(Driver::gone()))
}

fn waiting<T>(
    engine: &Engine,
    key: &Key,
    id: u64,
    answer: oneshot::Receiver<Result<T, LockError>>,
) -> Waiting<T> {
    let (queue, key) = (engine.queue.clone(), key.clone());
    Waiting { queue, key, id, call: Some(answer), gone: Driver::gone }
}
