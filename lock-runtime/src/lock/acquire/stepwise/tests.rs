use std::panic::Location;

use super::*;
use crate::base::call_site::LockLabel;
use crate::base::options::{Defaults, LockOptions, Wait};
use crate::base::policy::Policy;

const TTL: Duration = Duration::from_secs(10);
const QUEUED: WaitMode = WaitMode::Queued { retry_after: Duration::from_millis(300) };
const ROUND_TRIP: Duration = Duration::from_millis(1);

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn at(millis: u64) -> Instant {
    Instant::from_nanos(millis * 1_000_000)
}

fn spec_with(options: LockOptions) -> LockSpec {
    let keys: Arc<[Key]> = ["a", "b", "c"].map(Key::from_static).into();
    let policy = Policy::new(&options.ttl(TTL).fencing(true), &Defaults::default()).unwrap();
    LockSpec::new(LockLabel::Key(keys[0].clone(), Location::caller()), keys, policy, "")
}

fn spec() -> LockSpec {
    spec_with(LockOptions::new())
}

fn keys_of(stepwise: &Stepwise, spec: &LockSpec) -> Vec<String> {
    let request = AcquireRequest::for_owner(spec, Owner::random().unwrap());
    let request = stepwise.next_request(spec, request);
    request.keys.iter().map(|key| key.as_str().to_owned()).collect()
}

fn held(stepwise: &Stepwise) -> &[usize] {
    stepwise.held()
}

/// A request that is queued for its first key.
fn queued(spec: &LockSpec) -> Stepwise {
    let mut stepwise = Stepwise::new(spec, true);
    assert_eq!(stepwise.on_contended(WaitMode::Poll, at(1), spec), NextStep::Request);
    assert_eq!(stepwise.on_contended(QUEUED, at(2), spec), NextStep::Wait);
    assert!(stepwise.is_queued() && !stepwise.is_optimistic());
    stepwise
}

#[test]
fn all_keys_are_requested_first_and_then_one_after_the_other() {
    let spec = spec();
    let mut stepwise = Stepwise::new(&spec, true);
    assert!(stepwise.is_optimistic() && !stepwise.holds_any());
    assert_eq!(keys_of(&stepwise, &spec), ["a", "b", "c"]);
    assert_eq!(stepwise.on_contended(WaitMode::Poll, at(1), &spec), NextStep::Request);
    for (n, key) in ["a", "b", "c"].into_iter().enumerate() {
        assert_eq!((keys_of(&stepwise, &spec), stepwise.step()), (vec![key.to_owned()], Some(n)));
        assert!(stepwise.involves(n) && !stepwise.is_queued());
        stepwise.on_step_acquired(at(10 + n as u64), &spec);
    }
    assert_eq!((stepwise.step(), held(&stepwise)), (None, &[0, 1, 2][..]));
    assert_eq!(keys_of(&stepwise, &spec), ["a", "b", "c"]);
}

#[test]
fn a_step_has_no_fence_and_no_min_hold_and_is_queued() {
    let spec = spec_with(LockOptions::new().min_hold(ms(500)));
    let stepwise = queued(&spec);
    let all = AcquireRequest::for_owner(&spec, Owner::random().unwrap());
    assert!(all.fencing && !all.enqueue && all.min_hold == ms(500));
    let step = stepwise.next_request(&spec, all.clone());
    assert!(!step.fencing && step.enqueue && step.min_hold.is_zero());
    assert_eq!((step.owner, step.ttl), (all.owner, all.ttl));
}

#[test]
fn all_keys_are_requested_again_after_a_step_that_waited() {
    let spec = spec();
    let mut stepwise = queued(&spec);
    stepwise.on_step_acquired(at(50), &spec);
    assert!(stepwise.holds_any());
    assert_eq!((stepwise.step(), held(&stepwise)), (None, &[0][..]));
    assert_eq!(keys_of(&stepwise, &spec).len(), 3);
    // Another owner holds another key: that key is next.
    assert_eq!(stepwise.on_contended(WaitMode::Poll, at(51), &spec), NextStep::Request);
    assert_eq!((stepwise.step(), held(&stepwise)), (Some(1), &[0][..]));
}

