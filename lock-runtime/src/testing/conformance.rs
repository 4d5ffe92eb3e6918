//! What every store has to do, as a suite that stops at the first thing it does not.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use crate::backend::notifier::NotifySink;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, FailureKind, LeaseRef, LeaseStatus,
    Notifier, Owner, ReleaseOutcome, ReleaseRequest, WaitMode,
};
use crate::base::clock::Clock;
use crate::base::fence::Fence;
use crate::base::key::Key;

mod batches;
mod dropped;
mod fences;
mod races;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(300);
/// The ttl of a lock that is renewed in time: a busy machine takes less.
const KEPT: Duration = Duration::from_millis(1_500);

/// An answer that takes longer counts as one that never comes.
const ANSWERED: Duration = Duration::from_secs(30);

/// Runs the suite on `one` and `other`: two connections to the same, empty store. Takes some seconds.
///
/// It shows that a store grants once, renews and releases by owner, forgets in time, answers batches in order,
/// survives calls that are dropped, and gives fences that grow. Requests for one key race from two connections, from one
/// connection, and from two threads of tokio's blocking pool.
///
/// A store without the capability [`fencing`](crate::backend::Capabilities::fencing) has to refuse requests for a fence.
///
/// A failure that passes by itself ([`FailureKind::NotApplied`], [`FailureKind::MaybeApplied`]) is asked again where an acquire or a
/// renewal meets it.
///
/// # Panics
/// With the rule that is broken, and if an answer takes longer than 30 seconds. Also outside of a tokio runtime.
pub async fn conformance<B: Backend>(one: B, other: B) {
    let fencing = one.capabilities().fencing;
    let suite = Arc::new(Suite::new(one, other));
    suite.all_but_fences().await;
    if fencing {
        suite.all_of_fences().await;
    } else {
        suite.fences_are_refused().await;
    }
}

struct Suite<B> {
    one: B,
    other: B,
    clock: Clock,
    rung: Arc<Rung>,
}

/// Hears the notifier of both connections, as far as it is about [`CHANGING`].
#[derive(Default)]
struct Rung(Notify);

/// The key of which changes are told.
const CHANGING: &str = "change";

impl NotifySink for Arc<Rung> {
    fn key_changed(&self, key: &str) {
        if key == CHANGING {
            self.0.notify_one();
        }
    }

    fn resync(&self) {
        self.0.notify_one();
    }

    fn head_of_queue(&self, key: &str, _owner: &Owner, _within: Duration) -> bool {
        self.key_changed(key);
        true
    }

    fn contended(&self, _key: &str) {}
}

impl<B: Backend> Suite<B> {
    fn new(one: B, other: B) -> Self {
        let rung = Arc::new(Rung::default());
        one.subscribe(Notifier::new(rung.clone()));
        other.subscribe(Notifier::new(rung.clone()));
        Self { one, other, clock: Clock::runtime(), rung }
    }

    async fn all_but_fences(self: &Arc<Self>) {
        self.it_is_healthy().await;
        self.one_owner_at_a_time().await;
        self.a_retry_by_the_owner_succeeds_again().await;
        self.only_the_owner_renews_and_releases().await;
        self.several_keys_are_taken_together_or_not_at_all().await;
        self.who_stands_in_line_takes_several_keys_one_by_one().await;
        self.batches_answer_in_order().await;
        self.a_batch_of_acquires_answers_in_order().await;
        self.leases_of_different_sizes_are_renewed_together().await;
        self.one_of_a_batch_has_the_key().await;
        self.a_change_is_told_if_the_store_can_tell().await;
        self.odd_keys_are_keys().await;
        self.a_hundred_owners_take_turns().await;
        self.a_dropped_call_disturbs_no_other().await;
        self.one_of_those_that_ask_at_once_has_a_free_key().await;
        self.one_of_those_that_ask_at_once_has_several_keys().await;
        self.one_of_two_threads_has_a_free_key().await;
        self.a_late_renewal_takes_nothing_from_the_next_owner().await;
        self.a_late_release_takes_nothing_from_the_next_owner().await;
        // They wait rather than ask.
        tokio::join!(
            self.a_late_retry_for_less_time_shortens_nothing(),
            self.a_grant_ends_with_its_ttl(),
            self.a_grant_that_has_ended_stays_so(),
            self.a_renewal_counts_from_now(),
            self.every_key_of_a_lease_is_renewed(),
            self.one_of_several_keys_is_lost(),
            self.a_kept_key_stays_taken_for_a_while(),
            self.a_min_hold_keeps_the_keys_from_the_grant_on(),
            self.several_keys_are_kept_past_their_ttl(),
            self.only_the_owner_keeps(),
            self.an_end_of_the_ttl_is_found_as_told(),
            self.one_of_those_that_ask_at_once_has_an_expired_key(),
        );
    }

