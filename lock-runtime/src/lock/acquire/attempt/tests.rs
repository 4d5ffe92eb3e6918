use std::panic::Location;

use super::*;
use crate::base::call_site::LockLabel;
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::options::{Defaults, LockOptions, Wait};

const TTL: Duration = Duration::from_secs(10);

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn policy(options: LockOptions) -> Policy {
    Policy::new(&options.ttl(TTL), &Defaults::default()).unwrap()
}

fn plain() -> Policy {
    policy(LockOptions::new())
}

fn attempts() -> Attempts {
    Attempts::new(Owner::random().unwrap(), at(1_000))
}

fn at(millis: u64) -> Instant {
    Instant::from_nanos(millis * 1_000_000)
}

/// The answer to a request that is sent at one second and answered 5 ms later.
fn answer(
    attempts: &mut Attempts,
    policy: &Policy,
    outcome: Result<AcquireOutcome, BackendError>,
) -> Answer {
    attempts.on_answer(policy, at(1_000), at(1_005), ms(500), Some(outcome))
}

fn retry_after(answer: &Answer) -> Duration {
    match answer {
        Answer::Contended { retry_after, .. } | Answer::Failed { retry_after, .. } => *retry_after,
        Answer::Granted(_) => panic!("the request was granted"),
    }
}

#[test]
fn the_ttl_counts_from_when_the_store_was_prepared() {
    let policy = plain();
    let validity = policy.ttl.validity();
    let (sent, prepared_in) = (at(1_000), validity - ms(100));
    for (now, valid_from) in [
        (sent + prepared_in + ms(50), Some(sent + prepared_in)),
        (sent + prepared_in + validity, None),
        // The store counts more time than has passed.
        (sent + ms(50), Some(sent + ms(50))),
    ] {
        let mut attempts = attempts();
        let granted = AcquireOutcome::acquired(None).with_prepared_in(prepared_in);
        let answer = attempts.on_answer(&policy, sent, now, ms(500), Some(Ok(granted)));
        let granted = match answer {
            Answer::Granted(granted) => Some(granted.sent),
            Answer::Contended { .. } | Answer::Failed { .. } => None,
        };
        assert_eq!(granted, valid_from);
        let until = now.min(sent + prepared_in) + policy.kept_for();
        assert_eq!(attempts.kept_until, until);
        assert_eq!(attempts.ambiguous_until, granted.is_none().then_some(until));
    }
}

#[test]
fn a_timely_grant_is_granted_with_its_fences() {
    let (mut attempts, policy) = (attempts(), plain());
    let outcome = AcquireOutcome::acquired(Some(Fence::new(7))).with_reserved_fences(2);
    let granted = answer(&mut attempts, &policy, Ok(outcome.with_contended(true)));
    let Answer::Granted(Granted {
        sent: _,
        fences: Some(mut fences),
        contention: Contention::Known,
    }) = granted
    else {
        panic!("{granted:?}");
    };
    let taken: Vec<_> = std::iter::from_fn(|| fences.take()).map(Fence::get).collect();
    assert_eq!(taken, [7, 8, 9]);
    assert_eq!(attempts.ambiguous_until, None);
}

#[test]
fn a_grant_counts_until_validity_ends_and_is_ambiguous_after() {
    let policy = plain();
    let end = at(1_000) + policy.ttl.validity();
    let one = Duration::from_nanos(1);
    for (now, is_granted) in [(end.saturating_sub(one), true), (end, false)] {
        let mut attempts = attempts();
        let granted = AcquireOutcome::acquired(None);
        let answer = attempts.on_answer(&policy, at(1_000), now, ms(500), Some(Ok(granted)));
        assert_eq!(matches!(answer, Answer::Granted(_)), is_granted, "{now:?}");
        assert_eq!(attempts.has_no_side_effects(), is_granted, "{now:?}");
        let until = (!is_granted).then(|| at(1_000) + TTL);
        assert_eq!(attempts.ambiguous_until, until, "{now:?}");
    }
}

