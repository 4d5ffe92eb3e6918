//! The leases of a pool: one for each class of ttls, made when a lock needs it.
//!
//! A key lives as long as its lease. The leader counts the lease from the last sign of life that it has taken.
//!
//! **Which signs count.** A leader that was replaced and does not know it yet takes signs of life too. So a sign counts
//! only together with an answer that a majority has confirmed. The request of that answer was sent at `s`. If that answer's term
//! is not later than the term of the sign's answer, the confirmed leader or a later one has taken the sign. Either that leader
//! counts from the sign, or it was replaced after `s`, and its successor gives each lease its full length again. So the lease
//! lasts for its length from the earlier one of `s` and the sign's own sending. With `--experimental-enable-lease-checkpoint`, a
//! successor gives a lease of more than five minutes the time of its last checkpoint instead.
//!
//! **Which connection may use a lease.** Each lease has a key of its own with the number of the connection that may put
//! keys. That number is a condition of each transaction that puts keys. A new connection writes its number before it serves. From
//! then on, whatever a former connection has left in flight fails, however late it arrives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::backend::coordination::lifetime_classes::class_of;
use crate::backend::etcd::grpc::CallFailure;
use crate::backend::etcd::key_names::KeyNames;
use crate::backend::etcd::member::{Member, TransactionFailure};
use crate::backend::etcd::protocol::key_value::KeyValue;
use crate::backend::etcd::protocol::lease::{self, LeaseAnswer};
use crate::backend::etcd::protocol::transaction::{KeyCondition, KeyOperation, Transaction};
use crate::backend::etcd::server_error::{CallStatus, is_denied, is_without_space, unanswered};
use crate::backend::{BackendError, FailureKind};
use crate::base::clock::{Clock, Instant};
use crate::base::mutex::Mutex;

/// The lengths of leases, in seconds. etcd's shortest one is two seconds, unless `--election-timeout` is set.
const CLASSES: [u64; 26] = [
    2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 27, 33, 40, 50, 66, 100, 132, 200, 330, 660, 1_320,
    4_000, 24_000, 96_000,
];

/// The longest part of a lease that exceeds the ttls of its locks.
const LONGEST_MARGIN: Duration = Duration::from_secs(1);

/// A sign of life that the leader has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LifeSign {
    pub(crate) sent: Instant,
    /// The election that the answering member knew of. The greatest number where a majority has confirmed the sign itself.
    pub(crate) term: u64,
}

impl LifeSign {
    /// Whether a lease with this sign lasts for its length from `needed` on. A majority has confirmed an answer in
    /// `term`, to a request that was sent at `asked`.
    pub(crate) fn counts(self, asked: Instant, term: u64, needed: Instant) -> bool {
        self.term >= term && self.sent.min(asked) >= needed
    }
}

/// What a lease is good for. It only goes forward.
#[derive(Clone, Copy)]
#[repr(u8)]
enum LeaseUse {
    /// Takes further keys.
    Open,
    /// Keeps the keys that it has.
    Closed,
    /// The members refuse signs of life for it. Keys that are held move to another lease with the next renewal.
    Denied,
    /// Has no key of a lock that is held, and runs out.
    Abandoned,
    /// Gone, and its keys with it.
    Over,
}

/// A lease of the pool.
pub(crate) struct PoolLease {
    pub(crate) id: i64,
    /// As granted.
    pub(crate) length: Duration,
    last_sign: Mutex<LifeSign>,
    /// When it was last wanted, in nanoseconds of the clock.
    used: AtomicU64,
    state: AtomicU8,
}

impl PoolLease {
    /// A lease is used often for this long after it was wanted.
    const BUSY: Duration = Duration::from_secs(20);

