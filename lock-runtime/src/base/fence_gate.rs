//! Refusal of writes with a fencing token that is no longer the highest.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use crate::base::clock::{Clock, Instant};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::sync::Mutex;

/// Keeps the highest fencing token of each key, and refuses lower ones. It is the receiver's side of a fence, for a
/// resource that one process owns (Kleppmann, "How to do distributed locking"; Chubby's `CheckSequencer`).
///
/// An equal token is admitted, because one holder may write several times. A gate decides the order of admissions. Admitted
/// writes have to take effect in that order too, for example under a mutex of the resource. The gate forgets everything
/// when the process ends. A resource that outlives the process keeps the tokens itself: in a column beside the data, or
/// with [`SqlFenceGate`](crate::SqlFenceGate).
///
/// ```
/// use lock_runtime::{Fence, FenceGate};
///
/// let gate = FenceGate::new();
/// gate.admit("order:42", Fence::new(33))?;
/// gate.admit("order:42", Fence::new(34))?;
/// // The holder with token 33 was paused, and its lock has a new holder since.
/// assert!(gate.admit("order:42", Fence::new(33)).is_err());
/// # Ok::<(), lock_runtime::StaleFence>(())
/// ```
#[derive(Debug)]
pub struct FenceGate {
    clock: Clock,
    /// `None` keeps all keys.
    forget_after: Option<Duration>,
    seen: Mutex<SeenFences>,
}

#[derive(Debug, Default)]
struct SeenFences {
    by_key: HashMap<Key, SeenFence>,
    /// At this size, old ones are removed.
    sweep_at: usize,
}

#[derive(Debug)]
struct SeenFence {
    highest: Fence,
    admitted_at: Instant,
}

impl FenceGate {
    /// A gate that keeps all keys until it is dropped.
    #[must_use]
    pub fn new() -> Self {
        Self { clock: Clock::Boot, forget_after: None, seen: Mutex::default() }
    }

    /// A gate that may forget a key for which nothing was admitted for this long. A late write after an even longer pause
    /// is then admitted. The time should be longer than any pause of a holder: hours.
    #[must_use]
    pub fn forgetting_after(age: Duration) -> Self {
        Self { forget_after: Some(age), ..Self::new() }
    }

    /// Admits a write with `fence`, unless a higher one was admitted for `key` before. It does no I/O, and holds a mutex of the gate.
    ///
    /// # Errors
    /// [`StaleFence`] with both tokens. Nothing is remembered then.
    pub fn admit(&self, key: impl Into<Key>, fence: Fence) -> Result<(), StaleFence> {
        let (key, now) = (key.into(), self.clock.now());
        let mut seen = self.seen.lock();
        if let Some(known) = seen.by_key.get_mut(&key) {
            if fence < known.highest {
                return Err(StaleFence { given: fence, highest: known.highest });
            }
            *known = SeenFence { highest: fence, admitted_at: now };
            return Ok(());
        }
        if let Some(age) = self.forget_after {
            seen.sweep(now, age);
        }
        seen.by_key.insert(key, SeenFence { highest: fence, admitted_at: now });
        Ok(())
    }
}

impl Default for FenceGate {
    fn default() -> Self {
        Self::new()
    }
}

impl SeenFences {
    fn sweep(&mut self, now: Instant, age: Duration) {
        if self.by_key.len() < self.sweep_at {
            return;
        }
        self.by_key.retain(|_, seen| now.since(seen.admitted_at) < age);
        self.sweep_at = (2 * self.by_key.len()).max(1024);
    }
}

/// A write with a fencing token below one that was admitted before: its lock has been granted to another holder since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StaleFence {
    /// The token of the write.
    pub given: Fence,
    /// The highest token so far.
    pub highest: Fence,
}

impl fmt::Display for StaleFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the fence {} is stale: a later holder has written with {}; abandon the write",
            self.given, self.highest
        )
    }
}

