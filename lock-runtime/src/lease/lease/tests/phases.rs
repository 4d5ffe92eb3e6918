//! How long a lease is valid, and what renewals, hand-offs and releases do to it.

use std::panic::Location;
use std::pin::pin;

use super::*;
use crate::backend::{BackendError, FailureKind};
use crate::base::options::Renew;
use crate::queue::permit::PermitHandler;

const TTL: Duration = Duration::from_secs(10);

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

const NANO: Duration = Duration::from_nanos(1);

/// A clock that stands still between calls of [`pass`].
async fn clock() -> Clock {
    let clock = Clock::runtime();
    pass(secs(60)).await;
    clock
}

async fn pass(time: Duration) {
    tokio::time::advance(time).await;
}

/// Renewed every three seconds, unless `options` say otherwise.
fn spec_of(options: LockOptions) -> LockSpec {
    let keys: Arc<[Key]> = [Key::from_static("k")].into();
    let label = LockLabel::Key(keys[0].clone(), Location::caller());
    LockSpec::new(label, keys, Policy::new(&options, &Defaults::default()).unwrap(), "app:")
}

const fn plain() -> LockOptions {
    LockOptions::new().ttl(TTL).renew(Renew::Every(secs(3))).wait(Wait::For(secs(1)))
}

fn grant_of(spec: &LockSpec, clock: Clock) -> Grant {
    let owner = Owner::random().unwrap();
    Grant::new(owner, None, &spec.policy, clock.now(), None, None)
}

fn lease_of(spec: LockSpec, grant: Grant, clock: Clock) -> Lease {
    Lease::new(1, "pool".into(), Arc::new(spec), grant, HoldTimes::now(clock), clock)
}

/// The lease of a request that is sent and granted now.
fn granted(options: LockOptions, clock: Clock) -> Lease {
    let spec = spec_of(options);
    let grant = grant_of(&spec, clock);
    lease_of(spec, grant, clock)
}

/// Begins the renewal that is due.
fn renew(lease: &Lease) {
    let due = lease.due().unwrap();
    assert!(matches!(lease.poll_renewal(due), RenewalAction::Renew { .. }));
}

