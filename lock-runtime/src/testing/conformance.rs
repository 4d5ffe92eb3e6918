//! What every store has to do, as a suite that stops at the first thing it does not.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use crate::backend::{
    Attempt, Backend, Bell, Claim, Failure, Held, LeaseRef, Owner, Release, Released, Standing,
};
use crate::bell::Ear;
use crate::clock::Clock;
use crate::fence::Fence;
use crate::key::Key;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(300);

/// Runs the suite on `one` and `other`: two connections to the same, empty store. Takes a second or two.
///
/// # Panics
/// With the rule that is broken.
pub async fn conformance<B: Backend>(one: B, other: B) {
    let suite = Suite::new(one, other);
    suite.all_but_fences().await;
    suite.fences_grow().await;
}

/// As [`conformance`], for a store that has no fences: one that is asked for must be refused.
///
/// # Panics
/// With the rule that is broken.
pub async fn conformance_without_fences<B: Backend>(one: B, other: B) {
    let suite = Suite::new(one, other);
    suite.all_but_fences().await;
    suite.fences_are_refused().await;
}

struct Suite<B> {
    one: B,
    other: B,
    clock: Clock,
    rung: Arc<Rung>,
}

/// Hears the bell of both connections.
#[derive(Default)]
struct Rung(Notify);

impl Ear for Arc<Rung> {
    fn changed(&self, _key: &str) {
        self.0.notify_one();
    }

    fn all_changed(&self) {
        self.0.notify_one();
    }

    fn called(&self, _key: &str, _owner: &Owner, _within: Duration) -> bool {
        self.0.notify_one();
        true
    }

    fn wanted(&self, _key: &str) {}
}

impl<B: Backend> Suite<B> {
    fn new(one: B, other: B) -> Self {
        let rung = Arc::new(Rung::default());
        one.attach(Bell::new(rung.clone()));
        other.attach(Bell::new(rung.clone()));
        Self { one, other, clock: Clock::runtime(), rung }
    }

    async fn all_but_fences(&self) {
        self.one_owner_at_a_time().await;
        self.a_retry_by_the_owner_succeeds_again().await;
        self.a_late_retry_for_less_time_shortens_nothing().await;
        self.only_the_owner_renews_and_releases().await;
        self.a_grant_ends_with_its_ttl().await;
        self.a_renewal_counts_from_now().await;
        self.a_kept_key_stays_taken_for_a_while().await;
        self.several_keys_are_taken_together_or_not_at_all().await;
        self.who_stands_in_line_takes_several_keys_one_by_one().await;
        self.batches_answer_in_order().await;
        self.a_change_is_told_if_the_store_can_tell().await;
        self.odd_keys_are_keys().await;
        self.a_hundred_owners_take_turns().await;
    }

    async fn one_owner_at_a_time(&self) {
        let mine = claim(["exclusive"], LONG);
        let theirs = claim(["exclusive"], LONG);
        granted(&self.one, &mine).await;
        for backend in [&self.one, &self.other] {
            let free_in = busy(backend, &theirs).await;
            assert!(
                free_in.is_none_or(|free_in| free_in <= LONG),
                "the holder's time is at most its ttl"
            );
        }
        assert_eq!(
            holds(&self.other, &mine).await,
            Held::Yes,
            "the owner is known to all connections"
        );
        assert_eq!(holds(&self.other, &theirs).await, Held::No, "a busy attempt takes nothing");
        assert_eq!(release(&self.one, &mine).await, Released::Yes, "the owner frees its lock");
        granted(&self.other, &theirs).await;
        assert_eq!(
            release(&self.other, &theirs).await,
            Released::Yes,
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
            Released::Yes,
            "one release ends all its retries"
        );
        assert_eq!(release(&self.one, &mine).await, Released::No, "a second release finds nothing");
        let theirs = claim(["retry"], LONG);
        granted(&self.one, &theirs).await;
        release(&self.one, &theirs).await;
    }

    async fn a_late_retry_for_less_time_shortens_nothing(&self) {
        let mine = claim(["late"], LONG);
        granted(&self.one, &mine).await;
        granted(&self.one, &Claim { ttl: SHORT, attempt: 1, ..mine.clone() }).await;
        tokio::time::sleep(SHORT * 2).await;
        busy(&self.other, &claim(["late"], LONG)).await;
        assert_eq!(release(&self.one, &mine).await, Released::Yes, "it is the owner's still");
    }

