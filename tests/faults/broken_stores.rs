//! Stores that break one rule each: the published suite fails for every one of them.

#![allow(clippy::disallowed_methods)]

use std::collections::HashMap;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, FailureKind, Inspection,
    LeaseRef, LeaseStatus, LockHolder, Notifier, Owner, ReleaseOutcome, ReleaseRequest, WaitMode,
    Warning,
};
use lock_runtime::testing::conformance;
use lock_runtime::{Fence, Key};
use tokio::task::yield_now;
use tokio::time::Instant;

/// The rule that a [`Table`] breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    Nothing,

    // Two connections.
    KeepsConnectionsApart,

    // Steps that are not atomic.
    ChecksThenTakes,
    ChecksThenTakesOnItsThread,
    ChecksThenTakesWhatHasExpired,
    ChecksThenRenews,
    ChecksThenReleases,

    // Owners.
    ForgetsItsOwner,
    CountsGrants,
    RenewsForStrangers,
    ReleasesForStrangers,
    KeepsForStrangers,
    KeepsTheRestOfALostLease,

    // Batches.
    AnswersAcquiresInReverse,
    AnswersRenewalsInReverse,
    AnswersReleasesInReverse,
    TakesInReverse,
    AnswersOneOfManyAcquires,
    AnswersOneOfManyRenewals,
    AnswersOneOfManyReleases,
    ReadsABatchBeforeItWrites,
    TakesLeasesForOneSize,

    // Several keys.
    AsksForTheFirstKey,
    TakesWhatIsFree,
    RenewsTheFirstKey,
    ReleasesTheFirstKey,
    KeepsTheFirstKey,
    HoldsByTheFirstKey,
    RenewsByTheFirstKey,
    RenewsByAnyKey,
    ReleasesByAnyKey,

    // Time.
    NeverForgets,
    CountsWholeSeconds,
    CountsMillisAsSeconds,
    ShortensOnARetry,
    ExtendsWhenBusy,
    RenewsNothing,
    AddsToTheTtl,
    RenewsToTheFirstTtl,
    RenewsWhatHasExpired,
    HoldsWhatHasExpired,
    KeepsNothing,
    KeepsForTheTtlAtMost,
    KeepsWhatHasExpired,
    GrantsForTheTtlAlone,
    ExtendsWhatItReads,

    // Fences.
    GivesNoFence,
    GivesFencesUnasked,
    RepeatsFences,
    ForgetsFencesOnRelease,
    ForgetsFencesOnExpiry,
    CountsFencesByTheFirstKey,
    GivesSpareFencesAgain,
    SetsTooManyFencesAside,

    // Dropped calls.
    AnswersWhatWasDropped,
    StaysBusyWithWhatWasDropped,

    // Keys.
    CutsKeys,
    IgnoresCase,
    TrimsKeys,

    // Notifications.
    TellsNothing,
    TellsOfItsConnectAlone,
    TellsOfOtherKeys,
    TellsNoEndOfTheTtl,
    IsNeverHealthy,
    NeverAnswers,

    // Inspections.
    ShowsNoHolder,
    ShowsAnotherOwner,
    TakesWhatItShows,
    ShowsAnotherFence,
}

use Flaw::*;

const MINUTE: Duration = Duration::from_secs(60);

/// A store like that of `examples/custom_backend.rs`, correct but for its flaw. All connections share one table.
#[derive(Clone)]
struct Table {
    flaw: Flaw,
    rows: Arc<Mutex<Rows>>,
    /// Locked during a call.
    line: Arc<tokio::sync::Mutex<Vec<Vec<bool>>>>,
}

#[derive(Default)]
struct Rows {
    by_key: HashMap<String, Row>,
    fences: HashMap<String, u64>,
    last_fence: u64,
    notifiers: Vec<Notifier>,
}

#[derive(Clone, Debug)]
struct Row {
    owner: Owner,
    expires: Instant,
    /// As it was taken.
    ttl: Duration,
    grants: u32,
}