fn failure() -> BackendError {
    BackendError::new(FailureKind::NotApplied, "planned")
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_held_until_its_validity_ends_and_overdue_from_then_on() {
    let clock = clock().await;
    let lease = granted(plain(), clock);
    let validity = lease.ttl.validity();
    assert_eq!((lease.valid_for(), lease.held_for()), (validity, Duration::ZERO));
    assert!(lease.is_held() && !lease.is_overdue());
    pass(validity - NANO).await;
    assert!(lease.is_held() && !lease.is_overdue());
    assert_eq!((lease.valid_for(), lease.held_for()), (NANO, validity - NANO));
    pass(NANO).await;
    assert!(!lease.is_held() && lease.is_overdue());
    pass(NANO).await;
    assert!(!lease.is_held() && lease.is_overdue());
    assert_eq!(lease.loss(), None);
    assert!(lease.lose(Loss::Expired));
    assert!(!lease.is_held() && !lease.is_overdue(), "lost, and no longer overdue");
    assert_eq!(lease.loss(), Some(Loss::Expired));
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_lost_a_margin_before_its_end_for_what_has_ended_it() {
    let clock = clock().await;
    for (options, ends_after, loss) in [
        (plain(), TTL - ms(102), Loss::Expired),
        (plain().renew(Renew::Off), TTL - ms(102), Loss::TtlOver),
        (plain().max_hold(secs(5)), secs(5), Loss::MaxHold),
        (plain().max_hold(secs(60)), TTL - ms(102), Loss::Expired),
        (plain().renew(Renew::Off).max_hold(secs(5)), secs(5), Loss::MaxHold),
    ] {
        let lease = granted(options, clock);
        let cancel_at = lease.hold_began_at + (ends_after - ms(500));
        assert_eq!(lease.valid_for(), ends_after);
        if lease.renew_every.is_some() {
            renew(&lease);
        }
        assert_eq!(lease.due(), Some(cancel_at));
        let before = lease.poll_renewal(cancel_at.saturating_sub(NANO));
        assert!(matches!(before, RenewalAction::Wait(at) if at == cancel_at), "{before:?}");
        let at_end = lease.poll_renewal(cancel_at);
        assert!(matches!(at_end, RenewalAction::Lost), "{at_end:?}");
        assert_eq!((lease.is_held(), lease.loss(), lease.due()), (false, Some(loss), None));
        assert!(matches!(lease.poll_renewal(cancel_at), RenewalAction::Over));
        assert!(!lease.expire(cancel_at), "once");
    }
}

#[tokio::test(start_paused = true)]
async fn a_renewal_is_due_a_little_before_its_interval_and_extends_validity_from_its_sending() {
    let clock = clock().await;
    let lease = granted(plain().min_hold(secs(15)).max_hold(secs(18)), clock);
    let start = lease.hold_began_at;
    assert_eq!(lease.stored_until(), start + secs(15));
    let due = lease.due().unwrap();
    assert!((start + ms(2_500)..=start + secs(3)).contains(&due), "{due:?}");
    let early = lease.poll_renewal(due.saturating_sub(NANO));
    assert!(matches!(early, RenewalAction::Wait(at) if at == due), "{early:?}");
    let RenewalAction::Renew { cancel_at, in_doubt: false } = lease.poll_renewal(due) else {
        panic!("it is due");
    };
    assert_eq!(lease.due(), Some(cancel_at), "one renewal at a time");
    let sent = start + secs(3);
    lease.on_renewed(sent, secs(3));
    assert_eq!(lease.valid_until(), sent + lease.ttl.validity());
    assert_eq!(lease.stored_until(), start + secs(15), "for the `min_hold`");
    let next = lease.due().unwrap();
    assert!((sent + ms(2_500)..=sent + secs(3)).contains(&next), "{next:?}");
    // Up to the end of `max_hold`, and longer at the store.
    renew(&lease);
    lease.on_renewed(start + secs(9), secs(3));
    assert_eq!(lease.valid_until(), start + secs(18));
    assert_eq!(lease.stored_until(), start + secs(19));
}

#[tokio::test(start_paused = true)]
async fn a_failed_renewal_is_repeated_soon_and_in_doubt() {
    let clock = clock().await;
    let lease = granted(plain(), clock);
    let start = lease.hold_began_at;
    assert!(lease.unconfirmed().is_none());
    renew(&lease);
    lease.on_renewal_failed(start + secs(3), start + secs(3), failure());
    assert_eq!(lease.unconfirmed().unwrap().message(), "planned");
    assert_eq!(lease.valid_until(), start + lease.ttl.validity());
    // It may have been applied as late as it failed.
    assert_eq!(lease.stored_until(), start + secs(13));
    // Those of many leases that failed together do not stay together.
    let pause = lease.due().unwrap().since(start + secs(3));
    assert!((TTL / 24 * 6 / 7..=TTL / 24).contains(&pause), "{pause:?}");
    let action = lease.poll_renewal(start + secs(4));
    assert!(matches!(action, RenewalAction::Renew { in_doubt: true, .. }), "{action:?}");
    lease.on_renewed(start + secs(4), secs(3));
    assert!(lease.unconfirmed().is_none());
    renew(&lease);
    lease.on_not_held(start + secs(7));
    assert_eq!(lease.due(), Some(start + secs(7)));
    // The answer to a renewal that is no longer in flight.
    lease.on_renewed(start + secs(8), secs(3));
    assert_eq!((lease.due(), lease.stored_until()), (Some(start + secs(7)), start + secs(17)));
}

#[tokio::test(start_paused = true)]
async fn validity_that_has_run_out_is_not_extended() {
    let clock = clock().await;
    let lease = granted(plain(), clock);
    renew(&lease);
    let sent = clock.now() + secs(3);
    pass(lease.ttl.validity()).await;
    lease.on_renewed(sent, secs(3));
    assert!(lease.is_overdue());
    assert_eq!(lease.stored_until(), sent + TTL, "the store has it for longer");
}

#[tokio::test(start_paused = true)]
async fn a_grant_is_withdrawn_after_a_ttl_unless_it_is_picked_up() {
    let clock = clock().await;
    for (wait, offered_for) in
        [(Wait::For(secs(1)), TTL), (Wait::Forever, TTL), (Wait::For(secs(12)), secs(12))]
    {
        let [offered, taken] = [(); 2].map(|()| granted(plain().wait(wait), clock));
        assert!(taken.pick_up());
        assert!(!taken.pick_up(), "once");
        let start = offered.hold_began_at;
        for lease in [&offered, &taken] {
            renew(lease);
            lease.on_renewed(start + secs(6), secs(8));
        }
        let until = start + offered_for;
        assert_eq!(offered.due(), Some(until));
        assert!(matches!(offered.poll_renewal(until.saturating_sub(NANO)), RenewalAction::Wait(_)));
        assert!(matches!(offered.poll_renewal(until), RenewalAction::OfferExpired));
        assert!(!offered.pick_up());
        assert!(taken.due().unwrap() > until);
        renew(&taken);
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_is_handed_on_with_all_that_is_left_of_it() {
    let clock = clock().await;
    let spec = spec_of(plain());
    let mut grant = grant_of(&spec, clock);
    let (owner, since) = (grant.owner, grant.sent);
    grant.permit = Some(permit(&Arc::default()));
    pass(ms(5)).await;
    let first = lease_of(spec, grant, clock);
    let (due, until, stored) = (first.due(), first.valid_until(), first.stored_until());
    assert!(!first.is_transferred() && first.has_permit());
    pass(secs(2)).await;
    let (grant, _) = first.transfer(&spec_of(plain().fencing(false)), clock.now()).unwrap();
    assert!(first.is_transferred() && !first.is_held() && !first.has_permit());
    assert_eq!((first.due(), first.loss()), (None, None));
    assert!(!first.begin_release() && !first.lose(Loss::Taken));
    assert!(first.transfer(&spec_of(plain()), clock.now()).is_none(), "once");
    let second = lease_of(spec_of(plain()), grant, clock);
    assert!(second.has_permit());
    assert_eq!((second.owner, second.grant_sent_at), (owner, since));
    assert_eq!(second.hold_began_at, clock.now());
    assert_eq!((second.due(), second.valid_until()), (due, until));
    assert_eq!(second.stored_until(), stored);
}

#[tokio::test(start_paused = true)]
async fn a_hold_is_handed_on_only_to_a_request_for_the_same() {
    let clock = clock().await;
    let is_handed_on =
        |mine, its| granted(mine, clock).transfer(&spec_of(its), clock.now()).is_some();
    for (mine, its, expected) in [
        (plain(), plain(), true),
        (plain(), plain().max_hold(secs(5)), true),
        (plain().renew(Renew::Off), plain().renew(Renew::Off), false),
        (plain().max_hold(secs(60)), plain(), false),
        (plain(), plain().min_hold(NANO), false),
        (plain(), plain().ttl(secs(9)), false),
        (plain(), plain().renew(Renew::Every(secs(2))), false),
    ] {
        assert_eq!(is_handed_on(mine, its), expected, "{mine:?}, {its:?}");
    }
    let spec = spec_of(plain());
    let mut grant = grant_of(&spec, clock);
    grant.ambiguous_until = Some(clock.now());
    assert!(lease_of(spec, grant, clock).transfer(&spec_of(plain()), clock.now()).is_none());
    let renewing = granted(plain(), clock);
    renew(&renewing);
    assert!(renewing.transfer(&spec_of(plain()), clock.now()).is_none());
    assert!(renewing.is_held() && !renewing.is_transferred());
}

#[tokio::test(start_paused = true)]
async fn a_hold_with_a_sequencer_is_not_handed_on() {
    let clock = clock().await;
    let lease = granted(plain(), clock);
    assert!(lease.name_owner() && lease.name_owner());
    assert!(lease.transfer(&spec_of(plain()), clock.now()).is_none());
    assert!(lease.is_held() && lease.begin_release());
    assert!(!lease.name_owner() && lease.is_released());
    let transferred = granted(plain(), clock);
    assert!(transferred.transfer(&spec_of(plain()), clock.now()).is_some());
    assert!(!transferred.name_owner(), "the owner is that of the next holder");
}

#[tokio::test(start_paused = true)]
async fn a_hold_is_handed_on_after_its_min_hold_and_while_half_a_ttl_is_left() {
    let clock = clock().await;
    let is_handed_on = |lease: &Lease| lease.transfer(&spec_of(plain()), clock.now()).is_some();
    let lease = granted(plain().min_hold(secs(2)), clock);
    pass(secs(2) - NANO).await;
    assert!(!is_handed_on(&lease));
    pass(NANO).await;
    assert!(is_handed_on(&lease));
    let [in_time, late] = [(); 2].map(|()| granted(plain(), clock));
    pass(in_time.ttl.validity() - TTL / 2).await;
    assert!(is_handed_on(&in_time));
    pass(NANO).await;
    assert!(!is_handed_on(&late));
    let lease = granted(plain().min_hold(secs(2)), clock);
    pass(secs(3)).await;
    assert!(is_handed_on(&lease));
}

#[tokio::test(start_paused = true)]
async fn a_hand_off_takes_a_reserved_fence_if_one_is_requested() {
    let clock = clock().await;
    let fenced = || spec_of(plain().fencing(true));
    let mut grant = grant_of(&fenced(), clock);
    grant.fences = Fences::new(Some(Fence::new(7)), 1);
    let mut lease = lease_of(fenced(), grant, clock);
    for fence in [7, 8] {
        assert_eq!(lease.fence, Some(Fence::new(fence)));
        let Some((grant, _)) = lease.transfer(&fenced(), clock.now()) else {
            assert_eq!(fence, 8, "one is reserved");
            break;
        };
        lease = lease_of(fenced(), grant, clock);
    }
    assert!(!lease.is_transferred(), "none is left");
    assert!(lease.transfer(&spec_of(plain()), clock.now()).is_some(), "none is needed");
    let unfenced = granted(plain(), clock);
    assert_eq!(unfenced.fence, None);
    assert!(unfenced.transfer(&fenced(), clock.now()).is_none());
}

#[tokio::test(start_paused = true)]
async fn a_renewal_without_an_answer_may_have_an_effect_for_one_ttl_also_under_the_next_holder() {
    let clock = clock().await;
    let until = |lease: &Lease| lease.late_renewals_until();
    let fails = |lease: &Lease, kind: FailureKind| {
        renew(lease);
        lease.on_renewal_failed(clock.now(), clock.now(), BackendError::new(kind, "planned"));
    };
    let lease = granted(plain(), clock);
    for kind in [FailureKind::NotApplied, FailureKind::Rejected] {
        fails(&lease, kind);
        assert_eq!(until(&lease), None);
    }
    fails(&lease, FailureKind::MaybeApplied);
    assert_eq!(until(&lease), Some(clock.now() + TTL));
    renew(&lease);
    // This one stays in flight for a second.
    let silence = BackendError::new(FailureKind::MaybeApplied, "planned");
    lease.on_renewal_failed(clock.now(), clock.now() + secs(1), silence);
    let first = clock.now() + secs(1) + TTL;
    assert_eq!(until(&lease), Some(first));
    renew(&lease);
    lease.on_renewed(clock.now(), secs(3));
    assert_eq!(until(&lease), Some(first), "an answer to a later one says nothing of it");
    let (grant, _) = lease.transfer(&spec_of(plain()), clock.now()).unwrap();
    let next = lease_of(spec_of(plain()), grant, clock);
    assert_eq!(until(&next), Some(first));
    renew(&next);
    pass(secs(2)).await;
    assert!(next.begin_release());
    assert_eq!(until(&next), Some(first + secs(1)), "in flight");
    next.on_renewed(clock.now(), secs(3));
    assert_eq!(until(&next), Some(first));
}

#[tokio::test(start_paused = true)]
async fn a_release_waits_for_the_renewal_in_flight_and_a_lost_one_too() {
    let clock = clock().await;
    type Answer = fn(&Lease, Instant);
    let answers: [Answer; 3] = [
        |lease, now| lease.on_renewed(now, secs(3)),
        |lease, now| lease.on_renewal_failed(now, now, failure()),
        |lease, now| lease.on_not_held(now),
    ];
    for (answer, is_lost) in answers.into_iter().flat_map(|it| [(it, false), (it, true)]) {
        let (lease, task) = (granted(plain(), clock), Task::new());
        renew(&lease);
        assert!(!is_lost || lease.lose(Loss::Taken));
        assert!(lease.begin_release() && !lease.begin_release());
        assert!(!lease.may_send_release() && !lease.is_held());
        assert_eq!(lease.due(), None);
        let waker = Waker::from(task.clone());
        let mut settled = pin!(lease.until_release_may_be_sent());
        assert!(settled.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        let now = clock.now() + secs(3);
        answer(&lease, now);
        assert_eq!((task.woken(), lease.may_send_release()), (1, true));
        assert!(settled.as_mut().poll(&mut Context::from_waker(&waker)).is_ready());
        assert_eq!((lease.stored_until(), lease.due()), (now + TTL, None));
        assert!(!lease.begin_release() && !lease.lose(Loss::Taken));
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_without_a_renewal_in_flight_is_sent_at_once() {
    let clock = clock().await;
    for is_lost in [false, true] {
        let lease = granted(plain(), clock);
        assert!(!is_lost || lease.lose(Loss::Taken));
        assert!(lease.may_send_release());
        assert!(lease.begin_release());
        assert!(lease.may_send_release());
        let mut settled = pin!(lease.until_release_may_be_sent());
        assert!(settled.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }
    // Lost while a renewal is in flight, and answered before the release.
    let lease = granted(plain(), clock);
    renew(&lease);
    assert!(lease.lose(Loss::Taken) && !lease.lose(Loss::Expired));
    lease.on_not_held(clock.now());
    assert_eq!(lease.due(), None);
    assert!(lease.begin_release() && lease.may_send_release());
}

#[tokio::test(start_paused = true)]
async fn an_expedited_renewal_is_due_at_once_unless_there_is_none() {
    let clock = clock().await;
    let now = clock.now() + secs(1);
    let lease = granted(plain(), clock);
    assert_eq!(lease.expedite(now), Expedited::Due);
    assert_eq!(lease.due(), Some(now));
    renew(&lease);
    assert_eq!(lease.expedite(now), Expedited::NotDue, "one is in flight");
    // Its answer may be from before the change.
    lease.on_renewed(clock.now(), secs(10));
    assert_eq!(lease.due(), Some(now));
    renew(&lease);
    lease.on_renewed(now, secs(10));
    assert!(lease.due().unwrap() > now, "once for each change");
    lease.expedite(now);
    renew(&lease);
    lease.expedite(now + secs(1));
    lease.on_renewal_failed(now, now, failure());
    assert_eq!(lease.due(), Some(now + secs(1)), "without the pause behind a failure");
    let fixed = granted(plain().renew(Renew::Off), clock);
    let due = fixed.due();
    assert_eq!(fixed.expedite(now), Expedited::NotDue);
    assert_eq!(fixed.due(), due);
}

#[tokio::test(start_paused = true)]
async fn the_store_is_told_what_is_left_of_the_min_hold() {
    let clock = clock().await;
    let lease = granted(plain().min_hold(secs(2)), clock);
    for (passed, left) in [(0, 2_000), (500, 1_500), (2_000, 0)] {
        pass(ms(passed)).await;
        let reference = lease.to_store();
        assert_eq!((reference.min_hold, reference.ttl), (ms(left), TTL));
        assert_eq!((reference.owner, reference.keys[0].as_str()), (lease.owner, "app:k"));
    }
    assert_eq!(granted(plain(), clock).remaining_min_hold(), Duration::ZERO);
}

/// Counts the keys of dropped permits.
#[derive(Debug, Default)]
struct Dropped(AtomicUsize);

impl PermitHandler for Dropped {
    fn permits_dropped(self: Arc<Self>, keys: &[Key]) {
        self.0.fetch_add(keys.len(), Ordering::SeqCst);
    }
}

fn permit(dropped: &Arc<Dropped>) -> KeyPermit {
    KeyPermit::new(dropped.clone(), [Key::from_static("k")].into())
}

#[tokio::test(start_paused = true)]
async fn a_loss_passes_the_permit_on_and_a_release_takes_it() {
    let clock = clock().await;
    let with_permit = |dropped: &Arc<Dropped>| {
        let spec = spec_of(plain());
        let mut grant = grant_of(&spec, clock);
        grant.permit = Some(permit(dropped));
        lease_of(spec, grant, clock)
    };
    let dropped = Arc::default();
    let lost = with_permit(&dropped);
    assert_eq!(lost.permit_keys().as_deref(), Some(&[Key::from_static("k")][..]));
    assert!(lost.has_permit() && lost.lose(Loss::Expired) && !lost.has_permit());
    assert_eq!(lost.permit_keys(), None);
    assert_eq!(dropped.0.load(Ordering::SeqCst), 1);
    let dropped = Arc::default();
    let released = with_permit(&dropped);
    assert!(released.begin_release() && released.has_permit());
    let permit = released.take_permit();
    assert_eq!((permit.is_some(), released.has_permit()), (true, false));
    assert_eq!(dropped.0.load(Ordering::SeqCst), 0);
    drop(permit);
    assert_eq!(dropped.0.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lease_knows_its_place_in_the_queue_of_renewals() {
    let clock = clock().await;
    let lease = granted(plain(), clock);
    let (one, two) = (clock.now(), clock.now() + secs(1));
    assert_eq!(lease.schedule_at(one), Instant::ORIGIN);
    assert_eq!(lease.schedule_at(two), one);
    assert_eq!(lease.schedule_at(one), two);
    let holder = lease.holder();
    assert_eq!((holder.lease, holder.owner, holder.since), (1, lease.owner, one));
}

#[tokio::test(start_paused = true)]
async fn a_hold_is_measured_until_its_end() {
    let clock = clock().await;
    let ends: [&dyn Fn(&Lease); 3] = [
        &|lease| assert!(lease.lose(Loss::Taken)),
        &|lease| assert!(lease.begin_release()),
        &|lease| assert!(lease.transfer(&lease.spec, clock.now()).is_some()),
    ];
    for end in ends {
        let lease = granted(plain(), clock);
        pass(secs(2)).await;
        assert_eq!(lease.held_for(), secs(2));
        end(&lease);
        pass(secs(60)).await;
        // That of a lost lease is later.
        let _ = lease.begin_release();
        assert_eq!(lease.held_for(), secs(2));
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_finds_a_loss_that_was_not_known() {
    let clock = clock().await;
    let lease = granted(plain(), clock);
    assert!(lease.begin_release());
    assert!(lease.lose_before_release() && !lease.lose_before_release(), "once");
    assert_eq!(lease.loss(), Some(Loss::FoundAtRelease));
    let lost = granted(plain(), clock);
    assert!(lost.lose(Loss::Expired) && lost.begin_release() && !lost.lose_before_release());
    assert_eq!(lost.loss(), Some(Loss::Expired));
}

#[tokio::test(start_paused = true)]
async fn a_lease_without_a_holder_keeps_the_fences_for_later_holders() {
    let clock = clock().await;
    let fenced = || spec_of(plain().fencing(true));
    let former = granted(plain().fencing(true), clock);
    let mut grant = grant_of(&fenced(), clock);
    grant.fences = Fences::new(Some(Fence::new(7)), 0);
    let lingering = Lease::without_holder(2, &former, grant);
    assert!(former.has_holder() && !lingering.has_holder());
    assert_eq!((lingering.id, lingering.fence), (2, None));
    assert!(lingering.is_held() && !lingering.pick_up());
    let (grant, _) = lingering.transfer(&fenced(), clock.now()).unwrap();
    assert_eq!(lease_of(fenced(), grant, clock).fence, Some(Fence::new(7)));
}

/// The store has extended the lease, although its answer came after the time limit of the request.
#[tokio::test(start_paused = true)]
async fn a_late_answer_extends_a_lease_that_is_held() {
    let clock = clock().await;
    let renewing =
        |lease: &Lease, at| matches!(lease.poll_renewal(at), RenewalAction::Renew { .. });
    let failed = || BackendError::new(FailureKind::MaybeApplied, "silence");
    let valid_for = |lease: &Lease| lease.valid_for();
    let lease = granted(plain(), clock);
    pass(secs(3)).await;
    let sent = clock.now();
    assert!(renewing(&lease, sent + TTL / 3));
    pass(secs(1)).await;
    lease.on_renewal_failed(clock.now(), clock.now(), failed());
    let (before, due) = (valid_for(&lease), lease.due());
    assert!(lease.on_late_answer(sent) && lease.unconfirmed().is_none());
    assert_eq!(valid_for(&lease), before + secs(3));
    assert_eq!(lease.due(), due, "the next one is sent all the same");
    // Beside the next renewal, and not back.
    assert!(renewing(&lease, sent + TTL / 2));
    assert!(lease.on_late_answer(sent));
    assert_eq!(valid_for(&lease), before + secs(3));
    assert!(lease.on_late_answer(sent + secs(1)));
    assert_eq!(valid_for(&lease), before + secs(4));
    lease.on_renewal_failed(clock.now(), clock.now(), failed());
    assert!(lease.begin_release());
    assert!(!lease.on_late_answer(sent + secs(1)));
    assert_eq!(valid_for(&lease), Duration::ZERO, "it is released");
    let lost = granted(plain(), clock);
    assert!(lost.lose(Loss::Taken));
    assert!(!lost.on_late_answer(clock.now()));
    assert_eq!(valid_for(&lost), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_revives_no_validity_that_has_run_out() {
    let clock = clock().await;
    let lease = granted(plain(), clock);
    pass(TTL).await;
    assert!(!lease.is_held());
    assert!(!lease.on_late_answer(clock.now()));
    assert!(!lease.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_withdrawn_unless_a_task_has_it() {
    let clock = clock().await;
    let (claimed, unclaimed) = (granted(plain(), clock), granted(plain(), clock));
    assert!(claimed.pick_up() && !claimed.withdraw_if_unclaimed());
    assert!(unclaimed.withdraw_if_unclaimed() && !unclaimed.pick_up());
    let grant = grant_of(&spec_of(plain()), clock);
    assert!(Lease::without_holder(2, &claimed, grant).withdraw_if_unclaimed());
}

#[tokio::test(start_paused = true)]
async fn a_grant_with_fences_expects_the_holders_that_it_has_had() {
    let clock = clock().await;
    let spec = spec_of(plain().fencing(true));
    let mut grant = grant_of(&spec, clock);
    grant.fences = Fences::new(Some(Fence::new(7)), 3);
    let lease = lease_of(spec, grant, clock);
    assert_eq!(lease.expected_holders(), ExpectedHolders::Exactly(1));
}

#[tokio::test(start_paused = true)]
async fn a_running_body_is_known() {
    let lease = granted(plain(), clock().await);
    assert!(!lease.body_runs());
    let running = lease.enter_body();
    assert!(lease.body_runs());
    drop(running);
    assert!(!lease.body_runs());
}

#[tokio::test(start_paused = true)]
async fn a_wait_lasts_from_the_call_to_the_grant() {
    let clock = clock().await;
    let (spec, requested_at) = (spec_of(plain()), clock.now());
    pass(ms(30)).await;
    let grant = grant_of(&spec, clock);
    let times = HoldTimes { requested_at, hold_began_at: clock.now() };
    let lease = Lease::new(1, "pool".into(), Arc::new(spec), grant, times, clock);
    assert_eq!((lease.waited(), lease.held_for()), (ms(30), Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn a_lost_lock_stays_locked_for_its_delay_and_a_released_one_does_not() {
    let clock = clock().await;
    for (options, after_loss, otherwise) in [
        (plain(), 0, 0),
        (plain().lock_delay(secs(2)), 9, 0),
        (plain().min_hold(secs(5)), 2, 2),
        (plain().lock_delay(secs(2)).min_hold(secs(5)), 9, 2),
        (plain().lock_delay(secs(2)).min_hold(secs(20)), 17, 17),
    ] {
        let lease = granted(options, clock);
        assert!(lease.pick_up());
        pass(secs(3)).await;
        assert_eq!(lease.locked_after_release(), secs(otherwise), "{options:?}");
        assert!(lease.lose(Loss::Taken));
        assert_eq!(lease.locked_after_release(), secs(after_loss), "{options:?}");
        let closed = granted(options, clock);
        assert!(closed.pick_up());
        pass(secs(3)).await;
        assert!(closed.lose(Loss::PoolClosed));
        assert_eq!(closed.locked_after_release(), secs(otherwise), "{options:?}");
        assert_eq!(closed.locked_beside_holder(), secs(after_loss), "{options:?}");
    }
}

/// No body has begun.
#[tokio::test(start_paused = true)]
async fn a_lease_that_was_not_picked_up_has_no_min_hold() {
    let clock = clock().await;
    let lease = granted(plain().min_hold(secs(5)), clock);
    assert_eq!(lease.locked_after_release(), Duration::ZERO);
    assert_eq!(lease.to_store().min_hold, secs(5), "renewals keep it");
    let lost = granted(plain().min_hold(secs(5)).lock_delay(secs(2)), clock);
    assert!(lost.lose(Loss::Taken) && lost.withdraw() && !lost.pick_up());
    assert_eq!(lost.locked_after_release(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_release_is_due_until_earlier_grants_of_the_owner_are_forgotten() {
    let clock = clock().await;
    let (spec, now) = (spec_of(plain()), clock.now());
    for (earlier, expected) in [(now + secs(3), now + TTL), (now + TTL * 3, now + TTL * 3)] {
        let grant = grant_of(&spec, clock).with_earlier_until(earlier);
        let lease = lease_of(spec_of(plain()), grant, clock);
        assert_eq!((lease.stored_until(), lease.forgotten_at()), (now + TTL, expected));
        let (passed_on, _) = lease.transfer(&spec, clock.now()).unwrap();
        assert_eq!(lease_of(spec_of(plain()), passed_on, clock).forgotten_at(), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_was_lost_before_is_not_a_released_one() {
    let clock = clock().await;
    let lease = granted(plain(), clock);
    assert!(!lease.is_released());
    assert!(lease.begin_release() && lease.is_released());
    let lost = granted(plain(), clock);
    assert!(lost.lose(Loss::Taken) && lost.begin_release() && !lost.is_released());
}

/// The gauge of held locks.
#[cfg(feature = "metrics")]
#[derive(Default)]
struct HeldGauge(Arc<AtomicU64>);

#[cfg(feature = "metrics")]
impl metrics::Recorder for HeldGauge {
    fn describe_counter(
        &self,
        _: metrics::KeyName,
        _: Option<metrics::Unit>,
        _: metrics::SharedString,
    ) {
    }

    fn describe_gauge(
        &self,
        _: metrics::KeyName,
        _: Option<metrics::Unit>,
        _: metrics::SharedString,
    ) {
    }

    fn describe_histogram(
        &self,
        _: metrics::KeyName,
        _: Option<metrics::Unit>,
        _: metrics::SharedString,
    ) {
    }

    fn register_counter(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Counter {
        metrics::Counter::noop()
    }

    fn register_gauge(&self, key: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Gauge {
        if key.name() == "lock.held" {
            metrics::Gauge::from_arc(self.0.clone())
        } else {
            metrics::Gauge::noop()
        }
    }

    fn register_histogram(
        &self,
        _: &metrics::Key,
        _: &metrics::Metadata<'_>,
    ) -> metrics::Histogram {
        metrics::Histogram::noop()
    }
}

#[cfg(feature = "metrics")]
#[tokio::test(start_paused = true)]
async fn the_end_of_a_hold_is_measured_once_and_not_without_a_holder() {
    let clock = clock().await;
    let measured = || {
        let (gauge, mut spec) = (HeldGauge::default(), spec_of(plain()));
        spec.metrics = metrics::with_local_recorder(&gauge, || {
            crate::base::metrics::PoolMetrics::default().of("k")
        });
        let grant = grant_of(&spec, clock);
        (lease_of(spec, grant, clock), gauge)
    };
    let ended = |gauge: &HeldGauge| -f64::from_bits(gauge.0.load(Ordering::SeqCst));
    let (lease, gauge) = measured();
    assert_eq!(ended(&gauge), 0.0);
    assert!(lease.begin_release());
    assert_eq!(ended(&gauge), 1.0);
    let (lease, gauge) = measured();
    assert!(lease.lose(Loss::Taken));
    assert_eq!(ended(&gauge), 1.0);
    assert!(lease.begin_release());
    assert_eq!(ended(&gauge), 1.0);
    for end in [Lease::begin_release as fn(&Lease) -> bool, |lease| lease.lose(Loss::Taken)] {
        let (former, gauge) = measured();
        let lingering = Lease::without_holder(2, &former, grant_of(&former.spec, clock));
        assert!(end(&lingering));
        assert_eq!(ended(&gauge), 0.0);
    }
}