    /// A lease that a majority has granted to a request that was sent at `sent`.
    pub(crate) fn granted(id: i64, length: Duration, sent: Instant) -> Self {
        let last_sign = Mutex::new(LifeSign { sent, term: u64::MAX });
        let used = AtomicU64::new(sent.as_nanos());
        let state = AtomicU8::new(LeaseUse::Open as u8);
        Self { id, length, last_sign, used, state }
    }

    pub(crate) fn last_sign(&self) -> LifeSign {
        *self.last_sign.lock()
    }

    pub(crate) fn on_sign(&self, sign: LifeSign) {
        let mut last = self.last_sign.lock();
        // Answers come in the order of the signs.
        if sign.sent > last.sent {
            *last = sign;
        }
    }

    /// Whether its keys stay, as far as is known here.
    pub(crate) fn is_current(&self) -> bool {
        self.is_before(LeaseUse::Abandoned)
    }

    /// Whether signs of life are sent for it.
    pub(crate) fn takes_signs(&self) -> bool {
        self.is_before(LeaseUse::Denied)
    }

    /// Whether a key under this lease stays as long as one under `other`.
    pub(crate) fn lasts_like(&self, other: &Self) -> bool {
        self.takes_signs() && self.length >= other.length
    }

    fn is_before(&self, state: LeaseUse) -> bool {
        self.state.load(Ordering::SeqCst) < state as u8
    }

    /// Whether the state has changed by this.
    fn advance(&self, to: LeaseUse) -> bool {
        self.state.fetch_max(to as u8, Ordering::SeqCst) < to as u8
    }

    /// Lets it take no further keys.
    pub(crate) fn close(&self) {
        self.advance(LeaseUse::Closed);
    }

    /// Lets its keys move to another lease.
    pub(crate) fn deny(&self) {
        self.advance(LeaseUse::Denied);
    }

    /// Gives it no further signs of life. Its keys do not count any longer.
    pub(crate) fn abandon(&self) {
        self.advance(LeaseUse::Abandoned);
    }

    /// Whether it has ended at the servers by now, unless they had no leader.
    pub(crate) fn has_run_out(&self, now: Instant) -> bool {
        /// A sign that was in flight, and the pace at which a leader looks for leases that have run out.
        const MARGIN: Duration = Duration::from_secs(3);
        now.since(self.last_sign().sent) >= self.length.saturating_add(MARGIN)
    }

    fn is_idle(&self, now: Instant) -> bool {
        now.since(Instant::from_nanos(self.used.load(Ordering::Relaxed))) >= Self::BUSY
    }

    /// The earliest time of the last sign with which keys stay until `until`.
    pub(crate) fn needed_sign(&self, until: Instant) -> Instant {
        until.saturating_sub(self.length)
    }

    /// How long the lease goes without a sign of life.
    pub(crate) fn sign_interval(&self, now: Instant) -> Duration {
        const SHORTEST: Duration = Duration::from_millis(200);
        const LONGEST: Duration = Duration::from_secs(1);
        if self.is_idle(now) {
            self.length / 4
        } else {
            (self.length / 20).clamp(SHORTEST, LONGEST)
        }
    }

    pub(crate) fn on_use(&self, now: Instant) {
        self.used.store(now.as_nanos(), Ordering::Relaxed);
    }
}

/// The leases of one class: one, or several if each may have few keys.
struct LeaseClass {
    seconds: u64,
    leases: Mutex<Vec<Arc<PoolLease>>>,
    /// Held while a lease is made. A granted lease that could not be [given](Leases::give_to) to the connection is kept for the
    /// next request.
    making: tokio::sync::Mutex<Option<PoolLease>>,
}

impl LeaseClass {
    /// A lease that takes further keys. Each key of an owner, and each request that puts one, has a reference to its lease.
    fn open(&self, most_keys: usize) -> Option<Arc<PoolLease>> {
        let leases = self.leases.lock();
        let has_room = |lease: &&Arc<PoolLease>| {
            lease.is_before(LeaseUse::Closed) && Arc::strong_count(lease) <= most_keys
        };
        leases.iter().find(has_room).cloned()
    }

