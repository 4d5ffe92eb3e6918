//! Keys that stay taken after their release, or for a minimum time.

use super::*;
use crate::base::clock::Instant;

impl<B: Backend> Suite<B> {
    pub(super) async fn a_kept_key_stays_taken_for_a_while(&self) {
        let mine = claim(["kept"], LONG);
        granted(&self.one, &mine).await;
        let began = self.clock.now();
        let kept = ReleaseRequest { free_after: SHORT, ..release_of(&mine) };
        assert_eq!(
            released(&self.one, &[kept]).await,
            [ReleaseOutcome::Freed],
            "a release may keep the key"
        );
        let theirs = claim(["kept"], LONG);
        // On a busy machine the request may come after the end.
        if let AcquireOutcome::Acquired { .. } = attempt(&self.other, &theirs).await {
            let kept_for = self.clock.now().since(began);
            let is_over = kept_for + Duration::from_millis(2) >= SHORT;
            assert!(is_over, "{:?} has two owners {kept_for:?} after the release", theirs.keys);
        }
        self.granted_within(&self.other, &theirs, SHORT * 20).await;
        let kept_for = self.clock.now().since(began);
        assert!(
            kept_for + Duration::from_millis(2) >= SHORT,
            "kept for {kept_for:?} instead of {SHORT:?}"
        );
        release(&self.other, &theirs).await;
    }

    pub(super) async fn several_keys_are_kept_past_their_ttl(&self) {
        let mine = claim(["{kept}:a", "{kept}:b"], KEPT);
        let free_after = KEPT * 2;
        let began = self.clock.now();
        granted(&self.one, &mine).await;
        let kept = ReleaseRequest { free_after, ..release_of(&mine) };
        assert_eq!(
            released(&self.one, &[kept]).await,
            [ReleaseOutcome::Freed],
            "a release may keep keys"
        );
        while self.clock.now().since(began) < KEPT + SHORT {
            // One at a time: a request for both is contended if one of them is taken.
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

    pub(super) async fn only_the_owner_keeps(&self) {
        let mine = claim(["keeper"], LONG);
        granted(&self.one, &mine).await;
        let theirs =
            ReleaseRequest { free_after: SHORT / 2, ..release_of(&claim(["keeper"], LONG)) };
        assert_eq!(
            released(&self.other, &[theirs]).await,
            [ReleaseOutcome::NotHeld],
            "another owner keeps nothing taken"
        );
        tokio::time::sleep(SHORT).await;
        assert_eq!(
            holds(&self.one, &mine).await,
            LeaseStatus::Held,
            "a release by another owner changes no lease"
        );
        release(&self.one, &mine).await;
    }

    pub(super) async fn a_release_extends_nothing_that_has_expired(&self) {
        let mine = claim(["expired"], SHORT);
        granted(&self.one, &mine).await;
        let began = self.clock.now();
        // A store may keep a lease for somewhat longer than its ttl.
        while holds(&self.one, &mine).await == LeaseStatus::Held {
            let held_for = self.clock.now().since(began);
            assert!(held_for < SHORT * 20, "{:?} is held {held_for:?} after its grant", mine.keys);
            tokio::time::sleep(SHORT / 4).await;
        }
        let kept = ReleaseRequest { free_after: LONG, ..release_of(&mine) };
        assert_eq!(
            released(&self.one, &[kept]).await,
            [ReleaseOutcome::NotHeld],
            "what has expired is not released"
        );
        let theirs = claim(["expired"], LONG);
        self.granted_within(&self.other, &theirs, SHORT * 20).await;
        release(&self.other, &theirs).await;
    }

    /// The owner sends nothing after its grant.
    pub(super) async fn a_min_hold_needs_no_renewal(&self) {
        let hold = SHORT * 4;
        let mine = AcquireRequest { min_hold: hold, ..claim(["unrenewed"], SHORT) };
        let began = self.clock.now();
        granted(&self.one, &mine).await;
        let theirs = claim(["unrenewed"], LONG);
        self.lasts_for(hold, began, &theirs).await;
    }

    pub(super) async fn a_min_hold_keeps_the_keys_from_the_grant_on(&self) {
        // All three requests below arrive within it, even on a busy machine.
        let hold = SHORT * 10;
        let mine =
            AcquireRequest { min_hold: hold, ..claim(["{min_hold}:a", "{min_hold}:b"], SHORT) };
        let theirs = claim(["{min_hold}:b"], LONG);
        let began = self.clock.now();
        granted(&self.one, &mine).await;
        let late = AcquireRequest { min_hold: Duration::ZERO, attempt: 1, ..mine.clone() };
        granted(&self.one, &late).await;
        let min_hold = hold.saturating_sub(self.clock.now().since(began));
        let left = LeaseRef { min_hold, ..lease(&mine) };
        assert_eq!(
            renewed(&self.one, &[left]).await,
            [LeaseStatus::Held],
            "what is kept for a min_hold is renewed like any other"
        );
        // The owner sends nothing from here on.
        self.lasts_for(hold, began, &theirs).await;
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

    /// Acquires `theirs`, which is locked for a `min_hold` of `hold`. It began after `began`.
    async fn lasts_for(&self, hold: Duration, began: Instant, theirs: &AcquireRequest) {
        self.granted_within(&self.other, theirs, SHORT * 40).await;
        let lasted = self.clock.now().since(began);
        assert!(
            lasted + Duration::from_millis(2) >= hold,
            "a min_hold of {hold:?} with a ttl of {SHORT:?} was over after {lasted:?}"
        );
        release(&self.other, theirs).await;
    }
}