    async fn it_is_healthy(&self) {
        for backend in [&self.one, &self.other] {
            let health = answer(backend.health()).await;
            assert!(health.is_ok(), "a store that serves is healthy: {health:?}");
        }
    }

    async fn one_owner_at_a_time(&self) {
        let mine = claim(["exclusive"], LONG);
        let theirs = claim(["exclusive"], LONG);
        granted(&self.one, &mine).await;
        for backend in [&self.one, &self.other] {
            let expires_in = busy(backend, &theirs).await;
            assert!(
                expires_in.is_none_or(|expires_in| expires_in <= LONG),
                "the holder's time is at most its ttl"
            );
        }
        assert_eq!(
            holds(&self.other, &mine).await,
            LeaseStatus::Held,
            "the owner is known to all connections"
        );
        assert_eq!(
            holds(&self.other, &theirs).await,
            LeaseStatus::NotHeld,
            "a busy attempt takes nothing"
        );
        assert_eq!(
            release(&self.one, &mine).await,
            ReleaseOutcome::Freed,
            "the owner frees its lock"
        );
        granted(&self.other, &theirs).await;
        assert_eq!(
            release(&self.other, &theirs).await,
            ReleaseOutcome::Freed,
            "the next owner frees its lock"
        );
    }

    async fn a_retry_by_the_owner_succeeds_again(&self) {
        let mut mine = claim(["retry"], LONG);
        granted(&self.one, &mine).await;
        mine.attempt = 1;
        granted(&self.one, &mine).await;
        mine.attempt = 2;
        granted(&self.other, &mine).await;
        assert_eq!(
            release(&self.one, &mine).await,
            ReleaseOutcome::Freed,
            "one release ends all its retries"
        );
        assert_eq!(
            release(&self.one, &mine).await,
            ReleaseOutcome::NotHeld,
            "a second release finds nothing"
        );
        let theirs = claim(["retry"], LONG);
        granted(&self.one, &theirs).await;
        release(&self.one, &theirs).await;
    }

    async fn a_late_retry_for_less_time_shortens_nothing(&self) {
        let mine = claim(["late"], LONG);
        granted(&self.one, &mine).await;
        granted(&self.one, &AcquireRequest { ttl: SHORT, attempt: 1, ..mine.clone() }).await;
        tokio::time::sleep(SHORT * 2).await;
        busy(&self.other, &claim(["late"], LONG)).await;
        assert_eq!(
            release(&self.one, &mine).await,
            ReleaseOutcome::Freed,
            "it is the owner's still"
        );
    }

    async fn only_the_owner_renews_and_releases(&self) {
        let mine = claim(["owner"], LONG);
        let theirs = claim(["owner"], LONG);
        granted(&self.one, &mine).await;
        assert_eq!(
            release(&self.other, &theirs).await,
            ReleaseOutcome::NotHeld,
            "a stranger frees nothing"
        );
        assert_eq!(
            renew(&self.other, &theirs).await,
            LeaseStatus::NotHeld,
            "a stranger renews nothing"
        );
        assert_eq!(holds(&self.one, &mine).await, LeaseStatus::Held, "strangers change nothing");
        release(&self.one, &mine).await;
        assert_eq!(
            renew(&self.one, &mine).await,
            LeaseStatus::NotHeld,
            "what is freed cannot be renewed"
        );
        let theirs = claim(["owner"], LONG);
        granted(&self.other, &theirs).await;
        release(&self.other, &theirs).await;
    }

