//! `redlock://`: a lock that a majority of independent servers agree on.
//!
//! Redlock (redis.io, "Distributed Locks with Redis") with fences by ballot. Each node, a server of its
//! own or a cluster, votes by taking the lock for the asking owner's token; `ballot.lua` is a node's whole part.
//!
//! ```text
//! acquire   election   rounds of votes: to all nodes at once, decided as soon as a majority is certain
//!             numbers  what is proposed as fence        tally  the votes, and what they come to
//! renew, release       one request to all nodes, decided by a majority; a silent node is asked on
//!             holdings what majorities have granted     leftovers  what is still to be taken back
//! member    one node   request  what it is asked        nodes  the URL      survey  are they fit?
//!             changes  what nodes say by themselves     pace   how fast they answer
//! ```
//!
//! What it keeps to:
//!
//! 1. **A token is for one attempt.** A token whose votes are being taken back is never proposed again: a late
//!    withdrawal would take the vote away from under a later grant. So a token is the owner and the number of
//!    the attempt, and the store knows by the owner which one was granted.
//! 2. **Only the votes of the present round count**, and a grant is believed from before the first round was
//!    sent. A node that grants again keeps the lock for the whole ttl again.
//! 3. **A proposal that is not above what a node has promised changes nothing there.** It answers with that number,
//!    and the next round proposes one above. The fence is a number that a majority has accepted: two majorities
//!    share a node, so the later grant has the greater number.
//! 4. **A renewal takes a lock that is missing on a node, but never one that is somebody else's, nor where the
//!    node has accepted a greater number that may have been granted.** So a node that comes back empty counts again
//!    before a second one fails. A renewal counts only by a majority of its own, before belief ends.
//! 5. **What was not granted is withdrawn everywhere at once**, also at nodes that have not answered; those are
//!    asked until they do, or until they have forgotten it by themselves. Its number stays promised, so that no
//!    late proposal is taken, but it is accepted no more: those who ask in vain keep no renewal away.
//! 6. **A vote that failed nodes could decide is a failure of the store**, not a lock that somebody holds.
//! 7. **A node that answers is slow, not silent**, however many requests wait for it; so more load makes votes late, and
//!    not void. A node is silent when nothing at all has come from it for longer than it usually takes. Its vote then
//!    counts as failed where other votes are not for this claim. Otherwise nothing competes with it: what was granted
//!    is kept, and the missing votes are waited for, up to half of the ttl. The pool keeps claims back that the
//!    nodes have no time for (`admission`).
//! 8. **Two that compete for a free lock** may each get part of the votes. Both give back and try again after
//!    a random time. Who waits for a held lock is woken when a majority of the nodes tells of a change.
//!
//! A node that has lost its data has to stay away for the longest ttl before it votes again; README says what
//! holds when it does not. Fences need no clocks that agree, but for such a node: numbers are
//! proposed from the machine's clock so that those after the loss are above those before.

mod diagnostics;
mod election;
mod fence_block;
mod grants;
mod message;
mod node;
mod pacing;
mod pending_withdrawals;
mod push;
mod url;
mod vote_count;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use redis::Value;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;
use tokio::time::timeout;

use self::diagnostics::Told;
use self::election::Election;
use self::fence_block::Block;
use self::grants::{Holding, Holdings};
use self::message::{Request, Token, What};
use self::node::Member;
use self::pacing::Pace;
use self::pending_withdrawals::{Leftovers, Withdrawal};
use self::push::Changes;
use self::vote_count::{Tally, Verdict, Vote};
use crate::backend::BackendConfig;
use crate::backend::redis::routing::cluster::{Boxed, together};
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, FailureKind, LeaseRef,
    LeaseStatus, Notifier, Owner, ReleaseOutcome, ReleaseRequest, Warning,
};
use crate::base::clock::{Clock, Instant};
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::exec::driver::poll_then_spawn;
use crate::exec::events;

