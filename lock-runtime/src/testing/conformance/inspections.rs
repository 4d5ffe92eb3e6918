//! What a store tells about the holder of a key.

use std::sync::Arc;

use super::{
    LONG, SHORT, Suite, answer, assert_temporary, claim, granted, holds, release, retried,
};
use crate::backend::{AcquireOutcome, AcquireRequest, Backend, Inspection, LeaseStatus};
use crate::base::key::Key;

impl<B: Backend> Suite<B> {
    /// A store that does not show the holder is not checked.
    pub(super) async fn the_holder_of_a_key_is_shown(&self) {
        let mine = claim(["shown"], LONG);
        let Some(free) = inspect(&self.one, &mine).await else { return };
        assert!(free.is_free(), "a key that no owner has acquired is free: {free:?}");
        assert_eq!(
            inspect(&self.one, &mine).await.map(|it| it.is_free()),
            Some(true),
            "an inspection takes nothing"
        );
        granted(&self.one, &mine).await;
        for backend in [&self.one, &self.other] {
            let shown = inspect(backend, &mine).await.unwrap_or_default();
            let Some(holder) = shown.holder else { panic!("a held key has a holder") };
            assert_eq!(holder.owner, Some(mine.owner.tag()), "the holder is the owner");
            assert!(
                holder.expires_in.is_none_or(|left| left > LONG / 2 && left <= 2 * LONG),
                "the lease ends with its ttl, or a little later: {:?}",
                holder.expires_in
            );
            assert!(shown.waiters.is_empty(), "no owner waits: {:?}", shown.waiters);
        }
        assert_eq!(holds(&self.one, &mine).await, LeaseStatus::Held, "it is only read");
        release(&self.other, &mine).await;
        self.until_free(&mine).await;
    }

    /// A store may keep a longer lease elsewhere.
    pub(super) async fn the_process_of_a_holder_is_shown(&self) {
        let mut mine = claim(["process shown"], LONG / 2);
        granted(&self.one, &mine).await;
        let told = self.told_process(&mine).await;
        assert!(
            told.is_none_or(|told| told == std::process::id()),
            "the holder is in this process"
        );
        (mine.attempt, mine.ttl) = (1, LONG);
        granted(&self.one, &mine).await;
        assert_eq!(self.told_process(&mine).await, told, "a longer lease tells the same process");
        release(&self.other, &mine).await;
        self.until_free(&mine).await;
    }

    /// The wait queue is shown in its order, if the store has one and shows it.
    pub(super) async fn the_wait_queue_of_a_key_is_shown(&self) {
        if !self.one.capabilities().wait_queue {
            return;
        }
        let mine = claim(["queue shown"], LONG);
        granted(&self.one, &mine).await;
        let mut queued = Vec::new();
        for backend in [&self.other, &self.one, &self.other] {
            let mut theirs = claim(["queue shown"], LONG);
            theirs.enqueue = true;
            // Some stores queue an owner with its second request.
            for attempt in 0..2 {
                theirs.attempt = attempt;
                let outcome =
                    retried!({ super::one(backend.acquire(std::slice::from_ref(&theirs)).await) });
                assert!(matches!(outcome, AcquireOutcome::Contended { .. }), "it is held");
            }
            queued.push((backend, theirs));
        }
        if let Some(shown) = inspect(&self.other, &mine).await
            && let Some(waiting) = shown.waiting
        {
            let tags: Vec<_> = queued.iter().map(|(_, theirs)| Some(theirs.owner.tag())).collect();
            let waiters: Vec<_> = shown.waiters.iter().map(|waiter| waiter.owner).collect();
            assert_eq!((waiters, waiting), (tags, 3), "the queue is shown in its order");
            let holder = shown.holder.and_then(|holder| holder.owner);
            assert_eq!(holder, Some(mine.owner.tag()), "the holder is not a waiter");
        }
        for (backend, theirs) in queued.iter().rev() {
            release(*backend, theirs).await;
        }
        release(&self.one, &mine).await;
        self.until_free(&mine).await;
    }

    pub(super) async fn the_fence_of_a_holder_is_its_own(&self) {
        let mut mine = claim(["fence shown"], LONG);
        mine.fencing = true;
        let fence = granted(&self.one, &mine).await;
        if let Some(shown) = inspect(&self.other, &mine).await {
            let shown = shown.holder.and_then(|holder| holder.fence);
            assert!(shown.is_none() || shown == fence, "{shown:?} is shown for {fence:?}");
        }
        release(&self.one, &mine).await;
    }

    /// The number of the process that the store reports.
    async fn told_process(&self, claim: &AcquireRequest) -> Option<u32> {
        inspect(&self.other, claim).await?.holder?.info.map(|info| info.process_id)
    }

    /// Servers of one store may disagree for a moment when a lock ends.
    async fn until_free(&self, claim: &AcquireRequest) {
        let freed = async {
            while inspect(&self.other, claim).await.is_some_and(|shown| !shown.is_free()) {
                tokio::time::sleep(SHORT / 30).await;
            }
        };
        answer(freed).await;
    }
}

/// What `backend` tells about the key of `claim`.
async fn inspect<B: Backend>(backend: &B, claim: &AcquireRequest) -> Option<Inspection> {
    let keys: &Arc<[Key]> = &claim.keys;
    retried!(backend.inspect(&keys[0]).await)
}