    fn add(&self, lease: Arc<PoolLease>) {
        let mut leases = self.leases.lock();
        leases.retain(|lease| lease.is_before(LeaseUse::Over));
        leases.push(lease);
    }

    /// Leases without keys run out, except for the first one that takes keys. Until then, a new connection takes them away from
    /// the former one.
    fn abandon_unused(&self, now: Instant) {
        let mut has_open = false;
        self.leases.lock().retain(|lease| {
            let is_open = lease.is_before(LeaseUse::Closed);
            let is_first = is_open && !has_open;
            has_open |= is_open;
            let is_unused = Arc::strong_count(lease) == 1 && (!is_open || lease.is_idle(now));
            if is_unused && !is_first {
                lease.abandon();
            }
            lease.is_current() || (lease.is_before(LeaseUse::Over) && !lease.has_run_out(now))
        });
    }
}

pub(crate) struct Leases {
    pub(crate) names: KeyNames,
    clock: Clock,
    /// How many keys a lease has at most.
    most_keys: usize,
    classes: Mutex<Vec<Arc<LeaseClass>>>,
    /// Where the numbers of ended leases go.
    ended: mpsc::UnboundedSender<i64>,
}

impl Leases {
    pub(crate) fn new(
        names: KeyNames,
        clock: Clock,
        most_keys: usize,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<i64>) {
        let (ended, ends) = mpsc::unbounded_channel();
        let leases = Self { names, clock, most_keys, classes: Mutex::default(), ended };
        (Arc::new(leases), ends)
    }

    /// How long a lease has to be so that its keys stay for `kept_for`. The margin makes a sign of life for each request
    /// unnecessary.
    pub(crate) fn length_for(kept_for: Duration) -> Duration {
        class_of(&CLASSES, kept_for.saturating_add((kept_for / 10).min(LONGEST_MARGIN)))
    }

    /// A lease with keys that stay for `kept_for` after a sign of life.
    pub(crate) async fn holding(
        &self,
        member: &Arc<Member>,
        kept_for: Duration,
    ) -> Result<Arc<PoolLease>, BackendError> {
        let class = self.class(Self::length_for(kept_for).as_secs());
        if let Some(lease) = class.open(self.most_keys) {
            lease.on_use(self.clock.now());
            return Ok(lease);
        }
        let mut making = class.making.lock().await;
        if let Some(lease) = class.open(self.most_keys) {
            return Ok(lease);
        }
        let is_fresh = |lease: &PoolLease| {
            lease.is_current() && self.clock.now().since(lease.last_sign().sent) < lease.length / 2
        };
        let lease = match making.take().filter(is_fresh) {
            Some(granted) => granted,
            None => {
                self.grant(member, class.seconds).await.map_err(BackendError::before_sending)?
            }
        };
        if let Err(error) = self.give_to(member, &lease).await {
            *making = Some(lease);
            return Err(error.before_sending());
        }
        let lease = Arc::new(lease);
        class.add(lease.clone());
        Ok(lease)
    }

    async fn grant(&self, member: &Arc<Member>, seconds: u64) -> Result<PoolLease, BackendError> {
        let id = random_id()?;
        let now = self.clock.now();
        let asked = lease::grant(id, i64::try_from(seconds).unwrap_or(i64::MAX));
        let answer =
            LeaseAnswer::read(&member.call("/etcdserverpb.Lease/LeaseGrant", &asked).await?)?;
        let granted = u64::try_from(answer.seconds).unwrap_or_default();
        if granted < seconds {
            let message = format!("etcd has granted a lease of {granted} s instead of {seconds} s");
            return Err(BackendError::new(FailureKind::Rejected, message)
                .remedy("ask for a shorter ttl, min_hold and lock_delay"));
        }
        Ok(PoolLease::granted(id, Duration::from_secs(granted), now))
    }

