//! Calls that end before they are answered.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use super::*;

/// After how many steps a call is dropped, at the most.
const STEPS: usize = 4;

impl<B: Backend> Suite<B> {
    /// What was dropped may be done, or may yet be. What is asked next is answered as ever.
    pub(super) async fn a_dropped_call_disturbs_no_other(&self) {
        let theirs = claim(["dropped:theirs"], LONG);
        granted(&self.other, &theirs).await;
        for steps in 1..=STEPS {
            let mine = claim([format!("dropped:{steps}")], LONG);
            drop_after(steps, self.one.acquire(std::slice::from_ref(&mine))).await;
            self.all_is_as_ever(&theirs, "acquire").await;
            drop_after(steps, self.one.renew(&[lease(&mine)])).await;
            self.all_is_as_ever(&theirs, "renewal").await;
            drop_after(steps, self.one.is_held(&lease(&mine))).await;
            self.all_is_as_ever(&theirs, "question").await;
            drop_after(steps, self.one.release(&[end(&mine)])).await;
            self.all_is_as_ever(&theirs, "release").await;
            self.can_be_taken_back(&mine).await;
        }
        release(&self.other, &theirs).await;
    }

    async fn all_is_as_ever(&self, theirs: &AcquireRequest, dropped: &str) {
        let rival = claim(theirs.keys.iter().cloned(), LONG);
        let free = claim(["dropped:free"], LONG);
        let answers = (
            takes_at_last(&self.one, &rival).await,
            takes_at_last(&self.one, &free).await,
            renew(&self.one, theirs).await,
            renew(&self.one, &rival).await,
            release(&self.one, &rival).await,
            release(&self.one, &free).await,
        );
        assert_eq!(
            answers,
            (
                false,
                true,
                LeaseStatus::Held,
                LeaseStatus::NotHeld,
                ReleaseOutcome::NotHeld,
                ReleaseOutcome::Freed
            ),
            "an {dropped} that is dropped half-way changes no answer to what is asked next"
        );
    }

    /// A request that was dropped may arrive late; so its owner's release is repeated.
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
            "what a dropped acquire has taken is freed by its owner's name"
        );
        release(&self.other, &next).await;
    }
}

async fn takes_at_last<B: Backend>(backend: &B, claim: &AcquireRequest) -> bool {
    matches!(attempt(backend, claim).await, AcquireOutcome::Acquired { .. })
}

/// Drops `call` when it has been polled for so many times, if it has not ended by then.
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
