//! Calls with several requests.

use super::*;

impl<B: Backend> Suite<B> {
    pub(super) async fn a_batch_of_acquires_answers_in_order(&self) {
        // Different from itself reversed or shifted.
        const BUSY: [usize; 6] = [0, 1, 4, 10, 11, 17];
        let theirs: Vec<_> = BUSY.iter().map(|n| claim([format!("many:{n}")], LONG)).collect();
        for claim in &theirs {
            granted(&self.other, claim).await;
        }
        let mine: Vec<_> = (0..24).map(|n| claim([format!("many:{n}")], LONG)).collect();
        let is_granted = answer(self.all_answered(&mine)).await;
        for (n, claim) in mine.iter().enumerate() {
            let is_free = !BUSY.contains(&n);
            assert_eq!(
                is_granted[n], is_free,
                "a batch of acquires answers in order: number {n} of a batch"
            );
            let held = if is_free { LeaseStatus::Held } else { LeaseStatus::NotHeld };
            assert_eq!(
                holds(&self.other, claim).await,
                held,
                "a batch of acquires takes what it answers: number {n} of a batch"
            );
        }
        free_all(&self.one, &mine).await;
        free_all(&self.one, &theirs).await;
    }

    /// Which of `claims` are granted by one call, in the first call without a failure.
    async fn all_answered(&self, claims: &[AcquireRequest]) -> Vec<bool> {
        let mut claims = claims.to_vec();
        loop {
            let outcomes = self.one.acquire(&claims).await;
            assert_eq!(outcomes.len(), claims.len(), "one outcome for each claim");
            match outcomes.into_iter().collect::<Result<Vec<_>, _>>() {
                Ok(attempts) => {
                    let is_granted = |attempt| matches!(attempt, AcquireOutcome::Acquired { .. });
                    return attempts.into_iter().map(is_granted).collect();
                }
                Err(error) => assert_temporary(&error),
            }
            claims.iter_mut().for_each(|claim| claim.attempt += 1);
            tokio::time::sleep(SHORT / 30).await;
        }
    }

    pub(super) async fn leases_of_different_sizes_are_renewed_together(&self) {
        let claims = [
            claim(["{size}:a", "{size}:b"], LONG),
            claim(["size:c"], LONG),
            claim(["{size}:d", "{size}:e", "{size}:f"], LONG),
            claim(["size:g"], LONG),
            claim(["{size}:h", "{size}:i"], LONG),
        ];
        let is_held = [false, true, true, false, true];
        for (claim, _) in claims.iter().zip(is_held).filter(|(_, is_held)| *is_held) {
            granted(&self.one, claim).await;
        }
        let expected =
            is_held.map(|is_held| if is_held { LeaseStatus::Held } else { LeaseStatus::NotHeld });
        let leases: Vec<_> = claims.iter().map(lease).collect();
        assert_eq!(
            renewed(&self.one, &leases).await,
            expected,
            "leases of different sizes are renewed together"
        );
        let expected = is_held
            .map(|is_held| if is_held { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld });
        let releases: Vec<_> = claims.iter().map(release_of).collect();
        assert_eq!(
            released(&self.one, &releases).await,
            expected,
            "leases of different sizes are released together"
        );
    }

    pub(super) async fn one_of_a_batch_has_the_key(&self) {
        let rivals = [
            claim(["{rivals}:b"], LONG),
            claim(["{rivals}:a", "{rivals}:b"], LONG),
            claim(["{rivals}:b"], LONG),
        ];
        let is_granted = answer(self.all_answered(&rivals)).await;
        let count = is_granted.iter().filter(|is_granted| **is_granted).count();
        assert!(count <= 1, "a key was granted to {count} owners in one call");
        free_all(&self.one, &rivals).await;
        let all = claim(["{rivals}:a", "{rivals}:b"], LONG);
        self.granted_within(&self.other, &all, SHORT * 20).await;
        release(&self.other, &all).await;
    }
}