    /// From then on, `member` may put keys under the lease, and no other connection.
    pub(crate) async fn give_to(
        &self,
        member: &Arc<Member>,
        lease: &PoolLease,
    ) -> Result<(), BackendError> {
        Ok(self.put_number(member, lease, Vec::new()).await?)
    }

    /// Like [`give_to`](Self::give_to), if the key of the lease is still as it was seen. A late request of this kind changes
    /// nothing that a later connection has written.
    pub(crate) async fn repair(
        &self,
        member: &Arc<Member>,
        lease: &PoolLease,
        seen: Option<&KeyValue>,
    ) -> Result<(), BackendError> {
        let key = self.names.of_lease(lease.id);
        let condition = match seen {
            Some(seen) => KeyCondition::Value { key, value: seen.value.clone() },
            None => KeyCondition::Created { key, revision: 0 },
        };
        match self.put_number(member, lease, vec![condition]).await {
            Ok(()) | Err(TransactionFailure::WithoutLease) => Ok(()),
            Err(TransactionFailure::Other(error)) if is_denied(&error) => {
                lease.close();
                Ok(())
            }
            Err(TransactionFailure::Other(error)) => Err(error),
        }
    }

    /// Whether every put under this lease is denied: since 3.4.44, 3.5.30 and 3.6.11, members check the rights on all keys of the lease
    /// (<https://github.com/etcd-io/etcd/pull/21677>), and the user may have lost those on one of them. Later versions check signs of
    /// life as well. Then it takes no further keys.
    pub(crate) async fn close_if_denied(&self, member: &Arc<Member>, lease: &PoolLease) -> bool {
        // Rights are checked in any case. A late request of this kind changes nothing that a later connection has written.
        let condition = self.belongs_to(member, lease);
        match self.put_number(member, lease, vec![condition]).await {
            Err(TransactionFailure::Other(error)) if is_denied(&error) => {
                lease.close();
                true
            }
            Ok(()) | Err(_) => false,
        }
    }

    /// Puts the number of the connection into the key of the lease, under these conditions.
    async fn put_number(
        &self,
        member: &Arc<Member>,
        lease: &PoolLease,
        conditions: Vec<KeyCondition>,
    ) -> Result<(), TransactionFailure> {
        let (key, value) = (self.names.of_lease(lease.id), number_text(member));
        let success = vec![KeyOperation::Put { key, value, lease: lease.id }];
        let put = Transaction { conditions, success, failure: Vec::new() };
        let answered = member.transact(&put).await;
        if matches!(answered, Err(TransactionFailure::WithoutLease)) {
            self.end(lease);
        }
        answered.map(drop)
    }

    pub(crate) fn is_of(member: &Member, seen: Option<&KeyValue>) -> bool {
        seen.is_some_and(|seen| seen.value == number_text(member))
    }

    /// The connection may put keys under this lease.
    pub(crate) fn belongs_to(&self, member: &Member, lease: &PoolLease) -> KeyCondition {
        KeyCondition::Value { key: self.names.of_lease(lease.id), value: number_text(member) }
    }

    /// Gives all leases to a new connection. This also proves that a majority answers.
    pub(crate) async fn take_over(
        self: &Arc<Self>,
        member: &Arc<Member>,
    ) -> Result<(), BackendError> {
        // All at the same time: the first answers of a connection have a time limit, whatever the round trip.
        let mut giving = JoinSet::new();
        for lease in self.all_before_their_end() {
            let (leases, member) = (self.clone(), member.clone());
            giving.spawn(async move {
                if !lease.is_current() {
                    return leases.take_away(&member, &[lease]).await.map(|()| true);
                }
                match leases.give_to(&member, &lease).await {
                    // Its locks are kept.
                    Err(error) if is_denied(&error) => {
                        lease.close();
                        leases.take_away(&member, &[lease]).await.map(|()| true)
                    }
                    given if lease.is_current() => given.map(|()| true),
                    _ => Ok(false),
                }
            });
        }
        let (mut has_no_space, mut is_confirmed) = (false, false);
        while let Some(given) = giving.join_next().await {
            match given.unwrap_or_else(|_| Err(unanswered())) {
                Ok(by_a_majority) => is_confirmed |= by_a_majority,
                Err(error) if is_without_space(&error) => has_no_space = true,
                Err(error) => return Err(error),
            }
        }
        if has_no_space {
            // Signs of life are taken, so held locks are kept.
            return self.take_away(member, &self.all_before_their_end()).await;
        }
        if is_confirmed { Ok(()) } else { self.read_own(member).await }
    }

