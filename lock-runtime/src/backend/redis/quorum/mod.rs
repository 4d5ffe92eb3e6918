//! `redlock://`: a lock that is held while a majority of independent servers grants it.
//!
//! The algorithm is Redlock (redis.io, "Distributed Locks with Redis"), with fencing tokens from ballot numbers. A
//! node is a server or a cluster. It votes by storing the lock with the token of the requesting owner. All code that
//! runs on a node is in `ballot.lua`.
//!
//! ```text
//! acquire          election     rounds of votes, sent to all nodes at once, decided as soon as a majority is certain
//!                  fence_block  the ballot numbers of a proposal        vote_count  the votes of a round, the decision
//! renew, release   nodes        one request to all nodes, decided by a majority; retries to silent nodes
//!                  grants       what majorities have granted            pending_withdrawals  votes still to be removed
//! one node         node         message  requests and answers           url          addresses of the nodes
//!                  push         change notifications                    pacing       response times
//! connect, health  diagnostics  whether the nodes are fit for a quorum
//! ```
//!
//! Invariants:
//!
//! 1. **A token is for one attempt.** A token is never proposed again once its votes are being withdrawn: a late
//!    withdrawal would remove a vote of a later grant. A token therefore consists of the owner and an attempt number.
//!    A text about the owner's process is a part of that number, so no script knows of it. The store records by owner which
//!    attempt was granted.
//! 2. **Only votes of the current round count.** The validity of a grant starts before the first round is
//!    sent. A node that grants again stores the lock for the whole ttl again.
//! 3. **A node accepts no ballot number that is not above the one it has promised.** It then changes nothing and
//!    returns the promised number, and the next round proposes a greater one. The fencing token is a number that a
//!    majority has accepted. Two majorities share a node, so a later grant has a greater token.
//! 4. **A renewal restores a lock that is missing on a node.** It never takes a lock of another owner, and never
//!    where the node has accepted a greater number that may have been granted. So a node that restarts empty counts
//!    again before a second one fails. A renewal needs a majority of its own, before the validity ends.
//! 5. **A vote that did not lead to a grant is withdrawn from all nodes immediately**, including nodes that have
//!    not answered. Such nodes receive the withdrawal until they confirm it, or until the vote has expired there.
//!    Its number stays promised, so that a late proposal is refused, but it is no longer accepted: failed attempts
//!    do not block renewals.
//! 6. **If failed nodes could have decided the vote, the result is a failure of the store**, not a held lock. Only for a
//!    waiter for one key the lock counts as contended while a majority answers: the other votes belong to a competitor, and
//!    the waiter retries.
//! 7. **A node that answers is slow, not silent**, however many requests wait for it. Load makes votes late, but not
//!    void. A node is silent when it has sent nothing at all for longer than it usually takes. Its vote then counts
//!    as failed if another vote may be for a competing proposal. Otherwise nothing competes: the granted votes are
//!    kept, and the missing ones are awaited, up to half of the ttl. The pool holds back requests that the nodes have
//!    no time for (`admission`).
//! 8. **Two proposals that compete for a free lock** may each receive part of the votes. Both are withdrawn and
//!    retried after a random time. A waiter for a held lock is woken when a majority of the nodes reports a change.
//!
//! A node that has lost its data must stay away for the longest ttl before it votes again. `docs/guarantees.md` says
//! what holds when it does not. Fencing tokens need synchronised clocks only for such a node. Numbers are proposed
//! from the machine's clock, so that numbers after the loss are above numbers before it.

mod diagnostics;
mod election;
mod fence_block;
mod grants;
mod inspect;
mod list;
mod message;
mod node;
mod nodes;
mod pacing;
mod pending_withdrawals;
mod push;
mod url;
mod vote_count;

use std::sync::Arc;
use std::time::Duration;

use self::diagnostics::NodeReport;
use self::election::Election;
use self::fence_block::FenceBlock;
use self::grants::{MajorityGrant, acquired};
use self::message::BallotOperation;
use self::nodes::Nodes;
use self::pending_withdrawals::Withdrawal;
use crate::backend::redis::cluster::fan_out::{BoxedCall, fan_out};
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendConfig, BackendError, Capabilities,
    FailureKind, Finding, Inspection, KeyList, KeyPattern, LeaseRef, LeaseStatus, Notifier,
    ReleaseOutcome, ReleaseRequest, TIME_PER_REQUEST, Warning,
};
use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::exec::events;