impl Table {
    fn connections(flaw: Flaw) -> [Self; 2] {
        let new = || Self { flaw, rows: Arc::default(), line: Arc::default() };
        let one = new();
        if flaw == KeepsConnectionsApart { [one, new()] } else { [one.clone(), one] }
    }

    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap()
    }

    fn name(&self, key: &Key) -> String {
        match self.flaw {
            CutsKeys => key.as_str().chars().take(255).collect(),
            IgnoresCase => key.as_str().to_lowercase(),
            TrimsKeys => key.as_str().trim_end().to_owned(),
            _ => key.as_str().to_owned(),
        }
    }

    fn names(&self, keys: &[Key]) -> Vec<String> {
        keys.iter().map(|key| self.name(key)).collect()
    }

    fn row<'a>(&self, rows: &'a Rows, name: &str) -> Option<&'a Row> {
        let lives = |row: &&Row| self.is(NeverForgets) || row.expires > Instant::now();
        rows.by_key.get(name).filter(lives)
    }

    fn is_ours(&self, rows: &Rows, name: &str, owner: &Owner) -> bool {
        self.row(rows, name).is_some_and(|row| row.owner == *owner)
    }

    /// The longest remaining time of another owner.
    fn in_the_way(&self, rows: &mut Rows, claim: &AcquireRequest) -> Option<Duration> {
        let asked = if self.is(AsksForTheFirstKey) { 1 } else { claim.keys.len() };
        let names = self.names(&claim.keys[..asked]);
        let is_stranger = |row: &Row| self.is(ForgetsItsOwner) || row.owner != claim.owner;
        let rows_in_the_way = names.iter().filter_map(|name| self.row(rows, name));
        let expires =
            rows_in_the_way.filter(|row| is_stranger(row)).map(|row| row.expires).max()?;
        if self.is(ExtendsWhenBusy) {
            for name in &names {
                if let Some(row) = rows.by_key.get_mut(name) {
                    row.expires = Instant::now() + row.ttl;
                }
            }
        }
        if self.is(TakesWhatIsFree) {
            for name in
                names.iter().filter(|name| self.row(rows, name).is_none()).collect::<Vec<_>>()
            {
                self.put(rows, name, claim);
            }
        }
        Some(expires.saturating_duration_since(Instant::now()))
    }

    fn put(&self, rows: &mut Rows, name: &str, claim: &AcquireRequest) {
        let ttl = match self.flaw {
            CountsWholeSeconds => Duration::from_secs(claim.kept_for().as_secs()),
            CountsMillisAsSeconds => claim.kept_for() * 1_000,
            GrantsForTheTtlAlone => claim.ttl,
            _ => claim.kept_for(),
        };
        let mine = self.row(rows, name).filter(|row| row.owner == claim.owner).cloned();
        let known = mine.as_ref().map(|row| row.expires).filter(|_| !self.is(ShortensOnARetry));
        let expires = (Instant::now() + ttl).max(known.unwrap_or_else(Instant::now));
        if self.is(ForgetsFencesOnExpiry) && self.row(rows, name).is_none() {
            // An existing row has expired.
            if rows.by_key.contains_key(name) {
                rows.last_fence = 0;
            }
        }
        let ttl = mine.as_ref().map_or(ttl, |row| row.ttl);
        let grants = mine.map_or(0, |row| row.grants) + 1;
        rows.by_key.insert(name.to_owned(), Row { owner: claim.owner, expires, ttl, grants });
    }

    fn take(&self, rows: &mut Rows, claim: &AcquireRequest) -> AcquireOutcome {
        let names = self.names(&claim.keys);
        for name in &names {
            self.put(rows, name, claim);
        }
        let spare = claim.extra_fences + 7 * u32::from(self.is(SetsTooManyFencesAside));
        let fence = match self.flaw {
            GivesNoFence => None,
            RepeatsFences => Some(1),
            CountsFencesByTheFirstKey => {
                let last = rows.fences.entry(names[0].clone()).or_default();
                *last += 1 + u64::from(spare);
                Some(*last - u64::from(spare))
            }
            GivesSpareFencesAgain => {
                rows.last_fence += 1;
                Some(rows.last_fence)
            }
            _ => {
                rows.last_fence += 1 + u64::from(spare);
                Some(rows.last_fence - u64::from(spare))
            }
        };
        let fence = fence.filter(|_| claim.fencing || self.is(GivesFencesUnasked)).map(Fence::new);
        AcquireOutcome::acquired(fence).with_reserved_fences(spare)
    }

    fn busy(&self, expires_in: Duration) -> AcquireOutcome {
        let retry_after = match self.flaw {
            TellsNoEndOfTheTtl => Duration::from_secs(3_600),
            _ => expires_in + Duration::from_millis(1),
        };
        AcquireOutcome::contended_until(Some(expires_in), WaitMode::Watch { retry_after })
    }

    async fn attempt(&self, claim: &AcquireRequest) -> AcquireOutcome {
        let was_there =
            claim.keys.iter().any(|key| self.rows().by_key.contains_key(&self.name(key)));
        let in_the_way = || self.in_the_way(&mut self.rows(), claim);
        match self.flaw {
            ChecksThenTakesOnItsThread => {
                if let Some(expires_in) = in_the_way() {
                    return self.busy(expires_in);
                }
                // So long that two threads meet here in one of many rounds, also if one of them begins late.
                std::thread::sleep(Duration::from_millis(1));
            }
            ChecksThenTakes => {
                if let Some(expires_in) = in_the_way() {
                    return self.busy(expires_in);
                }
                yield_now().await;
            }
            ChecksThenTakesWhatHasExpired if was_there => {
                if let Some(expires_in) = in_the_way() {
                    return self.busy(expires_in);
                }
                yield_now().await;
            }
            _ => {
                let mut rows = self.rows();
                return match self.in_the_way(&mut rows, claim) {
                    Some(expires_in) => self.busy(expires_in),
                    None => self.take(&mut rows, claim),
                };
            }
        }
        self.take(&mut self.rows(), claim)
    }

    /// Whether the table takes a lease for its owner's.
    fn held(&self, rows: &Rows, lease: &LeaseRef, by_the_first: bool, by_any: bool) -> bool {
        let names = self.names(&lease.keys);
        let mut ours = names.iter().map(|name| self.is_ours(rows, name, &lease.owner));
        match (by_the_first, by_any) {
            (true, _) => ours.next().unwrap_or_default(),
            (_, true) => ours.any(|ours| ours),
            _ => ours.all(|ours| ours),
        }
    }

    async fn renew_one(&self, lease: &LeaseRef) -> LeaseStatus {
        let held = {
            let rows = self.rows();
            let remembered =
                |key| rows.by_key.get(&self.name(key)).is_some_and(|row| row.owner == lease.owner);
            match self.flaw {
                RenewsForStrangers => {
                    lease.keys.iter().all(|key| self.row(&rows, &self.name(key)).is_some())
                }
                RenewsWhatHasExpired => {
                    // It remembers all its owners.
                    lease
                        .keys
                        .iter()
                        .all(|key| remembered(key) || !rows.by_key.contains_key(&self.name(key)))
                }
                flaw => {
                    self.held(&rows, lease, flaw == RenewsByTheFirstKey, flaw == RenewsByAnyKey)
                }
            }
        };
        if !held {
            return LeaseStatus::NotHeld;
        }
        if self.is(ChecksThenRenews) {
            yield_now().await;
        }
        let mut rows = self.rows();
        let count = if self.is(RenewsTheFirstKey) { 1 } else { lease.keys.len() };
        for name in self.names(&lease.keys[..count]) {
            let row = rows.by_key.get(&name).cloned();
            let mut row = row.unwrap_or(Row {
                owner: lease.owner,
                expires: Instant::now(),
                ttl: lease.ttl,
                grants: 1,
            });
            row.expires = match self.flaw {
                RenewsNothing => row.expires,
                AddsToTheTtl => row.expires + lease.kept_for(),
                RenewsToTheFirstTtl => Instant::now() + row.ttl,
                _ => Instant::now() + lease.kept_for(),
            };
            if self.is(ChecksThenRenews) {
                row.owner = lease.owner;
            }
            if !self.is(RenewsByAnyKey) || row.owner == lease.owner {
                rows.by_key.insert(name, row);
            }
        }
        LeaseStatus::Held
    }

    async fn release_one(&self, release: &ReleaseRequest) -> ReleaseOutcome {
        let ReleaseRequest { lease, free_after, .. } = release;
        let held = self.held(&self.rows(), lease, false, self.is(ReleasesByAnyKey));
        if self.is(ChecksThenReleases) && held {
            yield_now().await;
        }
        let mut rows = self.rows();
        for (at, name) in self.names(&lease.keys).into_iter().enumerate() {
            let is_ours = match self.flaw {
                ReleasesForStrangers => true,
                KeepsForStrangers if !free_after.is_zero() => true,
                KeepsWhatHasExpired if !free_after.is_zero() => {
                    rows.by_key.get(&name).is_some_and(|row| row.owner == lease.owner)
                }
                ChecksThenReleases => held,
                ReleasesTheFirstKey if at > 0 => false,
                KeepsTheRestOfALostLease if !held => false,
                _ => self.is_ours(&rows, &name, &lease.owner),
            };
            if !is_ours {
                continue;
            }
            let Some(row) = rows.by_key.get_mut(&name) else { continue };
            if self.is(CountsGrants) && row.grants > 1 {
                row.grants -= 1;
                continue;
            }
            let free_after = match self.flaw {
                KeepsNothing => Duration::ZERO,
                KeepsTheFirstKey if at > 0 => Duration::ZERO,
                KeepsForTheTtlAtMost => (*free_after).min(row.expires - Instant::now()),
                _ => *free_after,
            };
            if free_after.is_zero() {
                rows.by_key.remove(&name);
                if self.is(ForgetsFencesOnRelease) {
                    rows.last_fence = 0;
                }
            } else {
                row.expires = Instant::now() + free_after;
            }
        }
        if held { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld }
    }

    fn tell(&self, keys: impl Iterator<Item = Key>) {
        let notifiers = self.rows().notifiers.clone();
        for key in keys {
            match self.flaw {
                TellsNothing | TellsOfItsConnectAlone => {}
                TellsOfOtherKeys => {
                    notifiers
                        .iter()
                        .for_each(|notifier| notifier.key_changed(&format!("app:{key}")));
                }
                _ => notifiers.iter().for_each(|notifier| notifier.key_changed(key.as_str())),
            }
        }
    }
}

