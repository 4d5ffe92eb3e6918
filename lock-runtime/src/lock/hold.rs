//! Hands a lock from one task of this process to the next, without asking the store.
//!
//! What the process has at the store stays as it is; only its holder changes, with a fence of its own. It goes
//! on for as long as nobody else wants the lock, and for the pool's slice if somebody may.

use std::sync::Arc;

use crate::exec::events;
use crate::lease::lease::Lease;
use crate::lock::core::Engine;
use crate::queue::wait_queue::Wish;

/// Gives the lock of `lease` to the next in line. False if it has to be released: nobody is in line, the
/// slice is over, or what is left of the lease would not do for the next.
pub(crate) fn hand_on(engine: &Arc<Engine>, lease: &Arc<Lease>) -> bool {
    let [key] = &*lease.ask.wire else { return false };
    let slice = engine.local_handoff_limit;
    if slice.is_zero() || !engine.registry.is_open() {
        return false;
    }
    let now = engine.clock.now();
    if engine.barging_window.is_some_and(|window| engine.queue.is_stuffy(key, window.every, now)) {
        return false;
    }
    let next = engine.queue.hand_on(key, |ask, wanted| {
        let held_for = now.since(lease.tenure_since);
        if wanted && held_for >= slice { None } else { lease.pass_on(ask) }
    });
    let Some((waiter, (tenure, listeners))) = next else { return false };
    engine.watchdog.forget(lease);
    events::passed_on(lease);
    // Dropped in this instant, the next in line releases in turn, or hands on.
    if let Wish::Lease { ask, reply } = waiter.wish {
        let guard = Lease::grant(engine, ask, tenure, waiter.since, None);
        // Not before: a shutdown that looks in between must not find nothing held.
        engine.registry.forget(lease);
        guard.deliver(reply);
    }
    listeners.wake();
    true
}