impl Error for StaleFence {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn a_lower_fence_is_refused_and_an_equal_one_is_not() {
        let gate = FenceGate::new();
        gate.admit("a", Fence::new(5)).unwrap();
        gate.admit("a", Fence::new(5)).unwrap();
        gate.admit("b", Fence::new(1)).unwrap();
        let stale = gate.admit("a", Fence::new(4)).unwrap_err();
        assert_eq!((stale.given, stale.highest), (Fence::new(4), Fence::new(5)));
        assert!(stale.to_string().contains('4') && stale.to_string().contains('5'));
        gate.admit("a", Fence::new(6)).unwrap();
        gate.admit("a", Fence::new(5)).unwrap_err();
    }

    /// The threads share nothing but the gate and two counters, so only the gate orders what it admits.
    #[test]
    fn a_fence_below_an_admitted_one_is_refused_from_64_threads() {
        const THREADS: u64 = 64;
        const EACH: u64 = 10_000;
        let gate = FenceGate::new();
        // The highest fence with an admission that has returned, and how many admissions there were.
        let (highest, admitted) = (AtomicU64::new(0), AtomicU64::new(0));
        // New fences, the highest so far, and late ones.
        let next = AtomicU64::new(1);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (gate, highest, admitted, next) = (&gate, &highest, &admitted, &next);
                scope.spawn(move || {
                    for round in 0..EACH {
                        let fence = match (thread + round) % 4 {
                            0 => highest.load(Ordering::SeqCst).saturating_sub(1),
                            1 => highest.load(Ordering::SeqCst),
                            _ => next.fetch_add(1, Ordering::SeqCst),
                        };
                        let before = highest.load(Ordering::SeqCst);
                        match gate.admit("resource", Fence::new(fence)) {
                            Ok(()) => {
                                assert!(fence >= before, "{fence} behind {before}");
                                highest.fetch_max(fence, Ordering::SeqCst);
                                admitted.fetch_add(1, Ordering::SeqCst);
                                let lower = Fence::new(fence.saturating_sub(1));
                                let late = gate.admit("resource", lower);
                                assert!(fence == 0 || late.is_err(), "{fence} is forgotten");
                            }
                            Err(stale) => {
                                assert_eq!(stale.given.get(), fence);
                                let known = stale.highest.get();
                                assert!(known > fence && known >= before, "{stale}, {before}");
                            }
                        }
                    }
                });
            }
        });
        let (highest, admitted) = (highest.into_inner(), admitted.into_inner());
        assert!(admitted > 1 && admitted < THREADS * EACH, "{admitted}");
        gate.admit("resource", Fence::new(highest)).unwrap();
        let stale = gate.admit("resource", Fence::new(highest - 1)).unwrap_err();
        assert_eq!(stale.highest.get(), highest);
    }

    #[test]
    fn old_keys_are_forgotten_and_no_others() {
        let gate = FenceGate::forgetting_after(Duration::ZERO);
        for n in 0..5_000 {
            gate.admit(format!("key:{n}"), Fence::new(9)).unwrap();
        }
        assert!(gate.seen.lock().by_key.len() <= 1_025);
        let gate = FenceGate::new();
        for n in 0..5_000 {
            gate.admit(format!("key:{n}"), Fence::new(9)).unwrap();
        }
        gate.admit("key:0", Fence::new(8)).unwrap_err();
    }

    #[tokio::test(start_paused = true)]
    async fn keys_are_forgotten_in_bulk_when_twice_as_many_are_known() {
        let age = Duration::from_secs(60);
        let gate = FenceGate { clock: Clock::runtime(), ..FenceGate::forgetting_after(age) };
        let mut last = 0;
        let mut admit = |count: usize| {
            for _ in 0..count {
                last += 1;
                gate.admit(format!("key:{last}"), Fence::new(9)).unwrap();
            }
            gate.seen.lock().by_key.len()
        };
        assert_eq!(admit(1_023), 1_023);
        tokio::time::advance(age).await;
        assert_eq!(admit(1), 1_024, "not yet");
        assert_eq!(admit(1), 2, "those of just that age are old");
        assert_eq!(admit(1_023), 1_025);
        // More than a thousand are kept, so twice as many may be known.
        tokio::time::advance(age).await;
        assert_eq!(admit(1_023), 2_048);
        assert_eq!(admit(1), 1_024);
    }
}