pub(crate) struct Quorum(Arc<Nodes>);

impl Quorum {
    pub(crate) async fn connect(url: &str, config: BackendConfig<'_>) -> Result<Self, LockError> {
        let quorum = Self(Arc::new(Nodes::connect(url::parse(url)?, config).await?));
        let reports = quorum.reports().await;
        if let Some(dependent) = diagnostics::dependent(&reports) {
            return Err(dependent.into_error());
        }
        let of_connections = quorum.0.connection_warnings();
        for warning in diagnostics::warnings(&reports).into_iter().chain(of_connections) {
            events::backend_warning("the quorum", &warning);
        }
        Ok(quorum)
    }

    async fn reports(&self) -> Vec<NodeReport> {
        let request_timeout = self.0.request_timeout * 3 / 4;
        let report = |node| -> BoxedCall<'_, _> { Box::pin(NodeReport::of(node, request_timeout)) };
        let reports = self.0.iter().map(report).collect();
        fan_out(reports, None).await.into_iter().flatten().collect()
    }

    /// The reports, unless a majority of the nodes fails. Beside them the warnings of `compare`, about connections, and about
    /// nodes that fail.
    async fn checked_reports(
        &self,
        compare: fn(&[NodeReport]) -> Vec<Warning>,
    ) -> Result<(Vec<NodeReport>, Vec<Warning>), BackendError> {
        let reports = self.reports().await;
        let failures: Vec<_> = reports.iter().filter_map(|one| one.failure.as_ref()).collect();
        self.0.check_majority(&failures)?;
        let mut warnings = compare(&reports);
        warnings.extend(self.0.connection_warnings());
        // A node that was not reachable when the pool connected is checked here for the first time.
        let dependent = diagnostics::dependent(&reports);
        warnings.extend(dependent.map(|some| Warning::new(some.cause(), some.remedy())));
        warnings.extend(failures.into_iter().map(silent_node));
        Ok((reports, warnings))
    }
}

impl Backend for Quorum {
    fn subscribe(&self, notifier: Notifier) {
        self.0.changes.subscribe(notifier);
    }

