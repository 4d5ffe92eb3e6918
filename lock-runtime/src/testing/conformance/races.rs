//! Concurrent requests.

use std::sync::Barrier;

use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

use super::*;

/// How often a race is repeated. Over a network each order of the steps occurs in fewer rounds.
const ROUNDS: usize = 10;

impl<B: Backend> Suite<B> {
    pub(super) async fn one_of_concurrent_requests_has_a_free_key(&self) {
        for n in 0..ROUNDS {
            let rivals = [(); 3].map(|()| claim([format!("race:{n}")], LONG));
            self.at_most_one_of(&rivals, "a free key").await;
        }
    }

    pub(super) async fn one_of_concurrent_requests_has_an_expired_key(&self) {
        let keys: Vec<_> = (0..ROUNDS).map(|n| Key::from(format!("over:{n}"))).collect();
        for key in &keys {
            granted(&self.one, &claim([key.clone()], SHORT)).await;
        }
        tokio::time::sleep(SHORT * 2).await;
        for key in keys {
            let rivals = [(); 3].map(|()| claim([key.clone()], LONG));
            self.at_most_one_of(&rivals, "an expired key").await;
        }
    }

    pub(super) async fn one_of_concurrent_requests_has_several_keys(&self) {
        for n in 0..ROUNDS {
            let [a, b, c] = ["a", "b", "c"].map(|key| format!("{{race:{n}}}:{key}"));
            // Any two of them share a key.
            let rivals =
                [[&a, &b], [&b, &c], [&a, &c]].map(|pair| claim(pair.map(|k| k.as_str()), LONG));
            self.at_most_one_of(&rivals, "one of several keys").await;
            let all = claim([a, b, c], LONG);
            self.granted_within(&self.one, &all, SHORT * 20).await;
            release(&self.one, &all).await;
        }
    }

    /// No grant is correct too: servers of one store may disagree.
    async fn at_most_one_of(&self, rivals: &[AcquireRequest; 3], what: &str) {
        let [a, b, c] = rivals;
        let is_granted =
            tokio::join!(takes(&self.one, a), takes(&self.other, b), takes(&self.one, c));
        let count =
            [is_granted.0, is_granted.1, is_granted.2].into_iter().filter(|yes| *yes).count();
        assert!(count <= 1, "{what} was granted to {count} concurrent owners");
        free_all(&self.other, rivals).await;
    }

    /// As in a pool, where the first poll of an acquire runs on the thread of the caller.
    pub(super) async fn one_of_two_threads_has_a_free_key(self: &Arc<Self>) {
        // Without I/O it takes many rounds until two requests overlap.
        let rounds = if self.one.capabilities().local { 1_000 } else { 2 * ROUNDS };
        let start = Arc::new(Barrier::new(2));
        let run = |is_first: bool| {
            let (suite, start, runtime) = (self.clone(), start.clone(), Handle::current());
            spawn_blocking(move || {
                let backend = if is_first { &suite.one } else { &suite.other };
                let claims: Vec<_> =
                    (0..rounds).map(|n| claim([format!("thread:{n}")], LONG)).collect();
                start.wait();
                let mut is_granted = Vec::with_capacity(rounds);
                for claim in &claims {
                    is_granted.push(runtime.block_on(takes(backend, claim)));
                }
                (claims, is_granted)
            })
        };
        let (first, second) = tokio::join!(run(true), run(false));
        let ((claims, first), (others, second)) = (first.unwrap(), second.unwrap());
        let twice = first.iter().zip(&second).filter(|(first, second)| **first && **second).count();
        assert_eq!(
            twice, 0,
            "of {rounds} keys that two threads requested, {twice} were granted to both"
        );
        for claims in [claims, others] {
            for claims in claims.chunks(100) {
                free_all(&self.one, claims).await;
            }
        }
    }

    pub(super) async fn a_late_renewal_takes_nothing_from_the_next_owner(&self) {
        for n in 0..ROUNDS {
            let [mine, theirs] = [(); 2].map(|()| claim([format!("renewing:{n}")], LONG));
            granted(&self.one, &mine).await;
            let _ = tokio::join!(renew(&self.one, &mine), self.hand_over(&mine, &theirs));
            assert_eq!(
                holds(&self.one, &theirs).await,
                LeaseStatus::Held,
                "a renewal that meets the release takes nothing from the next owner"
            );
            assert_eq!(
                holds(&self.one, &mine).await,
                LeaseStatus::NotHeld,
                "what is freed stays free"
            );
            release(&self.one, &theirs).await;
        }
    }

    pub(super) async fn a_late_release_takes_nothing_from_the_next_owner(&self) {
        for n in 0..ROUNDS {
            let [mine, theirs] = [(); 2].map(|()| claim([format!("releasing:{n}")], LONG));
            granted(&self.one, &mine).await;
            let _ = tokio::join!(release(&self.one, &mine), self.hand_over(&mine, &theirs));
            assert_eq!(
                holds(&self.one, &theirs).await,
                LeaseStatus::Held,
                "a repeated release frees nothing of the next owner"
            );
            release(&self.one, &theirs).await;
        }
    }

    async fn hand_over(&self, mine: &AcquireRequest, theirs: &AcquireRequest) {
        release(&self.other, mine).await;
        self.granted_within(&self.other, theirs, SHORT * 20).await;
    }
}