#[test]
fn without_queues_a_request_stays_optimistic() {
    let counted = spec_with(LockOptions::new().retry_count(5));
    let single = spec_with(LockOptions::new().wait(Wait::For(Duration::ZERO)));
    for (spec, has_queues) in [(spec(), false), (counted, true), (single, true)] {
        let mut stepwise = Stepwise::new(&spec, has_queues);
        assert_eq!(stepwise.on_contended(QUEUED, at(9_000), &spec), NextStep::Wait);
        assert!(stepwise.is_optimistic());
    }
    let spec = spec();
    let mut stepwise = Stepwise::new(&spec, true);
    assert_eq!(stepwise.on_contended(WaitMode::Poll, at(1), &spec), NextStep::Request);
    let watched = WaitMode::Watch { retry_after: ms(5) };
    let next = stepwise.on_contended(watched, at(2), &spec);
    assert_eq!(next, NextStep::BackOff(BackOff::NoQueue));
    stepwise.back_off(at(3), BackOff::NoQueue);
    assert_eq!(stepwise.on_contended(WaitMode::Poll, at(90_000), &spec), NextStep::Wait);
}

#[test]
fn a_refusal_with_all_keys_held_means_a_lost_key() {
    let spec = spec();
    let mut stepwise = Stepwise::new(&spec, true);
    stepwise.on_contended(WaitMode::Poll, at(1), &spec);
    (0..3).for_each(|_| stepwise.on_step_acquired(at(2), &spec));
    let next = stepwise.on_contended(QUEUED, at(3), &spec);
    assert_eq!(next, NextStep::BackOff(BackOff::Lost));
    stepwise.back_off(at(4), BackOff::Lost);
    assert!(stepwise.is_optimistic() && !stepwise.holds_any());
    // Immediately stepwise again.
    assert_eq!(stepwise.on_contended(WaitMode::Poll, at(4), &spec), NextStep::Request);
}

#[test]
fn a_hold_is_renewed_after_a_third_of_the_ttl_until_validity_ends() {
    let (spec, owner) = (spec(), Owner::random().unwrap());
    let ttl = spec.policy.ttl;
    // Long enough for the renewal: each release of the hold doubles its time.
    let mut stepwise = queued(&spec);
    (0..4).for_each(|_| stepwise.on_hold_released());
    stepwise.on_step_acquired(at(1_000), &spec);
    let upkeep = |stepwise: &Stepwise, now| stepwise.upkeep(&spec, owner, now, ms(500));
    let third = at(1_000) + TTL / 3;
    assert_eq!(stepwise.due(), Some(third));
    let early = third.saturating_sub(Duration::from_nanos(1));
    assert!(matches!(upkeep(&stepwise, early), Upkeep::None));
    let Upkeep::Renew { lease, time_limit } = upkeep(&stepwise, third) else { panic!("not due") };
    assert_eq!((lease.keys.len(), lease.owner, lease.ttl), (1, owner, TTL));
    assert_eq!(time_limit, ms(500));
    // Without an answer, once more after a tenth of the ttl, and never beyond validity.
    assert_eq!(stepwise.on_renewed(ttl, third, third + ms(500), None), None);
    assert_eq!(stepwise.due(), Some(third + ms(500) + TTL / 10));
    let end = at(1_000) + ttl.validity();
    let late = end.saturating_sub(ms(1));
    let Upkeep::Renew { time_limit, .. } = upkeep(&stepwise, late) else { panic!("not due") };
    assert_eq!(time_limit, ms(1));
    assert!(matches!(upkeep(&stepwise, end), Upkeep::BackOff(BackOff::Lost)));
    // A confirmation counts from when its request was sent.
    assert_eq!(stepwise.on_renewed(ttl, late, late + ms(1), Some(true)), None);
    assert_eq!(stepwise.due(), Some(late + TTL / 3));
    let lost = Some(BackOff::Lost);
    assert_eq!(stepwise.on_renewed(ttl, late, late + ms(2), Some(false)), lost);
    let after = late + ttl.validity();
    assert_eq!(stepwise.on_renewed(ttl, late, after, None), lost);
}