    async fn only_the_owner_renews_and_releases(&self) {
        let mine = claim(["owner"], LONG);
        let theirs = claim(["owner"], LONG);
        granted(&self.one, &mine).await;
        assert_eq!(release(&self.other, &theirs).await, Released::No, "a stranger frees nothing");
        assert_eq!(renew(&self.other, &theirs).await, Held::No, "a stranger renews nothing");
        assert_eq!(holds(&self.one, &mine).await, Held::Yes, "strangers change nothing");
        release(&self.one, &mine).await;
        assert_eq!(renew(&self.one, &mine).await, Held::No, "what is freed cannot be renewed");
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
        assert_eq!(renew(&self.one, &mine).await, Held::No, "what has expired cannot be renewed");
        assert_eq!(
            release(&self.one, &mine).await,
            Released::No,
            "what has expired cannot be freed"
        );
        assert_eq!(holds(&self.other, &theirs).await, Held::Yes, "the next owner is not disturbed");
        release(&self.other, &theirs).await;
    }

    async fn a_renewal_counts_from_now(&self) {
        let mine = claim(["renewal"], SHORT);
        let began = self.clock.now();
        granted(&self.one, &mine).await;
        let theirs = claim(["renewal"], LONG);
        while self.clock.now().since(began) < SHORT * 3 {
            assert_eq!(renew(&self.one, &mine).await, Held::Yes, "a held lock is renewed");
            busy(&self.other, &theirs).await;
            tokio::time::sleep(SHORT / 10).await;
        }
        self.granted_within(&self.other, &theirs, SHORT * 20).await;
        release(&self.other, &theirs).await;
    }