#[test]
fn silence_and_unknown_effects_are_ambiguous_and_refusals_are_not() {
    let policy = policy(LockOptions::new().min_hold(TTL * 2));
    for (outcome, is_ambiguous) in [
        (None, true),
        (Some(FailureKind::MaybeApplied), true),
        (Some(FailureKind::NotApplied), false),
        (Some(FailureKind::Rejected), false),
    ] {
        let mut attempts = attempts();
        let outcome = outcome.map(|kind| Err(BackendError::new(kind, "planned")));
        let answer = attempts.on_answer(&policy, at(1_000), at(1_500), ms(500), outcome);
        assert!(matches!(answer, Answer::Failed { .. }), "{answer:?}");
        assert!(retry_after(&answer) <= ms(20), "{answer:?}");
        // The store keeps a grant for its `min_hold`, if that is longer than the ttl.
        let until = is_ambiguous.then(|| at(1_000) + TTL * 2);
        assert_eq!((attempts.count, attempts.ambiguous_until), (1, until));
    }
}

#[test]
fn a_contended_acquire_that_may_be_applied_later_is_ambiguous_and_no_failure() {
    let policy = policy(LockOptions::new());
    let mut attempts = attempts();
    let error = BackendError::new(FailureKind::MaybeApplied, "planned").contended();
    let answer = attempts.on_answer(&policy, at(1_000), at(1_500), ms(500), Some(Err(error)));
    assert!(matches!(answer, Answer::Contended { expires_in: None, .. }), "{answer:?}");
    assert_eq!((attempts.unanswered, attempts.ambiguous_until), (1, Some(at(1_000) + TTL)));
}

#[test]
fn ambiguity_lasts_until_the_last_unanswered_request_is_forgotten() {
    let (mut attempts, policy) = (attempts(), plain());
    for sent in [1_000, 3_000, 2_000] {
        attempts.on_answer(&policy, at(sent), at(sent + 500), ms(500), None);
    }
    assert_eq!((attempts.unanswered, attempts.ambiguous_until), (3, Some(at(3_000) + TTL)));
    // A grant that no waiter took does not end it.
    attempts.mark_known();
    assert_eq!((attempts.unanswered, attempts.ambiguous_until), (3, Some(at(3_000) + TTL)));
    assert_eq!(attempts.grants_to_undo(), 4);
}

#[test]
fn an_unused_grant_is_undone_by_one_answered_release() {
    let (mut attempts, policy) = (attempts(), plain());
    answer(&mut attempts, &policy, Ok(AcquireOutcome::acquired(None)));
    attempts.mark_known();
    assert!(!attempts.has_no_side_effects());
    assert_eq!((attempts.grants_to_undo(), attempts.ambiguous_until), (0, None));
    assert_eq!(attempts.kept_until, at(1_000) + TTL);
}

#[test]
fn the_grant_of_a_known_owner_is_undone_beside_those_of_unanswered_requests() {
    for (unanswered, is_known, expected) in
        [(0, false, 0), (0, true, 0), (1, false, 1), (1, true, 2), (3, true, 4)]
    {
        let attempts = Attempts { unanswered, is_known, ..attempts() };
        assert_eq!(attempts.grants_to_undo(), expected, "{unanswered}, {is_known}");
    }
}

#[test]
fn a_contended_lock_is_requested_again_when_the_store_says() {
    let plain = plain();
    let counted = policy(LockOptions::new().retry_count(3).retry_delay(ms(40)));
    let queued = |millis| WaitMode::Queued { retry_after: ms(millis) };
    let watch = |millis| WaitMode::Watch { retry_after: ms(millis) };
    for (policy, mode, at_least, at_most) in [
        (&plain, queued(700), 700, 700),
        (&plain, watch(900), 900, 900),
        (&plain, watch(0), 0, 0),
        // Between a quarter and the whole of the delay.
        (&counted, queued(700), 10, 40),
        (&counted, watch(0), 10, 40),
        (&counted, watch(5), 5, 5),
        (&plain, WaitMode::Poll, 5, 20),
        (&counted, WaitMode::Poll, 10, 40),
    ] {
        let mut attempts = attempts();
        let outcome = AcquireOutcome::contended_until(None, mode);
        let answer = answer(&mut attempts, policy, Ok(outcome));
        assert!(
            (ms(at_least)..=ms(at_most)).contains(&retry_after(&answer)),
            "{mode:?}, {answer:?}"
        );
        assert_eq!(attempts.is_known, matches!(mode, WaitMode::Queued { .. }));
        assert_eq!((attempts.count, attempts.unanswered), (1, 0));
    }
}