    async fn a_grant_ends_with_its_ttl(&self) {
        let mine = claim(["expiry"], SHORT);
        let began = self.clock.now();
        granted(&self.one, &mine).await;
        let theirs = claim(["expiry"], LONG);
        self.granted_within(&self.other, &theirs, SHORT * 20).await;
        let lasted = self.clock.now().since(began);
        // Stores may round an expiry by a millisecond; belief ends two before.
        assert!(
            lasted + Duration::from_millis(2) >= SHORT,
            "a grant of {SHORT:?} lasted {lasted:?}"
        );
        assert_eq!(
            renew(&self.one, &mine).await,
            LeaseStatus::NotHeld,
            "what has expired cannot be renewed"
        );
        assert_eq!(
            release(&self.one, &mine).await,
            ReleaseOutcome::NotHeld,
            "what has expired cannot be freed"
        );
        assert_eq!(
            holds(&self.other, &theirs).await,
            LeaseStatus::Held,
            "the next owner is not disturbed"
        );
        release(&self.other, &theirs).await;
    }

    async fn a_renewal_counts_from_now(&self) {
        let mine = claim(["renewal"], KEPT);
        let began = self.clock.now();
        granted(&self.one, &mine).await;
        let theirs = claim(["renewal"], LONG);
        while self.clock.now().since(began) < KEPT * 2 {
            assert_eq!(renew(&self.one, &mine).await, LeaseStatus::Held, "a held lock is renewed");
            busy(&self.other, &theirs).await;
            tokio::time::sleep(SHORT / 10).await;
        }
        self.granted_within(&self.other, &theirs, KEPT * 5).await;
        release(&self.other, &theirs).await;
    }

    async fn a_grant_that_has_ended_stays_so(&self) {
        let mine = claim(["ended"], SHORT);
        granted(&self.one, &mine).await;
        let theirs = claim(["ended"], LONG);
        self.granted_within(&self.other, &theirs, SHORT * 20).await;
        release(&self.other, &theirs).await;
        assert_eq!(
            holds(&self.one, &mine).await,
            LeaseStatus::NotHeld,
            "what has expired is not held"
        );
        // Free, it may be taken again: a quorum does so where a node has lost it.
        if renew(&self.one, &mine).await == LeaseStatus::Held {
            assert_eq!(
                holds(&self.other, &mine).await,
                LeaseStatus::Held,
                "what is renewed is held"
            );
            release(&self.one, &mine).await;
        }
        let theirs = claim(["ended"], LONG);
        granted(&self.other, &theirs).await;
        release(&self.other, &theirs).await;
    }

    async fn every_key_of_a_lease_is_renewed(&self) {
        let mine = claim(["{every}:a", "{every}:b", "{every}:c"], KEPT);
        granted(&self.one, &mine).await;
        let longer = AcquireRequest { ttl: LONG, ..mine.clone() };
        assert_eq!(renew(&self.one, &longer).await, LeaseStatus::Held, "a held lock is renewed");
        tokio::time::sleep(KEPT + SHORT).await;
        for key in mine.keys.iter() {
            let answer = attempt(&self.other, &claim([key.clone()], LONG)).await;
            assert!(
                matches!(answer, AcquireOutcome::Contended { .. }),
                "a renewal extends every key, to the ttl that it names: {key} is free"
            );
        }
        assert_eq!(
            holds(&self.other, &mine).await,
            LeaseStatus::Held,
            "several keys are renewed together"
        );
        release(&self.one, &mine).await;
    }