pub(crate) struct Quorum(Arc<Nodes>);

/// The nodes, and what this pool has there.
struct Nodes {
    members: Vec<Arc<Member>>,
    clock: Clock,
    /// How long a node may be silent before it is given up.
    request_timeout: Duration,
    /// How long a node may answer nothing before it counts as silent, if not by what it usually takes.
    node_timeout: Option<Duration>,
    /// By node.
    leftovers: Vec<Leftovers>,
    attempts: AtomicU32,
    changes: Arc<Changes>,
    holdings: Holdings,
    is_closed: AtomicBool,
    /// Withdrawals on their way for the first time.
    withdrawing: watch::Sender<usize>,
    /// Where what outlives a call runs.
    runtime: Handle,
}

/// How a node is asked.
struct Asked<'a> {
    /// Whether it is to tell of changes of the locks that it reads.
    is_tracked: bool,
    pace: &'a Pace,
}

/// What is heard of the node at a place.
struct Answer {
    place: usize,
    said: Said,
}

enum Said {
    /// Answers to some of the requests, each with its request's place.
    Answered(Vec<(usize, Result<Value, BackendError>)>),
    /// Nothing yet, to the requests at these places. The answers may still come.
    Nothing(Vec<usize>),
}

/// In the order in which they come.
type Answers = UnboundedReceiver<Answer>;

impl Quorum {
    pub(crate) async fn connect(url: &str, config: BackendConfig<'_>) -> Result<Self, LockError> {
        let places = url::places(url)?;
        let BackendConfig { clock, request_timeout, node_timeout, .. } = config;
        let changes = Arc::new(Changes::new(places.len()));
        let begin = |(number, place)| -> Boxed<'_, _> {
            Box::pin(Member::begin(place, number, &changes, config))
        };
        let begun = together(places.into_iter().enumerate().map(begin).collect(), None).await;
        let begun: Result<Vec<_>, _> = begun.into_iter().flatten().collect();
        let (members, opened): (Vec<_>, Vec<_>) =
            begun?.into_iter().map(|(member, opened)| (Arc::new(member), opened)).unzip();
        let leftovers = members.iter().map(|_| Leftovers::default()).collect();
        let nodes = Nodes {
            members,
            clock,
            request_timeout,
            node_timeout,
            leftovers,
            attempts: AtomicU32::new(0),
            changes,
            holdings: Holdings::default(),
            is_closed: AtomicBool::new(false),
            withdrawing: watch::Sender::new(0),
            runtime: Handle::current(),
        };
        let failures: Vec<_> = opened.iter().filter_map(|opened| opened.as_ref().err()).collect();
        nodes.enough(&failures).map_err(LockError::backend)?;
        let told = nodes.survey().await;
        let named = nodes.named(&told);
        if let Some(dependent) = diagnostics::dependent(&named) {
            return Err(url::refused(&dependent));
        }
        let of_connections = nodes.members.iter().filter_map(|member| member.warning());
        for warning in diagnostics::warnings(&named).into_iter().chain(of_connections) {
            events::backend_warning("the quorum", &warning);
        }
        Ok(Self(Arc::new(nodes)))
    }
}

impl Nodes {
    /// An error unless a majority is well; `failures` are those of the others.
    fn enough(&self, failures: &[&BackendError]) -> Result<(), BackendError> {
        let (count, majority) = (self.members.len(), Tally::majority_of(self.members.len()));
        let well = count - failures.len();
        let Some(first) = failures.first() else { return Ok(()) };
        if well >= majority {
            return Ok(());
        }
        let texts: Vec<_> = failures.iter().map(ToString::to_string).collect();
        let text = format!(
            "{well} of {count} nodes answer and {majority} are needed: {}",
            texts.join("; ")
        );
        Err(BackendError::new(first.kind(), text).remedy(first.remedy_text()))
    }