    /// Lets no connection put keys under an existing lease until that lease is [repaired](Self::repair). A full database accepts
    /// this, and former connections put nothing once it has space again.
    async fn take_away(
        &self,
        member: &Arc<Member>,
        leases: &[Arc<PoolLease>],
    ) -> Result<(), BackendError> {
        /// The servers' default limit is 128.
        const AT_ONCE: usize = 100;
        for leases in leases.chunks(AT_ONCE) {
            let delete = |lease: &Arc<PoolLease>| KeyOperation::Delete {
                key: self.names.of_lease(lease.id),
            };
            member.transact(&Transaction::of(leases.iter().map(delete).collect())).await?;
        }
        Ok(())
    }

    /// An empty read that a majority confirms.
    pub(crate) async fn read_own(&self, member: &Arc<Member>) -> Result<(), BackendError> {
        member.transact(&self.own_read()).await?;
        Ok(())
    }

    /// A read of a key that does not exist, by the path of the leases.
    pub(crate) fn own_read(&self) -> Transaction {
        Transaction::of(vec![KeyOperation::Get { key: self.names.of_lease(0) }])
    }

    /// The lease is gone, and its keys with it.
    pub(crate) fn end(&self, lease: &PoolLease) {
        if lease.advance(LeaseUse::Over) {
            let _ = self.ended.send(lease.id);
        }
    }

    /// All leases with keys that count.
    pub(crate) fn all(&self) -> Vec<Arc<PoolLease>> {
        let mut all = self.all_before_their_end();
        all.retain(|lease| lease.is_current());
        all
    }

    fn all_before_their_end(&self) -> Vec<Arc<PoolLease>> {
        let mut all = Vec::new();
        for class in self.classes.lock().iter() {
            all.extend(
                class.leases.lock().iter().filter(|it| it.is_before(LeaseUse::Over)).cloned(),
            );
        }
        all
    }

    /// Leases that a peak has left behind, and closed leases without keys, run out.
    pub(crate) fn abandon_unused(&self) {
        let now = self.clock.now();
        self.classes.lock().iter().for_each(|class| class.abandon_unused(now));
    }

    /// The leases that the members refuse get no more signs of life.
    pub(crate) async fn deny_refused(self: &Arc<Self>, member: &Arc<Member>) {
        let mut checking = JoinSet::new();
        for lease in self.all().into_iter().filter(|lease| lease.takes_signs()) {
            let (leases, member) = (self.clone(), member.clone());
            checking.spawn(async move {
                if leases.close_if_denied(&member, &lease).await {
                    lease.deny();
                }
            });
        }
        checking.join_all().await;
    }

    pub(crate) fn find(&self, id: i64) -> Option<Arc<PoolLease>> {
        self.all().into_iter().find(|lease| lease.id == id)
    }

    /// The names of all keys that end with a lease. None, if the lease is gone.
    pub(crate) async fn keys_of(
        member: &Arc<Member>,
        id: i64,
    ) -> Result<Vec<Vec<u8>>, BackendError> {
        let answer =
            member.call("/etcdserverpb.Lease/LeaseTimeToLive", &lease::keys_of(id)).await?;
        Ok(lease::read_keys(&answer)?)
    }