    async fn one_of_several_keys_is_lost(&self) {
        for lost in 0..2 {
            let mine = claim(["{lost}:a", "{lost}:b"], LONG);
            granted(&self.one, &mine).await;
            let one = |keys: &[Key]| AcquireRequest { keys: Arc::from(keys), ..mine.clone() };
            release(&self.one, &one(&mine.keys[lost..=lost])).await;
            let theirs = claim([mine.keys[lost].clone()], LONG);
            granted(&self.other, &theirs).await;
            let answers = (holds(&self.one, &mine).await, renew(&self.one, &mine).await);
            assert_eq!(
                answers,
                (LeaseStatus::NotHeld, LeaseStatus::NotHeld),
                "of several keys all are the owner's, or the lease is lost"
            );
            assert_eq!(
                release(&self.one, &mine).await,
                ReleaseOutcome::NotHeld,
                "a release tells that one of several keys was not the owner's"
            );
            let is_theirs = holds(&self.other, &theirs).await;
            assert_eq!(
                is_theirs,
                LeaseStatus::Held,
                "the owner of one of several keys is not disturbed"
            );
            release(&self.one, &one(&mine.keys[1 - lost..=1 - lost])).await;
            release(&self.other, &theirs).await;
        }
    }

    async fn several_keys_are_kept_past_their_ttl(&self) {
        let mine = claim(["{kept}:a", "{kept}:b"], SHORT);
        let free_after = SHORT * 3;
        let began = self.clock.now();
        granted(&self.one, &mine).await;
        let kept = ReleaseRequest { free_after, ..end(&mine) };
        assert_eq!(
            released(&self.one, &[kept]).await,
            [ReleaseOutcome::Freed],
            "a release may keep keys"
        );
        while self.clock.now().since(began) < SHORT * 2 {
            // Each for itself: both at once would be busy for the sake of one.
            for key in mine.keys.iter() {
                let theirs = claim([key.clone()], LONG);
                if let AcquireOutcome::Acquired { .. } = attempt(&self.other, &theirs).await {
                    let is_over = self.clock.now().since(began) >= free_after;
                    assert!(is_over, "a release keeps every key past its ttl: {key} is free");
                    release(&self.other, &theirs).await;
                }
            }
            tokio::time::sleep(SHORT / 4).await;
        }
        for key in mine.keys.iter() {
            let theirs = claim([key.clone()], LONG);
            self.granted_within(&self.other, &theirs, SHORT * 20).await;
            release(&self.other, &theirs).await;
        }
    }

    async fn only_the_owner_keeps(&self) {
        let mine = claim(["keeper"], LONG);
        granted(&self.one, &mine).await;
        let theirs = ReleaseRequest { free_after: SHORT / 2, ..end(&claim(["keeper"], LONG)) };
        assert_eq!(
            released(&self.other, &[theirs]).await,
            [ReleaseOutcome::NotHeld],
            "a stranger keeps nothing taken"
        );
        tokio::time::sleep(SHORT).await;
        assert_eq!(
            holds(&self.one, &mine).await,
            LeaseStatus::Held,
            "a stranger's release changes no owner's time"
        );
        release(&self.one, &mine).await;
    }

    /// What a store promises to tell, and when to ask again otherwise, is enough to find a lock whose holder is
    /// gone.
    async fn an_end_of_the_ttl_is_found_as_told(&self) {
        granted(&self.one, &claim([CHANGING], SHORT)).await;
        let mut theirs = AcquireRequest {
            enqueue: self.other.capabilities().wait_queue,
            ..claim([CHANGING], LONG)
        };
        let found = async {
            loop {
                let told = self.rung.0.notified();
                let retry_after = match attempt(&self.other, &theirs).await {
                    AcquireOutcome::Acquired { .. } => return,
                    AcquireOutcome::Contended { wait_mode: WaitMode::Poll, .. } => SHORT / 10,
                    AcquireOutcome::Contended {
                        wait_mode:
                            WaitMode::Watch { retry_after } | WaitMode::Queued { retry_after },
                        ..
                    } => retry_after,
                };
                // Told, or not: it is asked again.
                let _ = timeout(retry_after, told).await;
                theirs.attempt += 1;
            }
        };
        let found = timeout(SHORT * 20, found).await;
        assert!(found.is_ok(), "an end of the ttl is told, or found by asking again when told to");
        release(&self.other, &theirs).await;
    }