#[test]
fn an_unused_hold_ends_after_a_second_and_later_after_sixteen() {
    let (spec, owner) = (spec(), Owner::random().unwrap());
    for (releases, seconds) in [(0, 1), (1, 2), (2, 4), (3, 8), (4, 16), (9, 16)] {
        let mut stepwise = queued(&spec_with(LockOptions::new()));
        (0..releases).for_each(|_| stepwise.on_hold_released());
        stepwise.on_step_acquired(at(0), &spec);
        let end = at(seconds * 1_000);
        // Validity is longer than all of them.
        let ttl =
            Policy::new(&LockOptions::new().ttl(Duration::from_secs(600)), &Defaults::default());
        stepwise.on_renewed(ttl.unwrap().ttl, at(0), at(0), Some(true));
        let upkeep = |now| stepwise.upkeep(&spec, owner, now, ms(500));
        let early = end.saturating_sub(Duration::from_nanos(1));
        assert!(!matches!(upkeep(early), Upkeep::BackOff(_)), "{releases}");
        assert!(matches!(upkeep(end), Upkeep::BackOff(BackOff::HeldTooLong)), "{releases}");
    }
}

#[test]
fn a_wanted_hold_ends_soon_and_only_once() {
    let (spec, owner) = (spec(), Owner::random().unwrap());
    for (releases, round_trip, longest) in [
        (0, ROUND_TRIP, 100),
        (1, ROUND_TRIP, 200),
        (9, ROUND_TRIP, 1_600),
        (0, ms(50), 400),
        (0, ms(900), 1_600),
    ] {
        let mut stepwise = queued(&spec);
        (0..releases).for_each(|_| stepwise.on_hold_released());
        stepwise.on_step_acquired(at(0), &spec);
        stepwise.on_round_trip(round_trip);
        stepwise.on_wanted(at(0));
        let due = stepwise.due().unwrap();
        // One second, or a round trip for each of nine keys.
        let in_any_case = 1_000.max(9 * u64::try_from(round_trip.as_millis()).unwrap());
        let longest = if releases == 0 { longest.min(in_any_case) } else { longest };
        assert!((at(longest / 4)..=at(longest)).contains(&due), "{releases}: {due:?}");
        stepwise.on_wanted(at(900));
        assert_eq!(stepwise.due(), Some(due));
        let upkeep = stepwise.upkeep(&spec, owner, due, ms(500));
        assert!(matches!(upkeep, Upkeep::BackOff(BackOff::HeldTooLong)));
    }
    // Nothing is held, so nothing ends.
    let mut empty = queued(&spec);
    empty.on_round_trip(ROUND_TRIP);
    empty.on_wanted(at(0));
    assert_eq!(empty.due(), None);
    assert!(matches!(empty.upkeep(&spec, owner, at(9_000), ms(500)), Upkeep::None));
    assert_eq!(empty.on_renewed(spec.policy.ttl, at(0), at(1), Some(false)), None);
}

/// Unless another owner waits for it.
#[test]
fn a_hold_lasts_nine_round_trips_for_one_key() {
    let spec = spec();
    let mut stepwise = queued(&spec);
    stepwise.on_step_acquired(at(0), &spec);
    stepwise.on_round_trip(ms(900));
    let long = Policy::new(&LockOptions::new().ttl(TTL * 60), &Defaults::default()).unwrap().ttl;
    stepwise.on_renewed(long, at(0), at(0), Some(true));
    assert_eq!(stepwise.due(), Some(at(9 * 900)));
}