    async fn a_kept_key_stays_taken_for_a_while(&self) {
        let mine = claim(["kept"], LONG);
        granted(&self.one, &mine).await;
        let began = self.clock.now();
        let kept = Release { keep_for: SHORT, ..end(&mine) };
        assert_eq!(
            released(&self.one, &[kept]).await,
            [Released::Yes],
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

    async fn several_keys_are_taken_together_or_not_at_all(&self) {
        let pair = claim(["{pair}:a", "{pair}:b"], LONG);
        let overlap = claim(["{pair}:b", "{pair}:c"], LONG);
        let rest = claim(["{pair}:c"], LONG);
        granted(&self.one, &pair).await;
        busy(&self.other, &overlap).await;
        granted(&self.other, &rest).await;
        assert_eq!(
            release(&self.one, &pair).await,
            Released::Yes,
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
            Held::Yes,
            "several keys are renewed together"
        );
        release(&self.one, &overlap).await;
    }

    async fn who_stands_in_line_takes_several_keys_one_by_one(&self) {
        if !self.one.has_lines() {
            return;
        }
        for gives_up in [true, false] {
            let all = Claim { attempt: 1, ..claim(["{climb}:a", "{climb}:b"], LONG) };
            let step = |at: usize| {
                let keys = Arc::from([all.keys[at].clone()]);
                Claim { keys, in_line: true, ..all.clone() }
            };
            let theirs = claim(["{climb}:b"], LONG);
            granted(&self.other, &theirs).await;
            granted(&self.one, &step(0)).await;
            let answer = attempt(&self.one, &step(1)).await;
            let Attempt::Busy { standing: Standing::InLine { .. }, .. } = answer else {
                panic!("whoever waits stands in line: {answer:?}");
            };
            busy(&self.one, &all).await;
            assert_eq!(renew(&self.one, &step(0)).await, Held::Yes, "the first is the owner's");
            if gives_up {
                assert_eq!(
                    release(&self.one, &all).await,
                    Released::No,
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
                assert_eq!(release(&self.one, &all).await, Released::Yes, "all were the owner's");
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
        let expected: Vec<_> =
            (0..10).map(|n| if n % 2 == 0 { Held::Yes } else { Held::No }).collect();
        let renewed: Vec<_> =
            self.one.renew(&leases).await.into_iter().map(Result::unwrap).collect();
        assert_eq!(renewed, expected, "a batch of renewals answers in order");
        let expected: Vec<_> =
            (0..10).map(|n| if n % 2 == 0 { Released::Yes } else { Released::No }).collect();
        assert_eq!(
            released(&self.one, &releases).await,
            expected,
            "a batch of releases answers in order"
        );
        assert!(self.one.renew(&[]).await.is_empty(), "an empty batch has no answers");
    }

    async fn fences_grow(&self) {
        let mut last = None;
        for n in 0..200 {
            let backend = if n % 2 == 0 { &self.one } else { &self.other };
            let claim = Claim { fencing: true, ..claim([format!("fence:{}", n % 3)], LONG) };
            let fence = granted(backend, &claim).await;
            assert!(fence.is_some(), "a fence that is asked for is given");
            assert!(fence > last, "{fence:?} does not follow {last:?}");
            last = fence;
            release(backend, &claim).await;
        }
        let unfenced = claim(["fence:0"], LONG);
        assert_eq!(
            granted(&self.one, &unfenced).await,
            None,
            "a fence is given only when asked for"
        );
        release(&self.one, &unfenced).await;
    }

    async fn fences_are_refused(&self) {
        let fenced = Claim { fencing: true, ..claim(["fence"], LONG) };
        let mut answers = self.one.acquire(std::slice::from_ref(&fenced)).await;
        let answer = answers.pop();
        let is_refused = matches!(&answer, Some(Err(error)) if error.failure() == Failure::Refused);
        assert!(is_refused, "a fence that cannot be given is refused: {answer:?}");
        assert_eq!(holds(&self.other, &fenced).await, Held::No, "what is refused takes nothing");
    }

    async fn a_change_is_told_if_the_store_can_tell(&self) {
        let mine = claim(["change"], LONG);
        granted(&self.one, &mine).await;
        let theirs = claim(["change"], LONG);
        let told = match attempt(&self.other, &theirs).await {
            Attempt::Busy { standing: Standing::Outside, .. } => {
                release(&self.one, &mine).await;
                return;
            }
            Attempt::Busy { .. } => self.rung.0.notified(),
            Attempt::Granted { .. } => panic!("two owners at once"),
        };
        release(&self.one, &mine).await;
        let told = timeout(Duration::from_secs(5), told).await;
        assert!(told.is_ok(), "a release rings for those who were told that it would");
        self.granted_within(&self.other, &theirs, SHORT * 20).await;
        release(&self.other, &theirs).await;
    }

    async fn odd_keys_are_keys(&self) {
        let long = "x".repeat(512);
        let odd =
            ["a b", "a:b", "{a}b", "a{", "}", "ünï→☃", "a\r\nb", "a\0b", "*", "A", "a", &long];
        let claims: Vec<_> = odd.iter().map(|key| claim([*key], LONG)).collect();
        for claim in &claims {
            granted(&self.one, claim).await;
        }
        for claim in &claims {
            assert_eq!(
                release(&self.other, claim).await,
                Released::Yes,
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
                assert!(matches!(attempt, Attempt::Busy { .. }), "two owners at once: {attempt:?}");
            }
            inside.set(inside.get() + 1);
            release(backend, &mine).await;
        }
        assert_eq!(inside.get(), 100);
    }

    async fn granted_within(&self, backend: &B, claim: &Claim, limit: Duration) {
        let mut claim = claim.clone();
        let deadline = self.clock.now() + limit;
        loop {
            match backend.acquire(std::slice::from_ref(&claim)).await.pop() {
                Some(Ok(Attempt::Granted { .. })) => return,
                Some(Err(error)) if error.failure() == Failure::Refused => panic!("{error}"),
                // A store of several servers may be of two minds at the moment when a lock ends.
                _ => {}
            }
            assert!(self.clock.now() < deadline, "{:?} is not free after {limit:?}", claim.keys);
            claim.attempt += 1;
            tokio::time::sleep(SHORT / 30).await;
        }
    }
}

fn claim<K: Into<Key>>(keys: impl IntoIterator<Item = K>, ttl: Duration) -> Claim {
    let keys: Arc<[Key]> = keys.into_iter().map(Into::into).collect();
    let owner = Owner::random().unwrap();
    Claim { keys, owner, ttl, fencing: false, spare_fences: 0, attempt: 0, in_line: false }
}

fn lease(claim: &Claim) -> LeaseRef {
    LeaseRef { keys: claim.keys.clone(), owner: claim.owner, ttl: claim.ttl }
}

fn end(claim: &Claim) -> Release {
    Release {
        lease: lease(claim),
        keep_for: Duration::ZERO,
        successor: None,
        leave_open: Duration::ZERO,
    }
}

async fn attempt<B: Backend>(backend: &B, claim: &Claim) -> Attempt {
    one(backend.acquire(std::slice::from_ref(claim)).await)
}

async fn granted<B: Backend>(backend: &B, claim: &Claim) -> Option<Fence> {
    match attempt(backend, claim).await {
        Attempt::Granted { fence, .. } => fence,
        Attempt::Busy { .. } => panic!("{:?} should have been free", claim.keys),
    }
}

async fn busy<B: Backend>(backend: &B, claim: &Claim) -> Option<Duration> {
    match attempt(backend, claim).await {
        Attempt::Busy { free_in, .. } => free_in,
        Attempt::Granted { .. } => panic!("{:?} has two owners", claim.keys),
    }
}

async fn renew<B: Backend>(backend: &B, claim: &Claim) -> Held {
    one(backend.renew(&[lease(claim)]).await)
}

async fn release<B: Backend>(backend: &B, claim: &Claim) -> Released {
    one(backend.release(&[end(claim)]).await)
}

async fn released<B: Backend>(backend: &B, releases: &[Release]) -> Vec<Released> {
    backend.release(releases).await.into_iter().map(Result::unwrap).collect()
}

async fn holds<B: Backend>(backend: &B, claim: &Claim) -> Held {
    backend.holds(&lease(claim)).await.unwrap()
}

fn one<T, E: std::fmt::Debug>(mut outcomes: Vec<Result<T, E>>) -> T {
    assert_eq!(outcomes.len(), 1, "one outcome per entry");
    outcomes.remove(0).unwrap()
}
