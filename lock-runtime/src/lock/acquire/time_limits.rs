//! How long a request may take, and may wait for room.

use std::time::Duration;

use crate::base::clock::Instant;
use crate::base::options::Wait;
use crate::base::policy::Policy;

/// How long one acquire request may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimeLimits {
    pub(crate) longest: Duration,
    /// The least time, even for a shorter wait: what a request usually takes.
    pub(crate) least: Duration,
}

/// Until when a request waits for room at a paced store. A single attempt has a whole request timeout.
pub(crate) fn admission_ends(
    policy: &Policy,
    since: Instant,
    deadline: Option<Instant>,
    request_timeout: Duration,
) -> Option<Instant> {
    if policy.waits() { deadline } else { Some(since + request_timeout) }
}

/// How long a request that is sent at `now` may take. The end of the wait is the limit, except for the least time that a
/// request needs: the wait bounds when another request may begin. A single try has the whole request timeout.
pub(crate) fn time_limit(
    limits: TimeLimits,
    policy: &Policy,
    deadline: Option<Instant>,
    now: Instant,
) -> Duration {
    limit_within(limits, policy, deadline.map(|deadline| deadline.since(now)))
}

/// Like [`time_limit`], at the beginning of the wait. Equal for equal policies.
pub(crate) fn first_time_limit(limits: TimeLimits, policy: &Policy) -> Duration {
    let left = match policy.wait {
        Wait::For(wait) => Some(wait),
        Wait::Forever => None,
    };
    limit_within(limits, policy, left)
}

fn limit_within(limits: TimeLimits, policy: &Policy, left: Option<Duration>) -> Duration {
    let longest = limits.longest.min(policy.ttl.validity());
    longest.min(left_for_request(limits, policy, left))
}

/// How long a request may take within a wait of which this time is left.
pub(crate) fn left_for_request(
    limits: TimeLimits,
    policy: &Policy,
    left: Option<Duration>,
) -> Duration {
    match left {
        Some(left) if policy.waits() => left.max(limits.least),
        _ => Duration::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::options::{Defaults, LockOptions};

    const TTL: Duration = Duration::from_secs(10);

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn policy(options: LockOptions) -> Policy {
        Policy::new(&options.ttl(TTL), &Defaults::default()).unwrap()
    }

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn a_request_has_the_rest_of_the_wait_but_no_less_than_it_needs() {
        let limits = TimeLimits { longest: ms(1_000), least: ms(250) };
        let policy = |wait| policy(LockOptions::new().wait(wait));
        let (some, single) = (policy(Wait::For(ms(600))), policy(Wait::For(Duration::ZERO)));
        let forever = policy(Wait::Forever);
        let single_by_count =
            self::policy(LockOptions::new().wait(Wait::For(ms(600))).retry_count(0));
        let now = at(1_000);
        for (policy, deadline, expected) in [
            (&some, Some(at(1_600)), 600),
            (&some, Some(at(1_100)), 250),
            (&some, Some(at(900)), 250),
            (&some, Some(at(9_000)), 1_000),
            (&single, Some(at(1_000)), 1_000),
            (&single_by_count, Some(at(1_000)), 1_000),
            (&forever, None, 1_000),
        ] {
            assert_eq!(time_limit(limits, policy, deadline, now), ms(expected), "{deadline:?}");
        }
        assert_eq!(first_time_limit(limits, &some), ms(600));
        assert_eq!(first_time_limit(limits, &policy(Wait::For(ms(10)))), ms(250));
        assert_eq!(first_time_limit(limits, &single), ms(1_000));
        assert_eq!(first_time_limit(limits, &single_by_count), ms(1_000));
        assert_eq!(first_time_limit(limits, &forever), ms(1_000));
        // Never longer than a grant would be valid.
        let limits = TimeLimits { longest: TTL * 2, least: ms(250) };
        assert_eq!(first_time_limit(limits, &forever), forever.ttl.validity());
        assert_eq!(time_limit(limits, &forever, None, now), forever.ttl.validity());
    }

    #[test]
    fn a_request_waits_for_room_until_its_wait_ends_and_a_single_try_for_its_timeout() {
        let (since, deadline, timeout) = (at(1_000), Some(at(4_000)), ms(500));
        for (wait, ends) in [
            (Wait::For(Duration::ZERO), Some(at(1_500))),
            (Wait::For(ms(3_000)), deadline),
            (Wait::Forever, deadline),
        ] {
            let policy = policy(LockOptions::new().wait(wait));
            assert_eq!(admission_ends(&policy, since, deadline, timeout), ends, "{wait:?}");
        }
        let single_by_count = policy(LockOptions::new().wait(Wait::Forever).retry_count(0));
        assert_eq!(admission_ends(&single_by_count, since, Some(since), timeout), Some(at(1_500)));
    }
}
