//! Randomised times, so that processes that started together do not stay synchronised.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::base::clock::Instant;
use crate::base::process::OfProcess;

/// A time up to a seventh of `pause` before `from + pause`; the same for the same `salt`. It is rounded to a grid, so
/// that events due at about the same time share a round trip. The grids of different pauses share their points, those
/// of different processes do not.
pub(crate) fn early(from: Instant, pause: Duration, salt: u64) -> Instant {
    let most = u64::try_from(pause.as_nanos() / 16).unwrap_or(u64::MAX);
    let step = most.checked_ilog2().map_or(1, |log| 1 << log);
    let pause = scaled(pause, 1.0 - 0.06 * unit(mix(salt ^ seed())));
    let due = (from + pause).as_nanos();
    Instant::from_nanos(due - due.wrapping_add(seed()) % step)
}

/// A random time between a quarter of `span` and `span`; another one for each call.
pub(crate) fn below(span: Duration) -> Duration {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    scaled(span, 0.25 + 0.75 * unit(mix(call ^ seed())))
}

/// `span` times a factor of at most 1. `Duration::MAX` as a float exceeds the range of `Duration`; then `span` is
/// returned.
fn scaled(span: Duration, factor: f64) -> Duration {
    Duration::try_from_secs_f64(span.as_secs_f64() * factor).unwrap_or(span)
}

/// Differs between processes. Only timing depends on it.
fn seed() -> u64 {
    static SEED: OfProcess<u64> = OfProcess::new();
    *SEED.get_or_init(|| getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id())))
}

fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// The output function of SplitMix64.
fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