#[test]
fn an_expiry_shortens_the_poll_and_not_a_configured_delay() {
    let expired = Ok(AcquireOutcome::contended(Some(ms(1))));
    let polled = answer(&mut attempts(), &plain(), expired.clone());
    assert_eq!(retry_after(&polled), ms(2));
    let delayed = policy(LockOptions::new().retry_delay(ms(40)));
    assert!(retry_after(&answer(&mut attempts(), &delayed, expired)) >= ms(10));
}

#[test]
fn polls_double_to_640_ms_and_failures_to_160_ms() {
    let (mut polls, mut failures, policy) = (attempts(), attempts(), plain());
    for n in 0..12 {
        let longest = ms(20 << n.min(5));
        let polled = retry_after(&answer(&mut polls, &policy, Ok(AcquireOutcome::contended(None))));
        assert!((longest / 4..=longest).contains(&polled), "{n}: {polled:?}");
        let error = Err(BackendError::new(FailureKind::NotApplied, "planned"));
        let failed = retry_after(&answer(&mut failures, &policy, error));
        let longest = longest.min(ms(160));
        assert!((longest / 4..=longest).contains(&failed), "{n}: {failed:?}");
    }
}

#[test]
fn a_request_carries_the_spec_the_owner_and_its_number() {
    let keys: std::sync::Arc<[Key]> = [Key::from_static("k")].into();
    let label = LockLabel::Key(keys[0].clone(), Location::caller());
    let policy = policy(LockOptions::new().min_hold(ms(30)).fencing(true).wait(Wait::Forever));
    let spec = LockSpec::new(label, keys, policy, "app:");
    let mut attempts = attempts();
    attempts.count = 3;
    let request = attempts.request(&spec);
    assert_eq!(request.keys[0].as_str(), "app:k");
    assert_eq!((request.owner, request.ttl, request.min_hold), (attempts.owner, TTL, ms(30)));
    assert!(request.fencing && request.enqueue);
    assert_eq!((request.attempt, request.extra_fences), (3, 0));
}

#[test]
fn a_successor_has_side_effects_and_a_new_owner_has_none() {
    let owner = Owner::random().unwrap();
    let next = Successor::new(owner, ms(8));
    let queued = Attempts::for_successor(&next, at(1));
    assert!(!queued.has_no_side_effects());
    assert_eq!((queued.count, queued.ambiguous_until), (1, None));
    let unconfirmed = Attempts::for_unconfirmed_successor(&next, at(1));
    assert_eq!((unconfirmed.unanswered, unconfirmed.ambiguous_until), (1, Some(at(9))));
    assert!(unconfirmed.is_known);
    let other = Owner::random().unwrap();
    let anew = unconfirmed.with_new_owner(other);
    assert!(anew.has_no_side_effects());
    assert_eq!((anew.owner, anew.count, anew.since), (other, 1, at(1)));
    assert_eq!(anew.ambiguous_until, None);
}

#[test]
fn retry_count_and_an_outage_end_a_wait() {
    let counted = policy(LockOptions::new().retry_count(2));
    assert_eq!([1, 2, 3, 4].map(|n| counted.is_out_of_attempts(n)), [false, false, true, true]);
    assert!(!plain().is_out_of_attempts(u32::MAX));
    let single_try = policy(LockOptions::new().wait(Wait::For(Duration::ZERO)));
    assert_eq!([0, 1, 2].map(|n| single_try.is_out_of_attempts(n)), [false, true, true]);
    let (since, timeout) = (at(1_000), ms(100));
    for (deadline, failing_since, now, expected) in [
        (None, Some(at(5_000)), 6_000, false),
        (None, Some(at(5_000)), 6_001, true),
        // The outage began before the wait.
        (None, Some(at(100)), 2_000, false),
        (None, Some(at(100)), 2_001, true),
        (None, None, 60_000, false),
        (Some(at(90_000)), Some(at(5_000)), 60_000, false),
    ] {
        let is_over = is_cut_off(deadline, since, failing_since, at(now), timeout);
        assert_eq!(is_over, expected, "{deadline:?}, {failing_since:?}, {now}");
    }
}

#[test]
fn a_step_of_several_keys_may_have_an_effect_and_counts_when_it_is_granted() {
    let mut attempts = attempts();
    attempts.mark_known();
    assert!(!attempts.has_no_side_effects());
    assert_eq!(attempts.count, 0);
    attempts.on_step_granted();
    assert_eq!(attempts.count, 1);
}
