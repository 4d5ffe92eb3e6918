//! From an error to the problem that a client receives, and the event that keeps the rest.

use crate::api::named_pools;
use crate::base::error::LockError;
use crate::base::problem::Problem;
use crate::exec::events;

/// The problem for `error`, as the pool wants it. An event has the whole text.
pub(super) fn problem(error: &LockError) -> Problem {
    let problem = mapped(error);
    events::answered(error, problem.status);
    problem
}

/// The problem for `error`, as the pool wants it.
pub(super) fn mapped(error: &LockError) -> Problem {
    match error.pool().and_then(named_pools::pool) {
        Some(pool) => pool.core().config.problem.apply(error, Problem::of(error)),
        None => Problem::of(error),
    }
}
