//! Policies that several calls have in common.

use std::array;
use std::ops::Deref;
use std::sync::Arc;

use once_cell::race::OnceBox;

use crate::base::error::LockError;
use crate::base::options::{Defaults, LockOptions};
use crate::base::policy::Policy;

/// The policy of one call. Calls with equal options share it, so a held lock keeps only a reference.
#[derive(Clone, Debug)]
pub(crate) enum SharedPolicy {
    /// Of an annotated function.
    OfSite(&'static Policy),
    Counted(Arc<Policy>),
}

impl Deref for SharedPolicy {
    type Target = Policy;

    #[inline]
    fn deref(&self) -> &Policy {
        match self {
            Self::OfSite(policy) => policy,
            Self::Counted(policy) => policy,
        }
    }
}

impl From<Policy> for SharedPolicy {
    fn from(policy: Policy) -> Self {
        Self::Counted(Arc::new(policy))
    }
}

/// The policies of the first calls of a pool that have different options. Other options get a policy for each call.
#[derive(Debug)]
pub(crate) struct PolicyCache {
    /// Of the pool.
    defaults: Defaults,
    entries: [OnceBox<(LockOptions, SharedPolicy)>; Self::SIZE],
}

impl PolicyCache {
    /// A program has few kinds of requests, and each lookup compares them one by one.
    const SIZE: usize = 4;

    pub(crate) fn new(defaults: Defaults) -> Self {
        Self { defaults, entries: array::from_fn(|_| OnceBox::new()) }
    }

    pub(crate) fn defaults(&self) -> &Defaults {
        &self.defaults
    }

    /// `options`, completed with the defaults of the pool.
    ///
    /// # Errors
    /// Those of [`Policy::new`].
    pub(crate) fn policy(&self, options: &LockOptions) -> Result<SharedPolicy, LockError> {
        let Self { defaults, entries } = self;
        for entry in entries {
            match entry.get() {
                Some((known, policy)) if known == options => return Ok(policy.clone()),
                Some(_) => {}
                None => {
                    let policy = SharedPolicy::from(Policy::new(options, defaults)?);
                    // Another thread may have taken the entry meanwhile.
                    let _ = entry.set(Box::new((*options, policy.clone())));
                    return Ok(policy);
                }
            }
        }
        Policy::new(options, defaults).map(SharedPolicy::from)
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;
    use std::time::Duration;

    use super::*;

    fn of(cache: &PolicyCache, ttl: u64) -> SharedPolicy {
        let options = LockOptions::new().ttl(Duration::from_secs(ttl));
        let policy = cache.policy(&options).unwrap();
        assert_eq!(policy.ttl.get(), Duration::from_secs(ttl));
        policy
    }

    #[test]
    fn calls_with_equal_options_share_a_policy() {
        let cache = PolicyCache::new(Defaults::default());
        let kept: Vec<_> = (1..=4).map(|ttl| of(&cache, ttl)).collect();
        for (ttl, first) in (1..=4).zip(&kept) {
            assert!(ptr::eq::<Policy>(&**first, &*of(&cache, ttl)), "{ttl}");
        }
        assert!(!ptr::eq::<Policy>(&*of(&cache, 5), &*of(&cache, 5)), "no entry is left");
    }

    #[test]
    fn refused_options_take_no_entry() {
        let cache = PolicyCache::new(Defaults::default());
        for _ in 0..PolicyCache::SIZE {
            let refused = LockOptions::new().ttl(Duration::ZERO);
            cache.policy(&refused).unwrap_err();
        }
        assert!(ptr::eq::<Policy>(&*of(&cache, 1), &*of(&cache, 1)));
    }
}