    async fn acquire(
        &self,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let (granted, mut others): (Vec<_>, Vec<_>) =
            (0..claims.len()).partition(|at| self.is_granted(&claims[*at]));
        let mut results: Vec<Option<_>> = claims.iter().map(|_| None).collect();
        for (at, again) in granted.iter().zip(self.grant_again(claims, &granted).await) {
            match again {
                Some(result) => results[*at] = Some(result),
                None => others.push(*at),
            }
        }
        others.sort_unstable();
        for at in &others {
            self.0.withdraw_grant(&claims[*at]);
        }
        if !others.is_empty() {
            let elected: Vec<_> = others.iter().map(|at| &claims[*at]).collect();
            let elected = Election::open(&self.0, &elected).run().await;
            for (at, result) in others.into_iter().zip(elected) {
                results[at] = Some(result);
            }
            self.keep_for_min_hold(claims, &mut results).await;
        }
        let none = || Err(BackendError::new(FailureKind::NotApplied, "no answer was counted"));
        results.into_iter().map(|result| result.unwrap_or_else(none)).collect()
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        let shortest = leases.iter().map(|lease| lease.ttl).min().unwrap_or_default();
        let count = u32::try_from(leases.len()).unwrap_or(u32::MAX);
        let for_one = self.0.request_timeout * 3 / 4;
        let for_all = for_one.saturating_add(TIME_PER_REQUEST.saturating_mul(count));
        let until = self.0.clock.now() + for_all.min(shortest / 4);
        let in_turn = leases.len().div_ceil(MAX_EXTENSIONS).max(MAX_LEASES);
        let turns = u32::try_from(in_turn.div_ceil(MAX_LEASES)).unwrap_or(u32::MAX);
        // If one lease is not decided in time, the caller gives up the whole batch. So the other leases have less time once
        // one is decided.
        let others = shortest / 8 / turns;
        let extend = |leases| -> BoxedCall<'_, Vec<_>> {
            Box::pin(self.extend_in_turn(leases, until, for_one, others))
        };
        fan_out(leases.chunks(in_turn).map(extend).collect(), None)
            .await
            .into_iter()
            .flatten()
            .flatten()
            .collect()
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let nodes = &self.0;
        let now = nodes.clock.now();
        let mut withdrawals = Vec::with_capacity(releases.len());
        for ReleaseRequest { lease, free_after, forced, .. } in releases {
            let (mut grant, mut operation) = (nodes.grants.of(lease), BallotOperation::Release);
            // The grant of another process, even when its release by force is repeated.
            let is_own =
                nodes.grants.get(&lease.owner).is_some_and(|it| it.releasing_until.is_none());
            if let Some(holder) = forced.as_ref().filter(|_| !is_own) {
                grant.block = holder.fence.map(FenceBlock::from_another_process);
                if grant.block.is_none() {
                    // A renewal would restore a lock that is missing, unless a ballot number says that it was released.
                    operation = BallotOperation::ReleaseAtExpiry;
                }
            }
            let request = nodes.request(operation, lease, &grant);
            let keep_until = (!free_after.is_zero()).then(|| now + *free_after);
            // Only the first release of a grant is retried.
            let until = if grant.releasing_until.is_none() { now + lease.kept_for() } else { now };
            let releasing =
                MajorityGrant { releasing_until: Some(now + lease.kept_for()), ..grant };
            nodes.grants.insert(lease.owner, releasing, now);
            withdrawals.push(Withdrawal { request, keep_until, until });
        }
        let requests: Vec<_> = withdrawals.iter().map(|one| one.request.clone()).collect();
        // The request to a node that answers nothing fails earlier.
        let until = now + nodes.request_timeout.saturating_mul(3);
        let replies = nodes.withdraw(withdrawals);
        let outcomes = nodes.decide(replies, &requests, until, until).await;
        let outcome = |(release, outcome): (&ReleaseRequest, Result<bool, BackendError>)| {
            // After an error the release is repeated.
            if outcome.is_ok() {
                nodes.grants.remove(&release.lease.owner);
            }
            match outcome {
                Ok(true) => Ok(ReleaseOutcome::Freed),
                Ok(false) => Ok(ReleaseOutcome::NotHeld),
                // Some nodes may have applied it.
                Err(error) => Err(error.after_a_part()),
            }
        };
        releases.iter().zip(outcomes).map(outcome).collect()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            paced: true,
            renewal_restores: true,
            applied_in_parts: true,
            ..Capabilities::default()
        }
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let limit = self.0.request_timeout * 3 / 4;
        let leases = std::slice::from_ref(lease);
        let outcomes = self.0.lease_status(leases, BallotOperation::Read, limit, limit).await;
        outcomes.into_iter().next().unwrap_or(Ok(LeaseStatus::NotHeld))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, BackendError> {
        self.0.inspect(key).await.map(Some)
    }

    async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<Option<KeyList>, BackendError> {
        self.0.list(pattern, limit).await.map(Some)
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        let (_, warnings) = self.checked_reports(diagnostics::warnings).await?;
        Ok(warnings)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let (reports, warnings) = self.checked_reports(diagnostics::between).await?;
        let mut findings: Vec<_> = reports.iter().flat_map(NodeReport::findings).collect();
        findings.extend(warnings.iter().map(|warning| Finding::warning("quorum", warning)));
        if warnings.is_empty() {
            let text = format!("{} nodes, independent of each other", reports.len());
            findings.push(Finding::good("quorum", text));
        }
        Ok(findings)
    }

    async fn close(&self) {
        self.0.close().await;
    }
}

#[cold]
fn not_sent_in_time() -> BackendError {
    BackendError::new(
        FailureKind::NotApplied,
        "the nodes have not answered earlier renewals in time",
    )
}

fn silent_node(error: &BackendError) -> Warning {
    Warning::new(
        error.to_string(),
        "the quorum still stands without the node, but fewer other nodes may fail now",
    )
}

/// Leases in one request, of which a node answers all at the same time. With very many it would have answered nothing for as
/// long as all of them take.
const MAX_LEASES: usize = 256;