    /// Ends a lease and all its keys. A lease that is already gone is not an error.
    pub(crate) async fn revoke(member: &Arc<Member>, id: i64) -> Result<(), BackendError> {
        match member.try_call("/etcdserverpb.Lease/LeaseRevoke", &lease::of_lease(id)).await {
            Ok(_) => Ok(()),
            Err(CallFailure::Refused(status)) if CallStatus::is_without_lease(&status) => Ok(()),
            Err(failure) => Err(member.failed(failure)),
        }
    }

    fn class(&self, seconds: u64) -> Arc<LeaseClass> {
        let mut classes = self.classes.lock();
        if let Some(class) = classes.iter().find(|class| class.seconds == seconds) {
            return class.clone();
        }
        let (leases, making) = (Mutex::default(), tokio::sync::Mutex::default());
        let class = Arc::new(LeaseClass { seconds, leases, making });
        classes.push(class.clone());
        class
    }
}

fn number_text(member: &Member) -> Vec<u8> {
    member.number.to_string().into_bytes()
}

fn random_id() -> Result<i64, BackendError> {
    let number = getrandom::u64().map_err(|error| {
        let message = format!("the operating system provides no randomness: {error}");
        BackendError::new(FailureKind::NotApplied, message)
    })?;
    Ok((number >> 1).max(1).cast_signed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sign_that_an_earlier_leader_has_taken_does_not_count() {
        let at = |seconds: u64| Instant::from_nanos(1_000_000_000 * seconds);
        let sign = LifeSign { sent: at(10), term: 1 };
        assert!(sign.counts(at(11), 1, at(10)));
        assert!(!sign.counts(at(11), 2, at(10)), "another leader has been elected since");
        assert!(!sign.counts(at(9), 1, at(10)), "a majority was asked before");
        assert!(!sign.counts(at(11), 1, at(11)), "it was sent before");
    }

    #[test]
    fn a_lease_takes_few_keys_and_runs_out_when_it_is_unused() {
        let at = |seconds: u64| Instant::from_nanos(1_000_000_000 * seconds);
        let lease = |id| Arc::new(PoolLease::granted(id, Duration::from_secs(33), at(1)));
        let class =
            LeaseClass { seconds: 33, leases: Mutex::default(), making: Default::default() };
        let ids = || class.leases.lock().iter().map(|lease| lease.id).collect::<Vec<_>>();
        class.add(lease(1));
        let keys: Vec<_> = (0..3).map_while(|_| class.open(2)).collect();
        assert_eq!(keys.len(), 2);
        class.add(lease(2));
        class.add(lease(3));
        class.abandon_unused(at(2));
        assert_eq!(ids(), [1, 2, 3], "they were used a moment ago");
        let key = class.open(2).filter(|lease| lease.id == 2).expect("it has room");
        class.abandon_unused(at(30));
        assert_eq!(ids(), [1, 2, 3], "a former connection may put keys under the last one");
        assert!(!class.leases.lock()[2].is_current());
        class.abandon_unused(at(60));
        assert_eq!(ids(), [1, 2], "it has run out");
        drop((keys, key));
        class.open(2).unwrap().close();
        class.abandon_unused(at(60));
        assert_eq!(ids(), [2], "the first one that takes keys stays");
        assert!(class.open(2).unwrap().takes_signs());
    }

    #[test]
    fn a_lease_exceeds_the_ttl_by_little() {
        let length = |millis| Leases::length_for(Duration::from_millis(millis)).as_secs();
        assert_eq!([300, 1_000, 1_900, 3_000, 5_000].map(length), [2, 2, 3, 4, 6]);
        assert_eq!([10_000, 30_000, 60_000, 86_400_000].map(length), [12, 33, 66, 96_000]);
        assert_eq!(length(200_000_000), 262_144);
        assert!(CLASSES.is_sorted());
    }
}