    /// What each node tells of itself.
    async fn survey(&self) -> Vec<Told> {
        let request_timeout = self.request_timeout * 3 / 4;
        let mut asked: Vec<Boxed<'_, Told>> = Vec::with_capacity(self.members.len());
        for member in &self.members {
            asked.push(Box::pin(member.tell(request_timeout)));
        }
        let told = together(asked, None).await;
        told.into_iter().map(Option::unwrap_or_default).collect()
    }

    fn named<'a>(&'a self, told: &'a [Told]) -> Vec<(&'a str, &'a Told)> {
        self.members.iter().map(|member| &*member.name).zip(told).collect()
    }

    fn new_token(&self, owner: Owner) -> Token {
        Token::new(owner, self.attempts.fetch_add(1, Ordering::Relaxed))
    }

    fn new_tally(&self) -> Tally {
        Tally::new(self.members.len())
    }

    /// Sends the same requests to all nodes at once. Dropping the answers stops nothing.
    fn ask(self: &Arc<Self>, requests: &Arc<[Request]>, is_tracked: bool) -> Answers {
        let (answers, received) = unbounded_channel();
        if requests.is_empty() {
            return received;
        }
        for (place, member) in self.members.iter().enumerate() {
            for share in member.shares(requests.iter().map(|request| &*request.keys)) {
                let (nodes, member) = (self.clone(), member.clone());
                let (requests, answers) = (requests.clone(), answers.clone());
                poll_then_spawn(&self.runtime, async move {
                    let tell_silence = || {
                        let said = Said::Nothing(share.places(requests.len()));
                        let _ = answers.send(Answer { place, said });
                    };
                    let asked = Asked { is_tracked, pace: &share.pace };
                    let some = share.of(&requests);
                    let answered = nodes.ask_one(&member, &some, asked, tell_silence).await;
                    drop(some);
                    let said = Said::Answered(share.placed(answered));
                    let _ = answers.send(Answer { place, said });
                });
            }
        }
        received
    }

    /// Gives up when the node has been silent for the request_timeout of the pool. Before, `tell_silence` is called once
    /// if the node answers nothing for longer than usual.
    async fn ask_one(
        &self,
        member: &Member,
        requests: &[Request],
        asked: Asked<'_>,
        tell_silence: impl FnOnce(),
    ) -> Vec<Result<Value, BackendError>> {
        // A reply that was lost on a connection that goes on is not waited for without end.
        const AT_MOST: u32 = 4;
        // A timer that is so late says that this thread had no time, so answers may be here that it has not read.
        const LATE: Duration = Duration::from_millis(5);
        let Asked { is_tracked, pace } = asked;
        let sent = self.clock.now();
        let shortest = requests.iter().map(|request| request.ttl).min().unwrap_or_default();
        let least = url::least_patience(shortest);
        let mut tell_silence = Some(tell_silence);
        // From when on the node's silence is its own.
        let mut since = sent;
        let mut answers = pin!(member.ask(requests, is_tracked));
        loop {
            let given_up_at = pace
                .silent_at(since, self.request_timeout, Some(self.request_timeout))
                .min(sent + self.request_timeout.saturating_mul(AT_MOST));
            let silent_at = pace.silent_at(since, least, self.node_timeout);
            let next =
                if tell_silence.is_some() { silent_at.min(given_up_at) } else { given_up_at };
            if self.clock.now() >= next {
                if next == given_up_at {
                    pace.gave_up();
                    let error = silence(&member.name, self.request_timeout);
                    return requests.iter().map(|_| Err(error.clone())).collect();
                }
                if let Some(tell_silence) = tell_silence.take() {
                    tell_silence();
                }
                continue;
            }
            tokio::select! {
                biased;
                answers = &mut answers => {
                    if answers.iter().any(Result::is_ok) {
                        pace.answered(sent, self.clock.now());
                    }
                    return answers;
                }
                () = self.clock.sleep_until(next) => {
                    let now = self.clock.now();
                    if now.since(next) > LATE {
                        since = now;
                    }
                }
            }
        }
    }

    /// Takes votes back at all nodes. A node that fails is asked on until it has forgotten them by itself. The
    /// answers are those to the first try.
    fn withdraw(self: &Arc<Self>, withdrawals: Vec<Withdrawal>) -> Answers {
        let (answers, received) = unbounded_channel();
        if withdrawals.is_empty() {
            return received;
        }
        let withdrawals: Arc<[Withdrawal]> = withdrawals.into();
        for (place, member) in self.members.iter().enumerate() {
            for share in member.shares(withdrawals.iter().map(|one| &*one.request.keys)) {
                let (nodes, withdrawals, answers) =
                    (self.clone(), withdrawals.clone(), answers.clone());
                // Counted from here, so that whoever closes waits for it.
                let errand = Errand::begin(self);
                poll_then_spawn(&self.runtime, async move {
                    let some = share.of(&withdrawals);
                    let answered = nodes.withdraw_at(place, &some, &share.pace).await;
                    drop(some);
                    let said = Said::Answered(share.placed(answered));
                    let _ = answers.send(Answer { place, said });
                    drop(errand);
                });
            }
        }
        received
    }

    async fn withdraw_at(
        self: &Arc<Self>,
        place: usize,
        withdrawals: &[Withdrawal],
        pace: &Pace,
    ) -> Vec<Result<Value, BackendError>> {
        let (member, leftovers) = (&self.members[place], &self.leftovers[place]);
        let answered = self.withdraw_once(member, withdrawals, pace).await;
        let failed = withdrawals.iter().zip(&answered).filter(|(_, answer)| answer.is_err());
        if leftovers.add(failed.map(|(withdrawal, _)| withdrawal.clone())) {
            self.runtime.spawn(self.clone().clean_up(place));
        }
        answered
    }

    async fn withdraw_once(
        &self,
        member: &Member,
        withdrawals: &[Withdrawal],
        pace: &Pace,
    ) -> Vec<Result<Value, BackendError>> {
        let now = self.clock.now();
        let requests: Vec<_> = withdrawals.iter().map(|withdrawal| withdrawal.at(now)).collect();
        self.ask_one(member, &requests, Asked { is_tracked: false, pace }, || {}).await
    }

    /// Takes back at a node what it did not answer to, until nothing is left.
    async fn clean_up(self: Arc<Self>, place: usize) {
        const LONGEST: Duration = Duration::from_secs(1);
        let (Some(member), Some(leftovers)) = (self.members.get(place), self.leftovers.get(place))
        else {
            return;
        };
        let mut pause = Duration::from_millis(10);
        while !self.is_closed.load(Ordering::Relaxed) {
            self.clock.sleep_until(self.clock.now() + pause).await;
            let some = leftovers.take(self.clock.now());
            if some.is_empty() {
                return;
            }
            let answered = self.withdraw_once(member, &some, &member.pace).await;
            pause = if answered.iter().any(Result::is_ok) {
                Duration::from_millis(1)
            } else {
                (pause * 2).min(LONGEST)
            };
            let failed = some.into_iter().zip(answered).filter(|(_, answer)| answer.is_err());
            // It is the worker itself that adds.
            let _ = leftovers.add(failed.map(|(withdrawal, _)| withdrawal));
        }
    }

    /// Waits until each of `count` entries is decided by a majority: at `until` by those who have answered.
    async fn decide(
        &self,
        mut answers: Answers,
        requests: &[Request],
        until: Instant,
    ) -> Vec<Result<bool, BackendError>> {
        let began = self.clock.now();
        let mut tallies: Vec<_> = requests.iter().map(|_| self.new_tally()).collect();
        let is_open = |tally: &Tally| tally.verdict().is_none();
        while tallies.iter().any(is_open) {
            tokio::select! {
                biased;
                answered = answers.recv() => {
                    let Some(Answer { place, said }) = answered else { break };
                    let Said::Answered(answered) = said else { continue };
                    for (at, answer) in answered {
                        tallies[at].count(place, match requests[at].was_ours(answer) {
                            Ok(true) => Vote::Granted,
                            Ok(false) => Vote::Held { expires_in: None, by: Vec::new() },
                            Err(error) => Vote::Failed(error),
                        });
                    }
                }
                () = self.clock.sleep_until(until) => break,
            }
        }
        let waited = until.since(began);
        let outcome = |mut tally: Tally| {
            // Nobody has waited for those who were not needed.
            if is_open(&tally) {
                self.close(&mut tally, u64::MAX, waited);
            }
            match tally.verdict() {
                Some(Verdict::Granted) => Ok(true),
                Some(Verdict::Held { .. }) => Ok(false),
                Some(Verdict::Low(_) | Verdict::Failed) | None => Err(self.failure(&tally)),
            }
        };
        tallies.into_iter().map(outcome).collect()
    }

    /// The nodes of `silent`, a bit for each place, that have not answered do not count any more.
    fn close(&self, tally: &mut Tally, silent: u64, waited: Duration) {
        tally.close(silent, |place| {
            silence(self.members.get(place).map_or("a node", |member| &member.name), waited)
        });
    }

    /// No majority, because nodes fail.
    fn failure(&self, tally: &Tally) -> BackendError {
        let names = self.members.iter().map(|member| member.name.as_str());
        let (text, failure) = tally.summary(names);
        BackendError::new(failure, text).remedy(tally.remedy())
    }

    fn request(&self, what: What, lease: &LeaseRef, holding: &Holding) -> Request {
        let Holding { token, block, .. } = *holding;
        Request { what, keys: lease.keys.clone(), token, ttl: lease.kept_for(), block }
    }

    /// Whether a majority tells of changes.
    fn tell(&self) -> bool {
        let telling = self.members.iter().filter(|member| member.tells()).count();
        telling >= Tally::majority_of(self.members.len())
    }

    /// What was granted to `owner` is not what it wants, or over. From now on the owner asks like anybody else,
    /// with another token and a greater number: the old one is refused wherever somebody was granted since.
    fn disown(self: &Arc<Self>, claim: &AcquireRequest) {
        let Some(Holding { token, ttl, block, .. }) = self.holdings.get(&claim.owner) else {
            return;
        };
        self.holdings.forget(&claim.owner);
        let until = self.clock.now() + ttl;
        // Nobody waits for the answers.
        let over = withdrawal(What::Release, &claim.keys, token, block, until);
        drop(self.withdraw(vec![over]));
    }

    /// Whether `claim` may be answered by what its owner has been granted before.
    fn is_granted(&self, claim: &AcquireRequest) -> bool {
        let Some(holding) = self.holdings.get(&claim.owner) else { return false };
        let fits = !claim.fencing || holding.block.is_some();
        fits && holding.leaves_until.is_none()
    }

    /// Asks all nodes about leases.
    async fn ask_about(
        self: &Arc<Self>,
        leases: &[LeaseRef],
        what: What,
        request_timeout: Duration,
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        let until = self.clock.now() + request_timeout;
        let request = |lease| self.request(what, lease, &self.holdings.of(lease));
        let requests: Arc<[Request]> = leases.iter().map(request).collect();
        let answers = self.ask(&requests, what == What::Extend && self.tell());
        let outcomes = self.decide(answers, &requests, until).await;
        let held = |ours: bool| if ours { LeaseStatus::Held } else { LeaseStatus::NotHeld };
        outcomes.into_iter().map(|outcome| outcome.map(held)).collect()
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
            (0..claims.len()).partition(|at| self.0.is_granted(&claims[*at]));
        let mut results: Vec<Option<_>> = claims.iter().map(|_| None).collect();
        for (at, again) in granted.iter().zip(self.grant_again(claims, &granted).await) {
            match again {
                Some(result) => results[*at] = Some(result),
                None => others.push(*at),
            }
        }
        others.sort_unstable();
        for at in &others {
            self.0.disown(&claims[*at]);
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
        // The caller gives up all if one is not decided in time.
        let shortest = leases.iter().map(|lease| lease.ttl).min().unwrap_or_default();
        let request_timeout = (self.0.request_timeout * 3 / 4).min(shortest / 8);
        self.0.ask_about(leases, What::Extend, request_timeout).await
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let nodes = &self.0;
        let now = nodes.clock.now();
        let mut withdrawals = Vec::with_capacity(releases.len());
        for ReleaseRequest { lease, free_after, .. } in releases {
            let holding = nodes.holdings.of(lease);
            let request = nodes.request(What::Release, lease, &holding);
            let keep_until = (!free_after.is_zero()).then(|| now + *free_after);
            // One that goes on asking is enough.
            let until = if holding.leaves_until.is_none() { now + lease.kept_for() } else { now };
            let leaving = Holding { leaves_until: Some(now + lease.kept_for()), ..holding };
            nodes.holdings.note(lease.owner, leaving, now);
            withdrawals.push(Withdrawal { request, keep_until, until });
        }
        let requests: Vec<_> = withdrawals.iter().map(|one| one.request.clone()).collect();
        // A node that answers nothing is given up before.
        let until = now + nodes.request_timeout.saturating_mul(3);
        let answers = nodes.withdraw(withdrawals);
        let outcomes = nodes.decide(answers, &requests, until).await;
        let outcome = |(release, outcome): (&ReleaseRequest, Result<bool, BackendError>)| {
            // Otherwise it will be asked for again.
            if outcome.is_ok() {
                nodes.holdings.forget(&release.lease.owner);
            }
            match outcome {
                Ok(true) => Ok(ReleaseOutcome::Freed),
                Ok(false) => Ok(ReleaseOutcome::NotHeld),
                // Some nodes may have done it.
                Err(error) => Err(error.after_a_grant()),
            }
        };
        releases.iter().zip(outcomes).map(outcome).collect()
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.paced = true;
        capabilities
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let request_timeout = self.0.request_timeout * 3 / 4;
        let outcomes =
            self.0.ask_about(std::slice::from_ref(lease), What::Read, request_timeout).await;
        outcomes.into_iter().next().unwrap_or(Ok(LeaseStatus::NotHeld))
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        let nodes = &self.0;
        let told = nodes.survey().await;
        let failures: Vec<_> = told.iter().filter_map(|told| told.failure.as_ref()).collect();
        nodes.enough(&failures)?;
        let named = nodes.named(&told);
        let mut warnings = diagnostics::warnings(&named);
        warnings.extend(nodes.members.iter().filter_map(|member| member.warning()));
        // Perhaps it could not be asked when the pool connected.
        let dependent = diagnostics::dependent(&named);
        warnings.extend(dependent.map(|some| Warning::new(some.cause(), some.remedy())));
        warnings.extend(failures.into_iter().map(|error| {
            Warning::new(
                error.to_string(),
                "the quorum still stands without the node, but fewer others may fail now",
            )
        }));
        Ok(warnings)
    }

    async fn close(&self) {
        // What was not granted is not to be left behind.
        let mut withdrawing = self.0.withdrawing.subscribe();
        let none = withdrawing.wait_for(|count| *count == 0);
        let _ = timeout(self.0.request_timeout / 2, none).await;
        self.0.is_closed.store(true, Ordering::Relaxed);
        for member in &self.0.members {
            member.close();
        }
    }
}