/// `outcomes` as the caller receives them.
fn answered<T>(outcomes: Vec<T>, reversed: bool, cut: bool) -> Vec<Result<T, BackendError>> {
    let mut outcomes: Vec<_> = outcomes.into_iter().map(Ok).collect();
    if reversed {
        outcomes.reverse();
    }
    if cut {
        outcomes.truncate(1);
    }
    outcomes
}

impl Backend for Table {
    fn subscribe(&self, notifier: Notifier) {
        if self.is(TellsOfItsConnectAlone) {
            notifier.resync();
        }
        self.rows().notifiers.push(notifier);
    }

    async fn acquire(
        &self,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        if self.is(NeverAnswers) {
            pending::<()>().await;
        }
        let mut attempts = Vec::new();
        match self.flaw {
            ReadsABatchBeforeItWrites => {
                let mut rows = self.rows();
                let busy: Vec<_> =
                    claims.iter().map(|claim| self.in_the_way(&mut rows, claim)).collect();
                for (claim, busy) in claims.iter().zip(busy) {
                    attempts.push(match busy {
                        Some(expires_in) => self.busy(expires_in),
                        None => self.take(&mut rows, claim),
                    });
                }
            }
            AnswersWhatWasDropped => {
                // Replies are in the order of their requests. A dropped call leaves one.
                let mut replies = self.line.lock().await;
                let mut reply = Vec::new();
                for claim in claims {
                    reply
                        .push(matches!(self.attempt(claim).await, AcquireOutcome::Acquired { .. }));
                }
                replies.push(reply);
                yield_now().await;
                for is_granted in replies.remove(0) {
                    attempts.push(if is_granted {
                        AcquireOutcome::acquired(None)
                    } else {
                        AcquireOutcome::contended(None)
                    });
                }
            }
            StaysBusyWithWhatWasDropped => {
                let mut unfinished = self.line.lock().await;
                if !unfinished.is_empty() {
                    pending::<()>().await;
                }
                unfinished.push(Vec::new());
                yield_now().await;
                unfinished.clear();
                for claim in claims {
                    attempts.push(self.attempt(claim).await);
                }
            }
            TakesInReverse => {
                // Answered in order, but executed in reverse.
                let is_granted: Vec<_> = claims
                    .iter()
                    .map(|claim| self.in_the_way(&mut self.rows(), claim).is_none())
                    .collect();
                for claim in claims.iter().rev() {
                    attempts.push(self.attempt(claim).await);
                }
                let busy = AcquireOutcome::contended(None);
                attempts = is_granted
                    .iter()
                    .map(|yes| if *yes { AcquireOutcome::acquired(None) } else { busy })
                    .collect();
                if claims.len() > 2 {
                    // The last request was granted; the first one gets the answer.
                    let ends = [claims[0].owner, claims[claims.len() - 1].owner];
                    for row in self.rows().by_key.values_mut() {
                        if let Some(at) = ends.iter().position(|owner| *owner == row.owner) {
                            row.owner = ends[1 - at];
                        }
                    }
                }
            }
            _ => {
                for claim in claims {
                    attempts.push(self.attempt(claim).await);
                }
            }
        }
        answered(attempts, self.is(AnswersAcquiresInReverse), self.is(AnswersOneOfManyAcquires))
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        let mut outcomes = Vec::new();
        let first = leases.first().map_or(1, |lease| lease.keys.len());
        for lease in leases {
            // Cut to the size of the first.
            let lease = match self.flaw {
                TakesLeasesForOneSize => {
                    let count = first.min(lease.keys.len());
                    let mut short = lease.clone();
                    short.keys = lease.keys[..count].into();
                    short
                }
                _ => lease.clone(),
            };
            let is_short = self.is(TakesLeasesForOneSize) && lease.keys.len() < first;
            outcomes.push(if is_short {
                LeaseStatus::NotHeld
            } else {
                self.renew_one(&lease).await
            });
        }
        answered(outcomes, self.is(AnswersRenewalsInReverse), self.is(AnswersOneOfManyRenewals))
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let mut outcomes = Vec::new();
        for release in releases {
            outcomes.push(self.release_one(release).await);
        }
        self.tell(releases.iter().flat_map(|release| release.lease.keys.iter().cloned()));
        answered(outcomes, self.is(AnswersReleasesInReverse), self.is(AnswersOneOfManyReleases))
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let mut rows = self.rows();
        let held = match self.flaw {
            HoldsWhatHasExpired => lease.keys.iter().all(|key| {
                let row = rows.by_key.get(&self.name(key));
                row.is_none_or(|row| row.owner == lease.owner)
            }),
            flaw => self.held(&rows, lease, flaw == HoldsByTheFirstKey, false),
        };
        if self.is(ExtendsWhatItReads) && held {
            for name in self.names(&lease.keys) {
                let Some(row) = rows.by_key.get_mut(&name) else { continue };
                row.expires = Instant::now() + lease.ttl;
            }
        }
        Ok(if held { LeaseStatus::Held } else { LeaseStatus::NotHeld })
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, BackendError> {
        let mut rows = self.rows();
        let name = self.name(key);
        let holder = self.row(&rows, &name).filter(|_| !self.is(ShowsNoHolder)).map(|row| {
            let owner =
                if self.is(ShowsAnotherOwner) { Owner::random().unwrap() } else { row.owner };
            let fence = self.is(ShowsAnotherFence).then(|| Fence::new(7_777));
            let left = row.expires.saturating_duration_since(Instant::now());
            LockHolder::new(Some(owner.tag())).with_expiry(Some(left)).with_fence(fence)
        });
        if self.is(TakesWhatItShows) && self.row(&rows, &name).is_none() {
            let mut keys = AcquireRequest::new([key.clone()], Owner::random().unwrap(), MINUTE);
            keys.min_hold = MINUTE;
            self.put(&mut rows, &name, &keys);
        }
        Ok(Some(Inspection::new(holder)))
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.local = true;
        capabilities
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        match self.flaw {
            IsNeverHealthy => Err(BackendError::new(FailureKind::NotApplied, "not today")),
            _ => Ok(Vec::new()),
        }
    }
}

macro_rules! stores {
    ($($name:ident: $flaw:ident => $rule:literal,)*) => { $(
        #[tokio::test(start_paused = true)]
        #[should_panic(expected = $rule)]
        async fn $name() {
            let [one, other] = Table::connections($flaw);
            conformance(one, other).await;
        }
    )* };
}

/// So each other table fails because of its flaw.
#[tokio::test(start_paused = true)]
async fn without_a_flaw_the_table_passes() {
    let [one, other] = Table::connections(Nothing);
    tokio::spawn(conformance(one, other)).await.unwrap();
}

stores! {
    keeps_connections_apart: KeepsConnectionsApart
        => "the rule `one owner at a time`: [Key(\"exclusive\")] was granted although another owner holds it",

    checks_then_takes: ChecksThenTakes => "a free key was granted to 3 concurrent owners",
    checks_then_takes_on_its_thread: ChecksThenTakesOnItsThread => "were granted to both",
    checks_then_takes_what_has_expired: ChecksThenTakesWhatHasExpired
        => "an expired key was granted to 3 concurrent owners",
    checks_then_renews: ChecksThenRenews
        => "a renewal that meets the release takes nothing from the next owner",
    checks_then_releases: ChecksThenReleases
        => "a repeated release frees nothing of the next owner",

    forgets_its_owner: ForgetsItsOwner
        => "the rule `a retry by the owner succeeds again`: the owner did not get [Key(\"retry\")]",
    counts_grants: CountsGrants => "a second release finds nothing",
    renews_for_strangers: RenewsForStrangers => "another owner renews nothing",
    releases_for_strangers: ReleasesForStrangers => "a renewal and a release by another owner change no lease",
    keeps_for_strangers: KeepsForStrangers => "a release by another owner changes no lease",
    keeps_the_rest_of_a_lost_lease: KeepsTheRestOfALostLease
        => "the rule `one of several keys is lost`: the owner did not get [Key(\"{lost}:b\")]",

    answers_acquires_in_reverse: AnswersAcquiresInReverse => "a batch of acquires answers in order",
    answers_renewals_in_reverse: AnswersRenewalsInReverse => "a batch of renewals answers in order",
    answers_releases_in_reverse: AnswersReleasesInReverse => "a batch of releases answers in order",
    takes_in_reverse: TakesInReverse => "a batch of acquires takes what it answers",
    answers_one_of_many_acquires: AnswersOneOfManyAcquires => "one outcome for each claim",
    answers_one_of_many_renewals: AnswersOneOfManyRenewals => "one outcome for each lease",
    answers_one_of_many_releases: AnswersOneOfManyReleases => "one outcome for each release",
    reads_a_batch_before_it_writes: ReadsABatchBeforeItWrites
        => "a key was granted to 3 owners in one call",
    takes_leases_for_one_size: TakesLeasesForOneSize
        => "leases of different sizes are renewed together",

    asks_for_the_first_key: AsksForTheFirstKey
        => "the rule `several keys are taken together or not at all`",
    takes_what_is_free: TakesWhatIsFree => "\"{pair}:c\"",
    renews_the_first_key: RenewsTheFirstKey => "a renewal extends every key, to the ttl that it names",
    releases_the_first_key: ReleasesTheFirstKey => "\"{pair}:b\"",
    keeps_the_first_key: KeepsTheFirstKey => "a release keeps every key past its ttl: {kept}:b",
    holds_by_the_first_key: HoldsByTheFirstKey => "of several keys all are the owner's, or the lease is lost",
    renews_by_the_first_key: RenewsByTheFirstKey => "of several keys all are the owner's, or the lease is lost",
    renews_by_any_key: RenewsByAnyKey => "of several keys all are the owner's, or the lease is lost",
    releases_by_any_key: ReleasesByAnyKey => "a release reports that one of several keys was not the owner's",

    never_forgets: NeverForgets => "is not free after 6s",
    counts_whole_seconds: CountsWholeSeconds => "a grant of 300ms lasted",
    counts_millis_as_seconds: CountsMillisAsSeconds => "the lease of the holder is at most its ttl",
    shortens_on_a_retry: ShortensOnARetry => "the rule `a late retry for less time shortens nothing`",
    extends_when_busy: ExtendsWhenBusy => "is not free after 6s",
    renews_nothing: RenewsNothing => "a held lock is renewed",
    adds_to_the_ttl: AddsToTheTtl => "[Key(\"renewal\")] is not free after",
    renews_to_the_first_ttl: RenewsToTheFirstTtl => "a renewal extends every key, to the ttl that it names",
    renews_what_has_expired: RenewsWhatHasExpired => "cannot be renewed",
    holds_what_has_expired: HoldsWhatHasExpired => "what has expired is not held",
    keeps_nothing: KeepsNothing => "[Key(\"kept\")] has two owners",
    keeps_what_has_expired: KeepsWhatHasExpired
        => "the rule `a release extends nothing that has expired`: [Key(\"expired\")] is not free after",
    keeps_for_the_ttl_at_most: KeepsForTheTtlAtMost => "a release keeps every key past its ttl: {kept}:a",
    grants_for_the_ttl_alone: GrantsForTheTtlAlone => "the rule `a min hold needs no renewal`",
    extends_what_it_reads: ExtendsWhatItReads => "the rule `a look extends nothing`",

    gives_no_fence: GivesNoFence => "a requested fence is assigned",
    gives_fences_unasked: GivesFencesUnasked => "a fence is assigned only on request",
    repeats_fences: RepeatsFences => "a fence grows after a release",
    forgets_fences_on_release: ForgetsFencesOnRelease => "a fence grows after a release",
    forgets_fences_on_expiry: ForgetsFencesOnExpiry => "a fence grows after an end of the ttl",
    counts_fences_by_the_first_key: CountsFencesByTheFirstKey => "a fence grows after a grant of several keys",
    gives_spare_fences_again: GivesSpareFencesAgain => "a fence grows after reserved fences",
    sets_too_many_fences_aside: SetsTooManyFencesAside => "no more fences are reserved than requested",

    answers_what_was_dropped: AnswersWhatWasDropped => "changes no later answer",
    stays_busy_with_what_was_dropped: StaysBusyWithWhatWasDropped => "the store has not answered within 30s",

    cuts_keys: CutsKeys => "a key of 512 bytes that ends in \"xxx2\" is not told apart from a key before it",
    ignores_case: IgnoresCase => "the key \"a\" is not told apart from a key before it",
    trims_keys: TrimsKeys => "the key \"a b \" is not told apart from a key before it",

    tells_nothing: TellsNothing => "a release sends the promised notification",
    tells_of_its_connect_alone: TellsOfItsConnectAlone => "a release sends the promised notification",
    tells_of_other_keys: TellsOfOtherKeys => "a release sends the promised notification",
    tells_no_end_of_the_ttl: TellsNoEndOfTheTtl => "an end of the ttl is notified",
    is_never_healthy: IsNeverHealthy => "a store that serves is healthy",
    never_answers: NeverAnswers => "the store has not answered within 30s",

    shows_no_holder: ShowsNoHolder => "a held key has a holder",
    shows_another_owner: ShowsAnotherOwner => "the holder is the owner",
    takes_what_it_shows: TakesWhatItShows => "an inspection takes nothing",
    shows_another_fence: ShowsAnotherFence => "Fence(7777)) is shown for",
}