    async fn a_kept_key_stays_taken_for_a_while(&self) {
        let mine = claim(["kept"], LONG);
        granted(&self.one, &mine).await;
        let began = self.clock.now();
        let kept = ReleaseRequest { free_after: SHORT, ..end(&mine) };
        assert_eq!(
            released(&self.one, &[kept]).await,
            [ReleaseOutcome::Freed],
            "a release may keep the key"
        );
        let theirs = claim(["kept"], LONG);
        busy(&self.other, &theirs).await;
        self.granted_within(&self.other, &theirs, SHORT * 20).await;
        let kept_for = self.clock.now().since(began);
        assert!(
            kept_for + Duration::from_millis(2) >= SHORT,
            "kept for {kept_for:?} instead of {SHORT:?}"
        );
        release(&self.other, &theirs).await;
    }

    async fn a_min_hold_keeps_the_keys_from_the_grant_on(&self) {
        let hold = SHORT * 4;
        let mine =
            AcquireRequest { min_hold: hold, ..claim(["{min_hold}:a", "{min_hold}:b"], SHORT) };
        let theirs = claim(["{min_hold}:b"], LONG);
        let began = self.clock.now();
        granted(&self.one, &mine).await;
        let late = AcquireRequest { min_hold: Duration::ZERO, attempt: 1, ..mine.clone() };
        granted(&self.one, &late).await;
        let min_hold = hold.saturating_sub(self.clock.now().since(began));
        let left = LeaseRef { min_hold, ..lease(&mine) };
        let renewed = answer(self.one.renew(&[left])).await;
        let renewed: Vec<_> = renewed.into_iter().map(Result::unwrap).collect();
        assert_eq!(
            renewed,
            [LeaseStatus::Held],
            "what is kept for a min_hold is renewed like any other"
        );
        // From here on nothing is heard of the owner.
        self.granted_within(&self.other, &theirs, SHORT * 40).await;
        let lasted = self.clock.now().since(began);
        assert!(
            lasted + Duration::from_millis(2) >= hold,
            "a min_hold of {hold:?} with a ttl of {SHORT:?} was over after {lasted:?}"
        );
        release(&self.other, &theirs).await;
        let mine = AcquireRequest { min_hold: LONG, ..claim(["{min_hold}:b"], SHORT) };
        granted(&self.one, &mine).await;
        assert_eq!(
            release(&self.one, &mine).await,
            ReleaseOutcome::Freed,
            "a release ends a min_hold"
        );
        let theirs = claim(["{min_hold}:b"], LONG);
        granted(&self.other, &theirs).await;
        release(&self.other, &theirs).await;
    }

    async fn several_keys_are_taken_together_or_not_at_all(&self) {
        let pair = claim(["{pair}:a", "{pair}:b"], LONG);
        let overlap = claim(["{pair}:b", "{pair}:c"], LONG);
        let rest = claim(["{pair}:c"], LONG);
        granted(&self.one, &pair).await;
        busy(&self.other, &overlap).await;
        granted(&self.other, &rest).await;
        assert_eq!(
            release(&self.one, &pair).await,
            ReleaseOutcome::Freed,
            "several keys are freed together"
        );
        busy(&self.one, &overlap).await;
        let free = claim(["{pair}:b"], LONG);
        granted(&self.one, &free).await;
        release(&self.one, &free).await;
        release(&self.other, &rest).await;
        granted(&self.one, &overlap).await;
        assert_eq!(
            renew(&self.one, &overlap).await,
            LeaseStatus::Held,
            "several keys are renewed together"
        );
        release(&self.one, &overlap).await;
    }