impl Quorum {
    /// Extends what has just been granted to the `min_hold` of its claim, if that is longer than the ttl. Votes are for
    /// the ttl alone: one that came to nothing and cannot be withdrawn is not to stand for longer.
    async fn keep_for_min_hold(
        &self,
        claims: &[AcquireRequest],
        results: &mut [Option<Result<AcquireOutcome, BackendError>>],
    ) {
        let is_short = |at: &usize| {
            let is_granted = matches!(results[*at], Some(Ok(AcquireOutcome::Acquired { .. })));
            let known = self.0.holdings.get(&claims[*at].owner);
            is_granted && known.is_some_and(|known| known.ttl < claims[*at].min_hold)
        };
        let short: Vec<_> = (0..claims.len()).filter(is_short).collect();
        for (at, kept) in short.iter().zip(self.grant_again(claims, &short).await) {
            let owner = claims[*at].owner;
            match kept {
                Some(Ok(_)) => {
                    if let Some(known) = self.0.holdings.get(&owner) {
                        let kept = Holding { ttl: claims[*at].kept_for(), ..known };
                        self.0.holdings.note(owner, kept, self.0.clock.now());
                    }
                }
                Some(Err(error)) => results[*at] = Some(Err(error.after_a_grant())),
                None => {
                    let text = "the lock was gone from a majority before its `min_hold` was set";
                    results[*at] = Some(Err(BackendError::new(FailureKind::MaybeApplied, text)));
                }
            }
        }
    }

