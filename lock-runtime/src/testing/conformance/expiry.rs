//! Leases end with their ttl, and renewals extend them.

use super::*;

impl<B: Backend> Suite<B> {
    pub(super) async fn a_late_retry_for_less_time_shortens_nothing(&self) {
        let mine = claim(["late"], LONG);
        granted(&self.one, &mine).await;
        granted(&self.one, &AcquireRequest { ttl: SHORT, attempt: 1, ..mine.clone() }).await;
        tokio::time::sleep(SHORT * 2).await;
        contended(&self.other, &claim(["late"], LONG)).await;
        assert_eq!(
            release(&self.one, &mine).await,
            ReleaseOutcome::Freed,
            "the owner still holds it"
        );
    }

    pub(super) async fn a_grant_ends_with_its_ttl(&self) {
        let mine = claim(["expiry"], SHORT);
        let began = self.clock.now();
        granted(&self.one, &mine).await;
        let theirs = claim(["expiry"], LONG);
        self.granted_within(&self.other, &theirs, SHORT * 20).await;
        let lasted = self.clock.now().since(began);
        // Stores may round an expiry by a millisecond; the validity ends two milliseconds before that.
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
            "the next owner keeps its lease"
        );
        release(&self.other, &theirs).await;
    }

    pub(super) async fn a_grant_that_has_ended_stays_so(&self) {
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
        // A free lock may be restored: a quorum does so on a node that has lost it. Not for `SHORT`, which may be over
        // before the next answer.
        let mine = AcquireRequest { ttl: LONG, ..mine };
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

    /// Whether a lease is held is only read.
    pub(super) async fn a_look_extends_nothing(&self) {
        let mine = claim(["looked at"], SHORT);
        let began = self.clock.now();
        granted(&self.one, &mine).await;
        while holds(&self.other, &mine).await == LeaseStatus::Held {
            let held_for = self.clock.now().since(began);
            assert!(
                held_for < SHORT * 20,
                "a lease of {SHORT:?} that is read again and again is held after {held_for:?}"
            );
            tokio::time::sleep(SHORT / 10).await;
        }
    }

    pub(super) async fn a_renewal_counts_from_now(&self) {
        let mine = claim(["renewal"], KEPT);
        let began = self.clock.now();
        granted(&self.one, &mine).await;
        let theirs = claim(["renewal"], LONG);
        while self.clock.now().since(began) < KEPT * 2 {
            assert_eq!(renew(&self.one, &mine).await, LeaseStatus::Held, "a held lock is renewed");
            contended(&self.other, &theirs).await;
            tokio::time::sleep(SHORT / 10).await;
        }
        self.granted_within(&self.other, &theirs, KEPT * 5).await;
        release(&self.other, &theirs).await;
    }

    /// The promised notifications and `retry_after` are enough to acquire the lock of a dead holder.
    pub(super) async fn an_end_of_the_ttl_is_found_as_promised(&self) {
        granted(&self.one, &claim([CHANGING], SHORT)).await;
        let mut theirs = AcquireRequest {
            enqueue: self.other.capabilities().wait_queue,
            ..claim([CHANGING], LONG)
        };
        let found = async {
            loop {
                let mut changes = self.changes.0.subscribe();
                let retry_after = match attempt(&self.other, &theirs).await {
                    AcquireOutcome::Acquired { .. } => return,
                    AcquireOutcome::Contended { wait_mode: WaitMode::Poll, .. } => SHORT / 10,
                    AcquireOutcome::Contended {
                        wait_mode:
                            WaitMode::Watch { retry_after } | WaitMode::Queued { retry_after },
                        ..
                    } => retry_after,
                };
                // Retried with and without a notification.
                let _ = timeout(retry_after, changes.changed()).await;
                theirs.attempt += 1;
            }
        };
        let found = timeout(SHORT * 20, found).await;
        assert!(
            found.is_ok(),
            "an end of the ttl is notified, or found by a retry after `retry_after`"
        );
        release(&self.other, &theirs).await;
    }
}