    async fn who_stands_in_line_takes_several_keys_one_by_one(&self) {
        if !self.one.capabilities().wait_queue {
            return;
        }
        for gives_up in [true, false] {
            let all = AcquireRequest { attempt: 1, ..claim(["{climb}:a", "{climb}:b"], LONG) };
            let step = |at: usize| {
                let keys = Arc::from([all.keys[at].clone()]);
                AcquireRequest { keys, enqueue: true, ..all.clone() }
            };
            let theirs = claim(["{climb}:b"], LONG);
            granted(&self.other, &theirs).await;
            granted(&self.one, &step(0)).await;
            let answer = attempt(&self.one, &step(1)).await;
            let AcquireOutcome::Contended { wait_mode: WaitMode::Queued { .. }, .. } = answer
            else {
                panic!("whoever waits stands in line: {answer:?}");
            };
            busy(&self.one, &all).await;
            assert_eq!(
                renew(&self.one, &step(0)).await,
                LeaseStatus::Held,
                "the first is the owner's"
            );
            if gives_up {
                assert_eq!(
                    release(&self.one, &all).await,
                    ReleaseOutcome::NotHeld,
                    "not all were the owner's"
                );
                let first = claim(["{climb}:a"], LONG);
                granted(&self.other, &first).await;
                release(&self.other, &first).await;
                release(&self.other, &theirs).await;
                let second = claim(["{climb}:b"], LONG);
                granted(&self.other, &second).await;
                release(&self.other, &second).await;
            } else {
                release(&self.other, &theirs).await;
                granted(&self.one, &step(1)).await;
                granted(&self.one, &all).await;
                assert_eq!(
                    release(&self.one, &all).await,
                    ReleaseOutcome::Freed,
                    "all were the owner's"
                );
            }
        }
    }

    async fn batches_answer_in_order(&self) {
        let claims: Vec<_> = (0..10).map(|n| claim([format!("batch:{n}")], LONG)).collect();
        for claim in claims.iter().step_by(2) {
            granted(&self.one, claim).await;
        }
        let leases: Vec<_> = claims.iter().map(lease).collect();
        let releases: Vec<_> = claims.iter().map(end).collect();
        let expected: Vec<_> = (0..10)
            .map(|n| if n % 2 == 0 { LeaseStatus::Held } else { LeaseStatus::NotHeld })
            .collect();
        assert_eq!(
            renewed(&self.one, &leases).await,
            expected,
            "a batch of renewals answers in order"
        );
        let expected: Vec<_> = (0..10)
            .map(|n| if n % 2 == 0 { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld })
            .collect();
        assert_eq!(
            released(&self.one, &releases).await,
            expected,
            "a batch of releases answers in order"
        );
        assert!(self.one.acquire(&[]).await.is_empty(), "an empty batch has no answers");
        assert!(self.one.renew(&[]).await.is_empty(), "an empty batch has no answers");
        assert!(self.one.release(&[]).await.is_empty(), "an empty batch has no answers");
    }

    async fn a_change_is_told_if_the_store_can_tell(&self) {
        let mine = claim([CHANGING], LONG);
        granted(&self.one, &mine).await;
        let theirs = claim([CHANGING], LONG);
        let mut asked = theirs.clone();
        let told = loop {
            match attempt(&self.other, &asked).await {
                AcquireOutcome::Contended { wait_mode: WaitMode::Poll, .. } => {
                    release(&self.one, &mine).await;
                    return;
                }
                // A first answer may be one for a single try; and behind a short one the next is the full one.
                AcquireOutcome::Contended {
                    wait_mode: WaitMode::Watch { retry_after }, ..
                } if asked.attempt == 0 || (retry_after.is_zero() && asked.attempt < 10) => {
                    asked.attempt += 1;
                }
                AcquireOutcome::Contended { .. } => break self.rung.0.notified(),
                AcquireOutcome::Acquired { .. } => panic!("two owners at once"),
            }
        };
        release(&self.one, &mine).await;
        let told = timeout(Duration::from_secs(5), told).await;
        assert!(told.is_ok(), "a release rings for those who were told that it would");
        self.granted_within(&self.other, &theirs, SHORT * 20).await;
        release(&self.other, &theirs).await;
    }