    /// For owners that have been granted their locks already, and ask again. `None` for those whose grant is
    /// over.
    async fn grant_again(
        &self,
        claims: &[AcquireRequest],
        places: &[usize],
    ) -> Vec<Option<Result<AcquireOutcome, BackendError>>> {
        if places.is_empty() {
            return Vec::new();
        }
        let lease = |at: &usize| {
            let claim = &claims[*at];
            // Never shorter: this may be a late request of one that wanted it for less time.
            let known = self.0.holdings.get(&claim.owner).map_or(claim.ttl, |holding| holding.ttl);
            let min_hold = claim.min_hold.max(known);
            LeaseRef { keys: claim.keys.clone(), owner: claim.owner, ttl: claim.ttl, min_hold }
        };
        let leases: Vec<_> = places.iter().map(lease).collect();
        let outcomes = self.renew(&leases).await;
        let attempt =
            |(lease, outcome): (&LeaseRef, Result<LeaseStatus, BackendError>)| match outcome {
                Ok(LeaseStatus::Held) => {
                    let block = self.0.holdings.get(&lease.owner).and_then(|holding| holding.block);
                    Some(Ok(granted(block)))
                }
                Ok(LeaseStatus::NotHeld) => None,
                Err(error) => Some(Err(error)),
            };
        leases.iter().zip(outcomes).map(attempt).collect()
    }
}

