//! A call that may run its body.

use crate::api::guard::LockGuard;
use crate::base::options::OnLost;

/// Permission to run a body.
#[derive(Debug)]
pub struct Entered(pub(super) Access);

#[derive(Debug)]
pub(super) enum Access {
    Locked(LockGuard),
    /// An outer call holds the lock, and releases it.
    Nested {
        guard: LockGuard,
        on_lost: OnLost,
    },
    Unlocked,
}

impl Entered {
    pub(crate) fn locked(guard: LockGuard) -> Self {
        Self(Access::Locked(guard))
    }

    pub(crate) fn nested(guard: LockGuard, on_lost: OnLost) -> Self {
        Self(Access::Nested { guard, on_lost })
    }

    pub(crate) fn unlocked() -> Self {
        Self(Access::Unlocked)
    }

    pub(crate) fn into_guard(self) -> Option<LockGuard> {
        match self.0 {
            Access::Locked(guard) | Access::Nested { guard, .. } => Some(guard),
            Access::Unlocked => None,
        }
    }

    /// A borrowed guard for the body.
    ///
    /// # Panics
    /// Without a lock. The attribute refuses `guard` together with `when`.
    pub fn guard(&self) -> LockGuard {
        match &self.0 {
            Access::Locked(guard) | Access::Nested { guard, .. } => guard.borrowed(),
            Access::Unlocked => unreachable!("`guard` and `when` exclude each other"),
        }
    }

    /// The permission, and a borrowed guard for the body.
    ///
    /// # Panics
    /// Without a lock.
    pub fn with_guard(self) -> (Self, LockGuard) {
        let guard = self.guard();
        (self, guard)
    }
}
