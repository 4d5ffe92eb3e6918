//! Calls that are dropped before they are answered.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use super::*;

/// The maximum number of polls before a call is dropped.
const STEPS: usize = 4;

impl<B: Backend> Suite<B> {
    /// A dropped call may have been applied, or may be applied later. It does not change later answers.
    pub(super) async fn a_dropped_call_disturbs_no_other(&self) {
        let theirs = claim(["dropped:theirs"], LONG);
        granted(&self.other, &theirs).await;
        for steps in 1..=STEPS {
            let mine = claim([format!("dropped:{steps}")], LONG);
            drop_after(steps, self.one.acquire(std::slice::from_ref(&mine))).await;
            self.answers_are_unchanged(&theirs, "acquire").await;
            drop_after(steps, self.one.renew(&[lease(&mine)])).await;
            self.answers_are_unchanged(&theirs, "renewal").await;
            drop_after(steps, self.one.is_held(&lease(&mine))).await;
            self.answers_are_unchanged(&theirs, "query").await;
            drop_after(steps, self.one.release(&[release_of(&mine)])).await;
            self.answers_are_unchanged(&theirs, "release").await;
            self.can_be_taken_back(&mine).await;
        }
        release(&self.other, &theirs).await;
    }

    async fn answers_are_unchanged(&self, theirs: &AcquireRequest, dropped: &str) {
        let rival = claim(theirs.keys.iter().cloned(), LONG);
        let free = claim(["dropped:free"], LONG);
        let answers = (
            is_granted_at_last(&self.one, &rival).await,
            is_granted_at_last(&self.one, &free).await,
            renew(&self.one, theirs).await,
            renew(&self.one, &rival).await,
        );
        let releases = [release(&self.one, &rival).await, release(&self.one, &free).await];
        assert_eq!(
            answers,
            (false, true, LeaseStatus::Held, LeaseStatus::NotHeld),
            "a dropped call ({dropped}) changes no later answer"
        );
        assert_eq!(
            releases,
            [ReleaseOutcome::NotHeld, ReleaseOutcome::Freed],
            "a dropped call ({dropped}) changes no later answer"
        );
    }

    /// A dropped request may arrive late, so the release of its owner is repeated.
    async fn can_be_taken_back(&self, mine: &AcquireRequest) {
        let next = claim(mine.keys.iter().cloned(), LONG);
        let taken_back = async {
            release(&self.one, mine).await;
            while !takes(&self.other, &next).await {
                tokio::time::sleep(SHORT / 30).await;
                release(&self.one, mine).await;
            }
        };
        let taken_back = timeout(SHORT * 20, taken_back).await;
        assert!(
            taken_back.is_ok(),
            "a release by the same owner frees what a dropped acquire has taken"
        );
        release(&self.other, &next).await;
    }
}

async fn is_granted_at_last<B: Backend>(backend: &B, claim: &AcquireRequest) -> bool {
    matches!(attempt(backend, claim).await, AcquireOutcome::Acquired { .. })
}

/// Drops `call` after this number of polls, if it has not completed.
async fn drop_after(steps: usize, call: impl Future) {
    let mut call = pin!(call);
    let mut left = steps;
    let polled = poll_fn(|cx| {
        left = left.saturating_sub(1);
        match call.as_mut().poll(cx) {
            Poll::Pending if left > 0 => Poll::Pending,
            Poll::Pending | Poll::Ready(_) => Poll::Ready(()),
        }
    });
    answer(polled).await;
}