    async fn odd_keys_are_keys(&self) {
        let long = "x".repeat(511);
        let (long, other_end) = (format!("{long}1"), format!("{long}2"));
        let odd = [
            "a b",
            "a b ",
            "a:b",
            "{a}b",
            "a{",
            "}",
            "ünï→☃",
            "u\u{308}nï→☃",
            "uni→☃",
            "a\r\nb",
            "a\0b",
            "a\0c",
            "*",
            "A",
            "a",
            &long,
            &other_end,
        ];
        let claims: Vec<_> = odd.iter().map(|key| claim([*key], LONG)).collect();
        for claim in &claims {
            let answer = attempt(&self.one, claim).await;
            let is_granted = matches!(answer, AcquireOutcome::Acquired { .. });
            assert!(is_granted, "{:?} is a key of its own", claim.keys);
        }
        for claim in &claims {
            assert_eq!(
                release(&self.other, claim).await,
                ReleaseOutcome::Freed,
                "{:?} is its own key",
                claim.keys
            );
        }
    }

    async fn a_hundred_owners_take_turns(&self) {
        let inside = std::cell::Cell::new(0);
        for n in 0..100 {
            let backend = if n % 2 == 0 { &self.one } else { &self.other };
            let mine = claim(["turns"], LONG);
            granted(backend, &mine).await;
            let (rival, next) = (claim(["turns"], LONG), claim(["turns"], LONG));
            let (rival, next) =
                tokio::join!(attempt(&self.one, &rival), attempt(&self.other, &next));
            for attempt in [rival, next] {
                assert!(
                    matches!(attempt, AcquireOutcome::Contended { .. }),
                    "two owners at once: {attempt:?}"
                );
            }
            inside.set(inside.get() + 1);
            release(backend, &mine).await;
        }
        assert_eq!(inside.get(), 100);
    }

    /// The fence, if one was asked for, of the grant that ends a wait.
    async fn granted_within(
        &self,
        backend: &B,
        claim: &AcquireRequest,
        limit: Duration,
    ) -> Option<Fence> {
        let mut claim = claim.clone();
        let deadline = self.clock.now() + limit;
        loop {
            match one(answer(backend.acquire(std::slice::from_ref(&claim))).await) {
                Ok(AcquireOutcome::Acquired { fence, .. }) => return fence,
                // A store of several servers may be of two minds at the moment when a lock ends.
                Ok(AcquireOutcome::Contended { .. }) => {}
                Err(error) => passes(&error),
            }
            assert!(self.clock.now() < deadline, "{:?} is not free after {limit:?}", claim.keys);
            claim.attempt += 1;
            tokio::time::sleep(SHORT / 30).await;
        }
    }
}

fn claim<K: Into<Key>>(keys: impl IntoIterator<Item = K>, ttl: Duration) -> AcquireRequest {
    let keys: Arc<[Key]> = keys.into_iter().map(Into::into).collect();
    let owner = Owner::random().unwrap();
    let min_hold = Duration::ZERO;
    AcquireRequest {
        keys,
        owner,
        ttl,
        min_hold,
        fencing: false,
        extra_fences: 0,
        attempt: 0,
        enqueue: false,
    }
}

fn lease(claim: &AcquireRequest) -> LeaseRef {
    let AcquireRequest { keys, owner, ttl, min_hold, .. } = claim.clone();
    LeaseRef { keys, owner, ttl, min_hold }
}

fn end(claim: &AcquireRequest) -> ReleaseRequest {
    ReleaseRequest {
        lease: lease(claim),
        free_after: Duration::ZERO,
        successor: None,
        barging_window: Duration::ZERO,
    }
}