#[test]
fn a_released_hold_leaves_the_owner_in_the_queue() {
    let spec = spec();
    let mut stepwise = queued(&spec);
    stepwise.on_step_acquired(at(10), &spec);
    assert_eq!(stepwise.on_contended(WaitMode::Poll, at(11), &spec), NextStep::Request);
    assert_eq!(stepwise.on_contended(QUEUED, at(12), &spec), NextStep::Wait);
    assert_eq!((stepwise.step(), held(&stepwise)), (Some(1), &[0][..]));
    assert!(stepwise.involves(0) && stepwise.involves(1) && !stepwise.involves(2));
    stepwise.on_hold_released();
    assert!(stepwise.is_queued() && !stepwise.holds_any());
    assert_eq!((stepwise.step(), stepwise.due()), (Some(1), None));
    // That key is granted first. The others follow.
    stepwise.on_step_acquired(at(20), &spec);
    assert_eq!(held(&stepwise), [1]);
    assert_eq!(stepwise.on_contended(WaitMode::Poll, at(21), &spec), NextStep::Request);
    assert_eq!(stepwise.step(), Some(0));
}

/// Otherwise owners of each of two keys wait in the queue of the other, and few get both.
#[test]
fn a_hold_against_the_order_never_lasts_longer_than_the_first() {
    let spec = spec();
    let mut stepwise = queued(&spec);
    stepwise.on_step_acquired(at(0), &spec);
    stepwise.on_contended(WaitMode::Poll, at(0), &spec);
    stepwise.on_contended(QUEUED, at(0), &spec);
    (0..9).for_each(|_| stepwise.on_hold_released());
    stepwise.on_step_acquired(at(0), &spec);
    assert_eq!((held(&stepwise), stepwise.due()), (&[1][..], Some(at(1_000))));
    stepwise.on_round_trip(ROUND_TRIP);
    stepwise.on_wanted(at(0));
    assert!(stepwise.due().unwrap() <= at(100), "{stepwise:?}");
    // Released too, and again in order: for longer.
    stepwise.on_contended(WaitMode::Poll, at(0), &spec);
    stepwise.on_contended(QUEUED, at(0), &spec);
    stepwise.on_hold_released();
    stepwise.on_step_acquired(at(0), &spec);
    stepwise.on_round_trip(ROUND_TRIP);
    stepwise.on_wanted(at(0));
    assert_eq!(held(&stepwise), [0]);
    assert!(stepwise.due().unwrap() >= at(400), "{stepwise:?}");
}

#[test]
fn a_back_off_waits_as_long_as_the_hold_lasted() {
    let spec = spec();
    let mut stepwise = queued(&spec);
    stepwise.on_step_acquired(at(1_000), &spec);
    stepwise.back_off(at(1_700), BackOff::HeldTooLong);
    assert!(stepwise.is_optimistic());
    let contended = |stepwise: &mut Stepwise, now| stepwise.on_contended(QUEUED, at(now), &spec);
    assert_eq!(contended(&mut stepwise, 2_399), NextStep::Wait);
    assert_eq!(contended(&mut stepwise, 2_400), NextStep::Request);
    // A grant for all keys does not reach this state machine; one for a step out of turn changes nothing.
    let mut optimistic = Stepwise::new(&spec, true);
    optimistic.on_step_acquired(at(1), &spec);
    assert!(optimistic.is_optimistic() && !optimistic.holds_any());
}

#[test]
fn an_unused_hold_lasts_twice_as_long_after_a_back_off() {
    let spec = spec();
    let mut stepwise = queued(&spec);
    for seconds in [1, 2] {
        stepwise.on_step_acquired(at(0), &spec);
        assert_eq!(stepwise.due(), Some(at(seconds * 1_000)));
        stepwise.back_off(at(0), BackOff::Lost);
        assert_eq!(stepwise.on_contended(WaitMode::Poll, at(0), &spec), NextStep::Request);
    }
}
