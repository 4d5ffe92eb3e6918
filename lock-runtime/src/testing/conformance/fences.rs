//! Fencing tokens: numbers that grow with every grant of a key.

use std::collections::HashMap;

use super::*;

/// The greatest fence of each key so far.
#[derive(Default)]
struct GreatestFences(HashMap<Key, u64>);

impl GreatestFences {
    /// # Panics
    /// Unless `fence` is greater than all earlier fences of every key of `claim`.
    fn grows(&mut self, claim: &AcquireRequest, fence: Option<Fence>, reserved: u32, after: &str) {
        let Some(fence) = fence else { panic!("a requested fence is assigned") };
        for key in claim.keys.iter() {
            let last = self.0.get(key).copied();
            assert!(
                last.is_none_or(|last| fence.get() > last),
                "a fence grows after {after}: {key} has {fence:?} after {last:?}"
            );
            self.0.insert(key.clone(), fence.get().saturating_add(u64::from(reserved)));
        }
    }
}

impl<B: Backend> Suite<B> {
    pub(super) async fn all_of_fences(&self) {
        rules! {
            self:
            fences_grow,
            fences_of_several_keys_grow,
            reserved_fences_are_not_assigned_again,
            fences_grow_past_ends_of_all_kinds,
            a_fence_is_assigned_only_on_request,
            the_fence_of_a_holder_is_its_own,
        }
    }

    async fn fences_grow(&self) {
        let mut last = GreatestFences::default();
        for n in 0..200 {
            let backend = if n % 2 == 0 { &self.one } else { &self.other };
            let claim = fenced([format!("fence:{}", n % 3)], LONG);
            last.grows(&claim, granted(backend, &claim).await, 0, "a release");
            release(backend, &claim).await;
        }
    }

    async fn fences_of_several_keys_grow(&self) {
        let mut last = GreatestFences::default();
        let [a, b] = ["{fences}:a", "{fences}:b"];
        for keys in [&[a][..], &[b], &[b], &[b], &[a, b], &[a], &[a], &[a], &[a, b], &[b], &[a]] {
            let claim = fenced(keys.iter().copied(), LONG);
            last.grows(&claim, granted(&self.one, &claim).await, 0, "a grant of several keys");
            release(&self.one, &claim).await;
        }
    }

    async fn reserved_fences_are_not_assigned_again(&self) {
        let mut last = GreatestFences::default();
        for n in 0..4 {
            let backend = if n % 2 == 0 { &self.one } else { &self.other };
            // More than a clock counts between two grants.
            let extra_fences = 1_000_000;
            let claim = AcquireRequest { extra_fences, ..fenced(["fence:reserved"], LONG) };
            let AcquireOutcome::Acquired { fence, reserved_fences, .. } =
                attempt(backend, &claim).await
            else {
                panic!("the owner did not get {:?}, which no other owner holds", claim.keys);
            };
            assert!(
                reserved_fences <= extra_fences,
                "no more fences are reserved than requested: {reserved_fences}"
            );
            last.grows(&claim, fence, reserved_fences, "reserved fences");
            release(backend, &claim).await;
        }
    }

    async fn fences_grow_past_ends_of_all_kinds(&self) {
        let mut last = GreatestFences::default();
        let key = "fence:end";
        let lost = fenced([key], SHORT);
        last.grows(&lost, granted(&self.one, &lost).await, 0, "nothing");
        let lost = AcquireRequest { attempt: 1, ..lost };
        // The same holder: its first number may be returned again.
        let again = granted(&self.one, &lost).await.map(Fence::get);
        assert!(again >= last.0.get(&lost.keys[0]).copied(), "a fence of a retry is no lower");
        last.0.extend(again.map(|again| (lost.keys[0].clone(), again)));
        let kept = fenced([key], LONG);
        let fence = self.granted_within(&self.other, &kept, SHORT * 20).await;
        last.grows(&kept, fence, 0, "an end of the ttl");
        released(&self.other, &[ReleaseRequest { free_after: SHORT, ..release_of(&kept) }]).await;
        let next = fenced([key], LONG);
        let fence = self.granted_within(&self.one, &next, SHORT * 20).await;
        last.grows(&next, fence, 0, "a release that keeps");
        release(&self.one, &next).await;
    }

    async fn a_fence_is_assigned_only_on_request(&self) {
        let unfenced = claim(["fence:0"], LONG);
        let fence = granted(&self.one, &unfenced).await;
        assert_eq!(fence, None, "a fence is assigned only on request");
        release(&self.one, &unfenced).await;
    }

    pub(super) async fn fences_are_rejected(&self) {
        let fenced = fenced(["fence"], LONG);
        let answered = answer(self.one.acquire(std::slice::from_ref(&fenced))).await.pop();
        let is_rejected =
            matches!(&answered, Some(Err(error)) if error.kind() == FailureKind::Rejected);
        assert!(is_rejected, "a request for an unsupported fence is rejected: {answered:?}");
        assert_eq!(
            holds(&self.other, &fenced).await,
            LeaseStatus::NotHeld,
            "a rejected request takes nothing"
        );
    }
}

fn fenced<K: Into<Key>>(keys: impl IntoIterator<Item = K>, ttl: Duration) -> AcquireRequest {
    AcquireRequest { fencing: true, ..claim(keys, ttl) }
}