/// One answer that counts. A failure that passes by itself is asked again, as a pool does.
async fn attempt<B: Backend>(backend: &B, claim: &AcquireRequest) -> AcquireOutcome {
    let mut claim = claim.clone();
    let asked = async {
        loop {
            match one(backend.acquire(std::slice::from_ref(&claim)).await) {
                Ok(attempt) => return attempt,
                Err(error) => passes(&error),
            }
            claim.attempt += 1;
            tokio::time::sleep(SHORT / 30).await;
        }
    };
    answer(asked).await
}

/// A store of several servers may be of two minds at the moment when a lock ends; then it is asked again.
async fn granted<B: Backend>(backend: &B, claim: &AcquireRequest) -> Option<Fence> {
    let mut claim = claim.clone();
    for _ in 0..60 {
        if let AcquireOutcome::Acquired { fence, .. } = attempt(backend, &claim).await {
            return fence;
        }
        claim.attempt += 1;
        tokio::time::sleep(SHORT / 30).await;
    }
    panic!("{:?} should have been free", claim.keys);
}

async fn busy<B: Backend>(backend: &B, claim: &AcquireRequest) -> Option<Duration> {
    match attempt(backend, claim).await {
        AcquireOutcome::Contended { expires_in, .. } => expires_in,
        AcquireOutcome::Acquired { .. } => panic!("{:?} has two owners", claim.keys),
    }
}

/// Asks once. A failure that passes by itself is no grant.
async fn takes<B: Backend>(backend: &B, claim: &AcquireRequest) -> bool {
    match one(answer(backend.acquire(std::slice::from_ref(claim))).await) {
        Ok(attempt) => matches!(attempt, AcquireOutcome::Acquired { .. }),
        Err(error) => {
            passes(&error);
            false
        }
    }
}

async fn renew<B: Backend>(backend: &B, claim: &AcquireRequest) -> LeaseStatus {
    one(renewed(backend, &[lease(claim)]).await)
}

async fn renewed<B: Backend>(backend: &B, leases: &[LeaseRef]) -> Vec<LeaseStatus> {
    let asked = async {
        loop {
            let outcomes = backend.renew(leases).await;
            assert_eq!(outcomes.len(), leases.len(), "one outcome for each lease");
            match outcomes.into_iter().collect::<Result<_, _>>() {
                Ok(held) => return held,
                Err(error) => passes(&error),
            }
            tokio::time::sleep(SHORT / 30).await;
        }
    };
    answer(asked).await
}

async fn release<B: Backend>(backend: &B, claim: &AcquireRequest) -> ReleaseOutcome {
    one(released(backend, &[end(claim)]).await)
}

async fn released<B: Backend>(backend: &B, releases: &[ReleaseRequest]) -> Vec<ReleaseOutcome> {
    let outcomes = answer(backend.release(releases)).await;
    assert_eq!(outcomes.len(), releases.len(), "one outcome for each release");
    outcomes.into_iter().map(Result::unwrap).collect()
}

async fn holds<B: Backend>(backend: &B, claim: &AcquireRequest) -> LeaseStatus {
    answer(backend.is_held(&lease(claim))).await.unwrap()
}

/// Any of the outcomes of a race is fine, and what it left is freed.
async fn free_all<B: Backend>(backend: &B, claims: &[AcquireRequest]) {
    let releases: Vec<_> = claims.iter().map(end).collect();
    released(backend, &releases).await;
}

async fn answer<T>(asked: impl Future<Output = T>) -> T {
    match timeout(ANSWERED, asked).await {
        Ok(answer) => answer,
        Err(_) => panic!("the store has not answered within {ANSWERED:?}"),
    }
}

/// # Panics
/// If `error` does not pass by itself.
fn passes(error: &BackendError) {
    assert!(error.kind() != FailureKind::Rejected, "the store refuses: {error}");
}

fn one<T>(mut outcomes: Vec<T>) -> T {
    assert_eq!(outcomes.len(), 1, "one outcome for each entry");
    outcomes.remove(0)
}
