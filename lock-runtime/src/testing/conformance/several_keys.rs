//! Requests and leases with several keys.

use super::*;

impl<B: Backend> Suite<B> {
    pub(super) async fn several_keys_are_taken_together_or_not_at_all(&self) {
        let pair = claim(["{pair}:a", "{pair}:b"], LONG);
        let overlap = claim(["{pair}:b", "{pair}:c"], LONG);
        let rest = claim(["{pair}:c"], LONG);
        granted(&self.one, &pair).await;
        contended(&self.other, &overlap).await;
        granted(&self.other, &rest).await;
        assert_eq!(
            release(&self.one, &pair).await,
            ReleaseOutcome::Freed,
            "several keys are freed together"
        );
        contended(&self.one, &overlap).await;
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

    pub(super) async fn every_key_of_a_lease_is_renewed(&self) {
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

    pub(super) async fn one_of_several_keys_is_lost(&self) {
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
                "a release reports that one of several keys was not the owner's"
            );
            let is_held = holds(&self.other, &theirs).await;
            assert_eq!(
                is_held,
                LeaseStatus::Held,
                "the owner of one of several keys keeps its lease"
            );
            release(&self.other, &theirs).await;
            // The release has freed the key that was the owner's.
            let left = claim([mine.keys[1 - lost].clone()], LONG);
            granted(&self.other, &left).await;
            release(&self.other, &left).await;
        }
    }

    pub(super) async fn a_queued_owner_takes_several_keys_one_by_one(&self) {
        if !self.one.capabilities().wait_queue {
            return;
        }
        for cancels in [true, false] {
            let all = AcquireRequest { attempt: 1, ..claim(["{steps}:a", "{steps}:b"], LONG) };
            let step = |at: usize| {
                let keys = Arc::from([all.keys[at].clone()]);
                AcquireRequest { keys, enqueue: true, ..all.clone() }
            };
            let theirs = claim(["{steps}:b"], LONG);
            granted(&self.other, &theirs).await;
            granted(&self.one, &step(0)).await;
            let answer = attempt(&self.one, &step(1)).await;
            let AcquireOutcome::Contended { wait_mode: WaitMode::Queued { .. }, .. } = answer
            else {
                panic!("a request with `enqueue` is queued: {answer:?}");
            };
            contended(&self.one, &all).await;
            assert_eq!(
                renew(&self.one, &step(0)).await,
                LeaseStatus::Held,
                "the owner holds the first key"
            );
            if cancels {
                assert_eq!(
                    release(&self.one, &all).await,
                    ReleaseOutcome::NotHeld,
                    "the owner did not hold all keys"
                );
                let first = claim(["{steps}:a"], LONG);
                granted(&self.other, &first).await;
                release(&self.other, &first).await;
                release(&self.other, &theirs).await;
                let second = claim(["{steps}:b"], LONG);
                granted(&self.other, &second).await;
                release(&self.other, &second).await;
            } else {
                release(&self.other, &theirs).await;
                granted(&self.one, &step(1)).await;
                granted(&self.one, &all).await;
                assert_eq!(
                    release(&self.one, &all).await,
                    ReleaseOutcome::Freed,
                    "the owner held all keys"
                );
            }
        }
    }
}
