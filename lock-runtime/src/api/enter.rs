//! From a call to a body that may run: checks the call, passes a reentrant one through, acquires the lock.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use crate::api::call_keys::CallKeys;
use crate::api::call_record::{self, PendingCall};
use crate::api::entered::Entered;
use crate::api::guard::LockGuard;
use crate::api::lock_order;
use crate::api::reentrancy;
use crate::base::call_site::{CallOptions, LockLabel};
use crate::base::error::{ErrorKind, LockError};
use crate::base::key::Key;
use crate::base::lock_spec::LockSpec;
use crate::base::options::LockOptions;
use crate::base::policy::Policy;
use crate::lease::held_lease::HeldLease;
use crate::lock::acquire::{PendingAcquire, acquire};
use crate::lock::core::PoolCore;

/// One call for a lock. Owns everything, borrows no argument.
#[derive(Debug)]
pub(crate) struct LockCall {
    pub(crate) core: Arc<PoolCore>,
    pub(crate) label: LockLabel,
    pub(crate) keys: Result<CallKeys, LockError>,
    /// Whether the caller sees the guard, and so its fence.
    pub(crate) shows_guard: bool,
}

/// Starts the acquire of `call`.
pub(crate) fn enter(call: LockCall, options: CallOptions<'_>) -> Entering {
    start(call, options).unwrap_or_else(Entering::refused)
}

fn start(call: LockCall, options: CallOptions<'_>) -> Result<Entering, LockError> {
    let LockCall { core, label, keys, shows_guard } = call;
    let refuse = |error| call_record::refused(&core, &label, error);
    if core.is_inherited() {
        return Err(refuse(LockError::inherited()));
    }
    let prefix = &core.config.key_prefix;
    let keys = keys.and_then(|keys| keys.sorted(prefix)).map_err(refuse)?;
    let refuse = |error: LockError| refuse(error.of_keys(&keys));
    keys.iter().try_for_each(|key| key.check_reserved_text(prefix)).map_err(refuse)?;
    let policy = options.policy(&core.policies).map_err(refuse)?;
    options.check_key_count(keys.len()).map_err(refuse)?;
    if let Some(holder) = reentrancy::find_held(&core, &keys) {
        check_pass(&holder, &keys, &policy, shows_guard).map_err(refuse)?;
        let span = call_record::passed(&core, &label, holder.lease());
        return Ok(Entering::entered(Entered::nested(holder, policy.on_lost, span)));
    }
    lock_order::check(&core, &label, &keys, &policy);
    let spec = LockSpec::new(label, keys, policy, prefix);
    let pending = PendingCall::begin(core, spec);
    match acquire(&pending.core, pending.spec.clone()) {
        Ok(acquiring) => Ok(Entering(EnterState::Acquiring { acquiring, pending })),
        Err(error) => Err(pending.failed(error)),
    }
}

/// A call on the way to its body. Resolves to the permission to run it.
///
/// Dropping it leaves nothing behind.
///
/// # Errors
/// Every kind but `Released`; the body has not run.
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct Entering(EnterState);

#[derive(Debug)]
enum EnterState {
    /// Nothing has happened before the first poll.
    NotStarted(Option<Box<(LockCall, LockOptions)>>),
    /// `None` once it has been received.
    Decided(Option<Result<Entered, LockError>>),
    Acquiring {
        acquiring: PendingAcquire,
        /// It learns of the end of the acquire.
        pending: PendingCall,
    },
}

impl Entering {
    /// A call that starts when it is polled.
    pub(crate) fn lazy(call: LockCall, options: LockOptions) -> Self {
        Self(EnterState::NotStarted(Some(Box::new((call, options)))))
    }

    /// A call that may run its body.
    pub fn entered(entered: Entered) -> Self {
        Self(EnterState::Decided(Some(Ok(entered))))
    }

    /// A call that may not run its body.
    pub fn refused(error: LockError) -> Self {
        Self(EnterState::Decided(Some(Err(error))))
    }
}

impl Future for Entering {
    type Output = Result<Entered, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let EnterState::NotStarted(call) = &mut self.0
            && let Some((call, options)) = call.take().map(|call| *call)
        {
            *self = enter(call, CallOptions::Given(&options));
        }
        match &mut self.0 {
            // Only after a panic in the start.
            EnterState::NotStarted(_) => Poll::Pending,
            EnterState::Decided(entered) => entered.take().map_or(Poll::Pending, Poll::Ready),
            EnterState::Acquiring { acquiring, .. } => {
                let lease = ready!(Pin::new(acquiring).poll(cx));
                match std::mem::replace(&mut self.0, EnterState::Decided(None)) {
                    EnterState::Acquiring { pending, .. } => Poll::Ready(conclude(pending, lease)),
                    EnterState::NotStarted(_) | EnterState::Decided(_) => Poll::Pending,
                }
            }
        }
    }
}

/// The result of an acquire, for its caller.
#[inline]
fn conclude(
    pending: PendingCall,
    lease: Result<HeldLease, LockError>,
) -> Result<Entered, LockError> {
    let lease = match lease {
        Ok(lease) => lease,
        Err(error) => return Err(pending.failed(error)),
    };
    match LockGuard::pick_up(pending.core.clone(), lease) {
        Ok(mut guard) => {
            guard.set_span(pending.granted(guard.lease()));
            Ok(Entered::locked(guard))
        }
        Err(error) => Err(pending.unclaimed(error)),
    }
}

/// Whether a call passes through a lock that its task holds.
fn check_pass(
    holder: &LockGuard,
    keys: &[Key],
    policy: &Policy,
    shows_guard: bool,
) -> Result<(), LockError> {
    if !holder.is_held() {
        return Err(holder.end_error());
    }
    if !policy.reentrant {
        return Err(not_reentrant());
    }
    if !keys.iter().all(|key| holder.keys().contains(key)) {
        return Err(not_all_held());
    }
    if shows_guard && policy.fencing && !holder.lease().spec.policy.fencing {
        return Err(unfenced());
    }
    Ok(())
}

/// Without the keys, which [`LockError::keys`] has: events show the text.
const HOLDS_KEY: &str = "this task already holds a lock of the same key, and would wait for itself";

#[cold]
fn not_reentrant() -> LockError {
    LockError::new(ErrorKind::WouldDeadlock, HOLDS_KEY).remedy("call the inner function outside the locked one, or write `reentrant = true` on it to let it pass")
}

#[cold]
fn not_all_held() -> LockError {
    LockError::new(ErrorKind::WouldDeadlock, HOLDS_KEY).remedy("a `reentrant` call passes only through one lock that has all of its keys: lock all of them in the outer call (`keys = [..]`)")
}

#[cold]
fn unfenced() -> LockError {
    LockError::new(
        ErrorKind::Config,
        "the call needs a guard with a fence, and the lock around it was acquired without one",
    )
    .remedy("write `guard = lock` on the outer function, or `.fencing(true)` on the outer request; a request that needs no fence says `.fencing(false)`")
}
