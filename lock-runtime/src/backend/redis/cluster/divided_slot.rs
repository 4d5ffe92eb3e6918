//! Releases, renewals and checks while a slot moves, key by key.
//!
//! While a slot moves, a command is refused if its keys are not all at one server. These may be the locks of one lease, or a lock and its
//! wait queue, even one that does not exist. A command with one key is always served: by the server that the slot leaves, or
//! after a redirection by the other one. Redis before 7.0 redirects several keys if only one of them is missing. So a command must
//! not lose keys by a redirection: the other server would find those missing that have not moved yet.
//!
//! Wait queues are left alone. A waiter finds the free lock when it looks again. The position of an owner that stops to wait stays
//! until the queue expires, or is passed over.

use crate::backend::redis::cluster::fan_out::BoxedCall;
use crate::backend::redis::cluster::router::{CallBegin, IfDivided, Router};
use crate::backend::redis::protocol::free::LockToFree;
use crate::backend::redis::protocol::scripted_server::{RouteHint, ScriptedServer};
use crate::backend::redis::server_error;
use crate::backend::{
    BackendError, FailureKind, LeaseRef, LeaseStatus, ReleaseOutcome, ReleaseRequest,
};

impl Router {
    /// Releases locks. In a divided slot a successor is not queued.
    pub(super) async fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let routed = self.route(
            requests,
            IfDivided::Fail,
            |request| &request.lease.keys,
            |server, hint, requests| Box::pin(server.release(hint, requests)),
        );
        let mut outcomes = routed.await;
        let divided = divided(&outcomes);
        let locks = divided.iter().flat_map(|at| {
            let ReleaseRequest { lease, free_after, .. } = &requests[*at];
            let (owner, free_after) = (lease.owner, *free_after);
            lease.keys.iter().map(move |key| LockToFree { key: key.clone(), owner, free_after })
        });
        let locks: Vec<_> = locks.collect();
        if locks.is_empty() {
            return outcomes;
        }
        let freed = self.route_from(
            key_by_key(divided.len() < requests.len()),
            &locks,
            IfDivided::Fail,
            |lock| std::slice::from_ref(&lock.key),
            |server, hint, locks| Box::pin(server.free(hint, locks)),
        );
        let mut freed = freed.await.into_iter();
        for at in divided {
            let outcome = &mut outcomes[at];
            match (of_all(freed.by_ref().take(requests[at].lease.keys.len())), &*outcome) {
                // The script was ended after a part of its work, such as the hand-off to a waiter.
                (Ok(false), Err(error)) if error.kind() == FailureKind::MaybeApplied => {}
                (Ok(false), _) => *outcome = Ok(ReleaseOutcome::NotHeld),
                (Ok(true), _) => *outcome = Ok(ReleaseOutcome::Freed),
                (Err(error), Err(of_script)) if of_script.kind() == FailureKind::MaybeApplied => {
                    *outcome = Err(error.after_a_part());
                }
                (Err(error), _) => *outcome = Err(error),
            }
        }
        outcomes
    }

    /// Sends each of `leases` by `send`: renews them, or asks whether they are held.
    pub(super) async fn route_leases(
        &self,
        leases: &[LeaseRef],
        send: impl for<'a> Fn(
            &'a ScriptedServer,
            RouteHint,
            &'a [LeaseRef],
        ) -> BoxedCall<'a, Vec<Result<LeaseStatus, BackendError>>>
        + Sync,
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        let route = |begin, leases| {
            let if_divided = IfDivided::SendSeparately;
            self.route_from(begin, leases, if_divided, |lease| &lease.keys, &send)
        };
        let mut outcomes = route(CallBegin::FIRST, leases).await;
        let mut divided = divided(&outcomes);
        divided.retain(|at| leases[*at].keys.len() > 1);
        let parts = divided.iter().flat_map(|at| {
            let lease = &leases[*at];
            lease.keys.iter().map(|key| LeaseRef { keys: [key.clone()].into(), ..lease.clone() })
        });
        let parts: Vec<_> = parts.collect();
        if parts.is_empty() {
            return outcomes;
        }
        let mut statuses =
            route(key_by_key(divided.len() < leases.len()), &parts).await.into_iter();
        for at in divided {
            let of_keys = statuses.by_ref().take(leases[at].keys.len());
            let is_held = of_all(of_keys.map(|status| Ok(status? == LeaseStatus::Held)));
            outcomes[at] = is_held
                .map(|is_held| if is_held { LeaseStatus::Held } else { LeaseStatus::NotHeld });
        }
        outcomes
    }
}

/// For commands with one key each, which need no further try before they follow a redirection.
fn key_by_key(answers_wait: bool) -> CallBegin {
    CallBegin { hint: RouteHint::Separate, answers_wait }
}

/// The places of the requests that were refused because a slot is divided.
fn divided<T>(outcomes: &[Result<T, BackendError>]) -> Vec<usize> {
    let is_divided = |at: &usize| outcomes[*at].as_ref().is_err_and(server_error::is_divided);
    (0..outcomes.len()).filter(is_divided).collect()
}

/// Whether all keys of a request were held, from the answer for each. An error is ambiguous once a part has been applied, or may
/// have been.
fn of_all(keys: impl Iterator<Item = Result<bool, BackendError>>) -> Result<bool, BackendError> {
    let (mut all, mut in_part, mut failure) = (true, false, None);
    for key in keys {
        match key {
            Ok(is_held) => (all, in_part) = (all && is_held, in_part || is_held),
            Err(error) => {
                in_part |= error.kind() == FailureKind::MaybeApplied;
                failure = Some(error);
            }
        }
    }
    match failure {
        Some(error) if in_part => Err(error.after_a_part()),
        Some(error) => Err(error),
        None => Ok(all),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(kind: FailureKind) -> Result<bool, BackendError> {
        Err(BackendError::new(kind, "planned"))
    }

    #[test]
    fn a_request_is_held_if_all_of_its_keys_are() {
        assert!(of_all([Ok(true), Ok(true)].into_iter()).unwrap());
        assert!(!of_all([Ok(true), Ok(false)].into_iter()).unwrap());
        assert!(!of_all([Ok(false), Ok(true)].into_iter()).unwrap());
    }

    #[test]
    fn a_failure_beside_a_key_that_was_held_is_ambiguous() {
        let kind_beside = |other| {
            let answers = [failed(FailureKind::NotApplied), Ok(other)];
            let backwards = answers.clone().into_iter().rev();
            let kinds = [of_all(answers.into_iter()), of_all(backwards)];
            kinds.map(|result| result.unwrap_err().kind())
        };
        assert_eq!(kind_beside(true), [FailureKind::MaybeApplied; 2]);
        assert_eq!(kind_beside(false), [FailureKind::NotApplied; 2]);
    }

    #[test]
    fn an_ambiguous_failure_of_one_key_stays_ambiguous_beside_any_other() {
        let answers = [failed(FailureKind::MaybeApplied), failed(FailureKind::NotApplied)];
        let backwards = answers.clone().into_iter().rev();
        for answer in [of_all(answers.into_iter()), of_all(backwards)] {
            assert_eq!(answer.unwrap_err().kind(), FailureKind::MaybeApplied);
        }
    }
}