/// A withdrawal on its way for the first time.
struct Errand(Arc<Nodes>);

impl Errand {
    fn begin(nodes: &Arc<Nodes>) -> Self {
        nodes.withdrawing.send_modify(|count| *count += 1);
        Self(nodes.clone())
    }
}

impl Drop for Errand {
    fn drop(&mut self) {
        self.0.withdrawing.send_modify(|count| *count -= 1);
    }
}

fn granted(block: Option<Block>) -> AcquireOutcome {
    let spare = block.map_or(0, |block| block.last - block.first);
    AcquireOutcome::Acquired {
        fence: block.map(|block| crate::base::fence::Fence::new(block.first)),
        reserved_fences: u32::try_from(spare).unwrap_or_default(),
        contended: None,
    }
}

fn withdrawal(
    what: What,
    keys: &Arc<[Key]>,
    token: Token,
    block: Option<Block>,
    until: Instant,
) -> Withdrawal {
    let request = Request { what, keys: keys.clone(), token, ttl: Duration::ZERO, block };
    Withdrawal { request, keep_until: None, until }
}

fn silence(name: &str, waited: Duration) -> BackendError {
    let message = format!("Redis at {name} did not answer within {waited:?}");
    BackendError::new(FailureKind::MaybeApplied, message)
        .remedy("check that the node is up and reachable; its connection comes back by itself")
}