/// Requests of a renewal that are in flight at the same time. With all of them nothing else would be served.
const MAX_EXTENSIONS: usize = 16;

/// Requests of owners that already have a grant.
impl Quorum {
    /// Extends `leases` by one request after the other, each within `limit`, or `others_limit` once one of its leases is
    /// decided. What has not been sent by `until` fails.
    async fn extend_in_turn(
        &self,
        leases: &[LeaseRef],
        until: Instant,
        limit: Duration,
        others_limit: Duration,
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        let mut outcomes = Vec::with_capacity(leases.len());
        for leases in leases.chunks(MAX_LEASES) {
            let left = until.since(self.0.clock.now());
            if left.is_zero() {
                outcomes.extend(leases.iter().map(|_| Err(not_sent_in_time())));
                continue;
            }
            let (extend, limit) = (BallotOperation::Extend, left.min(limit));
            outcomes.extend(self.0.lease_status(leases, extend, limit, others_limit).await);
        }
        outcomes
    }

    /// Whether the request can be answered by an earlier grant of its owner.
    fn is_granted(&self, claim: &AcquireRequest) -> bool {
        let Some(grant) = self.0.grants.get(&claim.owner) else { return false };
        let fits = !claim.fencing || grant.block.is_some();
        fits && grant.releasing_until.is_none()
    }

    /// Confirms earlier grants by a renewal. `None` if the grant is over.
    async fn grant_again(
        &self,
        claims: &[AcquireRequest],
        indices: &[usize],
    ) -> Vec<Option<Result<AcquireOutcome, BackendError>>> {
        if indices.is_empty() {
            return Vec::new();
        }
        let lease = |at: &usize| {
            let claim = &claims[*at];
            // Never shortens the lease: this may be a late request with a shorter ttl.
            let known = self.0.grants.get(&claim.owner).map_or(claim.ttl, |grant| grant.ttl);
            let min_hold = claim.min_hold.max(known);
            LeaseRef { keys: claim.keys.clone(), owner: claim.owner, ttl: claim.ttl, min_hold }
        };
        let leases: Vec<_> = indices.iter().map(lease).collect();
        let outcomes = self.renew(&leases).await;
        let confirmed =
            |(lease, outcome): (&LeaseRef, Result<LeaseStatus, BackendError>)| match outcome {
                Ok(LeaseStatus::Held) => {
                    let block = self.0.grants.get(&lease.owner).and_then(|grant| grant.block);
                    Some(Ok(acquired(block)))
                }
                Ok(LeaseStatus::NotHeld) => None,
                Err(error) => Some(Err(error)),
            };
        leases.iter().zip(outcomes).map(confirmed).collect()
    }

    /// Extends new grants to the `min_hold` of their requests, if that is longer than the ttl. Votes are
    /// for the ttl only, so that a vote without a grant that cannot be withdrawn does not last longer.
    async fn keep_for_min_hold(
        &self,
        claims: &[AcquireRequest],
        results: &mut [Option<Result<AcquireOutcome, BackendError>>],
    ) {
        let is_short = |at: &usize| {
            let is_granted = matches!(results[*at], Some(Ok(AcquireOutcome::Acquired { .. })));
            let known = self.0.grants.get(&claims[*at].owner);
            is_granted && known.is_some_and(|known| known.ttl < claims[*at].min_hold)
        };
        let short: Vec<_> = (0..claims.len()).filter(is_short).collect();
        for (at, kept) in short.iter().zip(self.grant_again(claims, &short).await) {
            let owner = claims[*at].owner;
            match kept {
                Some(Ok(_)) => {
                    if let Some(known) = self.0.grants.get(&owner) {
                        let kept = MajorityGrant { ttl: claims[*at].kept_for(), ..known };
                        self.0.grants.insert(owner, kept, self.0.clock.now());
                    }
                }
                Some(Err(error)) => results[*at] = Some(Err(error.after_a_part())),
                None => {
                    let text =
                        "a majority no longer held the lock when its `min_hold` was to be set";
                    results[*at] = Some(Err(BackendError::new(FailureKind::MaybeApplied, text)));
                }
            }
        }
    }
}
