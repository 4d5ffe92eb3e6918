//! Fences by ballot over a quorum (`redlock://`), as a model: everything that may happen, in every order, within
//! bounds, explored by stateright's checker. The product's rules are at the head of its `quorum` module.
//!
//! **Modelled.** Three nodes: the key with its owner, its number and its expiry, the greatest number promised, and
//! the greatest one accepted that may have been granted. Two or three attempts, each with a token of its own:
//! rounds of proposals, a decision as soon as a majority is counted, renewals, hand-offs inside a block of numbers,
//! the release after a grant, and the withdrawal on giving up. What was sent reaches a node at any time, any number
//! of times, or never, before or after whatever else was sent; only replies to the newest round or renewal count. A
//! deadline may pass at any moment, and a key may expire at any moment after the last deadline that was set for it,
//! never before. A new round may propose any number above that of the round before, so nothing here depends on
//! clocks or counters, unless a test states it. The key's numbers may be forgotten at any moment, if a floor
//! stands in for them. Nodes may lose their data, or their clocks jump.
//!
//! **Not modelled.** More nodes, attempts and rounds than the bounds say. How fast clocks run: the drift margin is
//! taken to be right. That an attempt succeeds in the end: two may outbid one another for ever, which is why
//! they wait for a random time. A node that returns with a part of its data, or with half of a script. Several
//! keys in one request, and locks without fences. A seed that is read while nodes fail.
//!
//! Claimed: **M** no two leases are valid at the same time. **F1** a fence is above all that were granted before its
//! acquire began. **F2** none is granted twice. **R** no renewal succeeds that was sent after a newer grant was
//! complete. **H** no number of a block is handed on after a newer grant. "Holds" is said of the whole space. Its
//! states are in thousands; `LOCK_MODEL=long` adds a round or a number to most (some minutes in all). Steps are those
//! of the shortest counterexample, which the test prints (`--nocapture`).
//!
//! | attempts x rounds, numbers, faults | M | F1, F2 | R | states |
//! |---|---|---|---|---|
//! | 2 x 2, 3; 3 x 1, 3; none | holds | holds | | 73; 473 |
//! | 2 x 2, 3; 3 x 1, 2; floors | holds | holds | | 163; 137 |
//! | 2 x 2, 3, one renewal each | holds | holds | holds | 890 |
//! | 2 x 1, 3, renewals and floors | holds | holds | holds | 567 |
//! | 2 x 1, 3, late renewals counted | holds | holds | holds | 115 |
//! | 2 x 1, 3, renewals, releases that a node cannot note | holds | holds | holds | 51 |
//! | 2 x 1, 3, renewals, withdrawals as if they were releases | holds | holds | holds | 93 |
//! | 2 x 2, 4, blocks of two; H holds | holds | holds | | 329 |
//! | 2 x 2, 3; 3 x 1, 2; one clock jumps | 9 steps | holds | | 164; 255 |
//! | 2 x 1, 3, renewals, one clock jumps; and floors | 9 steps | holds | holds | 243; 1311 |
//! | the same, late renewals counted | 9 steps | holds | holds | 290 |
//! | 2 x 1, 4, blocks of two, one clock jumps; H: 10 steps | 9 steps | holds | | 74 |
//! | a node loses its data and votes at once | 9 steps | F1: 9 steps | | |
//! | it is seeded, without a wait | 10 steps | F2: 10 steps | | |
//! | it waits for the longest ttl | holds | 10 steps | | 57 |
//! | it waits, and is seeded; with renewals | holds | holds | holds | 228; 362; 121 |
//! | the same, renewals and floors | holds | holds | holds | 242 |
//! | it waits until clocks have passed the fences, and a ttl; with renewals | holds | holds | holds | 97; 255 |
//! | the same, renewals and floors | holds | holds | holds | 493 |
//!
//! | wrong rule | what it breaks |
//! |---|---|
//! | a node takes the key on a low proposal | F1, F2: 10 steps |
//! | a renewal re-takes a node with a greater number | R: 14 steps with a clock that jumps, or if late ones count |
//! | what was granted ends as if it had never been | R: 15 steps with a clock that jumps |
//! | a token is proposed again after its release was sent | M: 11 steps |
//! | a second grant does not set the ttl again | M: 11 steps |
//! | a register is forgotten without a floor | F1, F2: 10 steps |
//!
//! **What the protocol guarantees.** Messages are delayed, lost, reordered and duplicated, and nodes restart but lose
//! no write they have acknowledged. At most one client has a valid lease, and every fence is above all that were
//! granted before its acquire began. No fence is granted twice. This needs no clocks that agree, only clocks that
//! measure a ttl rightly.
//!
//! If a node's clock jumps, two leases may be valid. Fences are still unique and in order, so a resource
//! that refuses lower ones is safe; what a stale holder hands on inside a block is below the newer grant.
//!
//! A node that has lost its data has to stay away for the longest ttl, and then to take the greatest number from both
//! others. Without that it has to stay away longer: for the difference of the clients' clocks, and for what fences may
//! run ahead of them. One that votes sooner can break both promises.

use ballot_model::Claim::{
    self, Exclusive, HandedOnInOrder, NoRenewalOutlives, Ordered, SomeAllGranted,
    SomeGrantedAfterFaults, SomeGrantedAfterRelease, SomeHandedOn, SomeRenewed, Unique,
};
use ballot_model::{
    Back, Faults, LateRenewal, Low, Registers, Release, Retake, Rules, States, Token, Ttl,
    Withdrawal, check, counterexample,
};

const ALL: &[Claim] = &[Exclusive, Ordered, Unique];
const FENCES: &[Claim] = &[Ordered, Unique];
const GRANTS: &[Claim] = &[SomeAllGranted, SomeGrantedAfterRelease];
/// Of models with renewals.
const ALL_AND_R: &[Claim] = &[Exclusive, Ordered, Unique, NoRenewalOutlives];
const GRANTS_AND_RENEWALS: &[Claim] = &[SomeAllGranted, SomeGrantedAfterRelease, SomeRenewed];

/// Larger bounds, which take minutes: `LOCK_MODEL=long`.
fn is_long() -> bool {
    std::env::var("LOCK_MODEL").is_ok_and(|length| length == "long")
}

/// Three attempts with one round each.
fn three() -> Rules {
    Rules::of_product(3, 1, if is_long() { 3 } else { 2 })
}

fn renewed() -> Rules {
    Rules { renewals: 1, ..Rules::of_product(2, if is_long() { 2 } else { 1 }, 3) }
}

mod without_faults {
    use super::*;

    #[test]
    fn one_holds_at_a_time_and_fences_grow() {
        for rules in [Rules::of_product(2, 2, 3), Rules::of_product(3, 1, 3)] {
            check("no faults", rules, ALL, &[], GRANTS);
        }
        if is_long() {
            check("no faults, long", Rules::of_product(3, 2, 3), ALL, &[], GRANTS);
        }
    }

    #[test]
    fn no_renewal_outlives_a_newer_grant() {
        let rules = Rules { renewals: 1, ..Rules::of_product(2, 2, 3) };
        check("renewals", rules, ALL_AND_R, &[], GRANTS_AND_RENEWALS);
        if is_long() {
            let rules = Rules { renewals: 2, ..renewed() };
            check("renewals, two each", rules, ALL_AND_R, &[], GRANTS_AND_RENEWALS);
        }
    }

    /// Safe as well, but a key that a node forgets early stays away there.
    #[test]
    fn a_renewal_that_takes_no_node_of_its_own_number_holds_too() {
        let rules = Rules { retake: Retake::Above, ..renewed() };
        check("renewals, strictly above", rules, ALL_AND_R, &[], GRANTS_AND_RENEWALS);
    }

    /// Safe as well, but then a failed proposal blocks renewals at nodes.
    #[test]
    fn what_came_to_nothing_may_count_like_a_grant() {
        let rules = Rules { withdrawal: Withdrawal::Never, ..renewed() };
        check("no withdrawals", rules, ALL_AND_R, &[], GRANTS_AND_RENEWALS);
    }

    #[test]
    fn a_renewal_that_is_late_does_no_harm_where_it_is_counted() {
        let rules = Rules { late_renewal: LateRenewal::IsCounted, ..renewed() };
        check("late renewals counted", rules, ALL_AND_R, &[], GRANTS_AND_RENEWALS);
    }

    #[test]
    fn a_release_that_a_node_cannot_note_does_no_harm() {
        let rules = Rules { release: Release::FreesOnly, ..renewed() };
        check("releases not noted", rules, ALL_AND_R, &[], GRANTS_AND_RENEWALS);
    }

    #[test]
    fn blocks_are_disjoint_and_handed_on_in_order() {
        let hold = [ALL, &[HandedOnInOrder]].concat();
        let happen = [GRANTS, &[SomeHandedOn]].concat();
        let greatest = if is_long() { 5 } else { 4 };
        let rules = Rules { block: 2, ..Rules::of_product(2, 2, greatest) };
        check("blocks of 2", rules, &hold, &[], &happen);
    }

    #[test]
    fn registers_may_give_way_to_a_floor() {
        let registers = Registers::GiveWayToFloor;
        for rules in [Rules::of_product(2, 2, 3), three()] {
            check("floors", Rules { registers, ..rules }, ALL, &[], &[SomeGrantedAfterRelease]);
        }
        check(
            "floors, renewals",
            Rules { registers, ..renewed() },
            ALL_AND_R,
            &[],
            GRANTS_AND_RENEWALS,
        );
    }
}

mod a_clock_that_jumps {
    use super::*;

    #[test]
    fn lets_two_hold_but_fences_still_grow() {
        for rules in [Rules::of_product(2, 2, 3), three()] {
            let rules = Rules { faults: Faults::ClockSteps(1), ..rules };
            check("clock step", rules, FENCES, &[Exclusive], &[SomeGrantedAfterFaults]);
        }
        if is_long() {
            let rules = Rules { faults: Faults::ClockSteps(3), ..Rules::of_product(3, 1, 3) };
            check("three clock steps", rules, FENCES, &[Exclusive], &[SomeAllGranted]);
        }
    }

    #[test]
    fn lets_no_renewal_outlive_a_newer_grant() {
        let rules = Rules { faults: Faults::ClockSteps(1), ..renewed() };
        let hold = [FENCES, &[NoRenewalOutlives]].concat();
        check("clock step, renewals", rules, &hold, &[Exclusive], &[SomeAllGranted, SomeRenewed]);
        let floors = Rules { registers: Registers::GiveWayToFloor, ..rules };
        check("the same, floors", floors, &hold, &[Exclusive], &[SomeAllGranted, SomeRenewed]);
        let late = Rules { late_renewal: LateRenewal::IsCounted, ..rules };
        check("the same, late ones counted", late, &hold, &[Exclusive], &[SomeRenewed]);
    }

    #[test]
    fn lets_a_stale_holder_hand_on_what_is_below_the_newer_grant() {
        let rules = Rules { block: 2, faults: Faults::ClockSteps(1), ..Rules::of_product(2, 1, 4) };
        let fail = [Exclusive, HandedOnInOrder];
        check("clock step, blocks of 2", rules, FENCES, &fail, &[SomeHandedOn]);
    }
}

mod a_node_that_loses_its_data {
    use super::*;

    fn losses(count: u8, back: Back, rules: Rules) -> Rules {
        Rules { faults: Faults::Losses(count, back), ..rules }
    }

    #[test]
    fn breaks_both_promises_if_it_votes_at_once() {
        let rules = losses(1, Back::AtOnce, Rules::of_product(2, 2, 2));
        counterexample("quick loss", rules, Exclusive, 9);
        counterexample("quick loss", rules, Ordered, 9);
    }

    #[test]
    fn breaks_the_order_of_fences_if_it_only_waits() {
        let rules = losses(1, Back::AfterTtl, Rules::of_product(2, 2, 2));
        check("delayed loss", rules, &[Exclusive], FENCES, &[SomeGrantedAfterFaults]);
    }

    #[test]
    fn breaks_both_promises_if_it_is_seeded_without_a_wait() {
        let rules = losses(1, Back::Seeded, Rules::of_product(2, 2, 2));
        counterexample("seeded, no wait", rules, Exclusive, 10);
        counterexample("seeded, no wait", rules, Unique, 10);
    }

    #[test]
    fn keeps_them_if_it_waits_and_is_seeded() {
        let happen = [SomeGrantedAfterFaults, SomeGrantedAfterRelease];
        for rules in [Rules::of_product(2, 2, 3), three()] {
            let rules = losses(1, Back::AfterTtlSeeded, rules);
            check("delayed loss, seeded", rules, ALL_AND_R, &[], &happen);
        }
        let rules = losses(1, Back::AfterTtlSeeded, Rules { greatest: 2, ..renewed() });
        check(
            "delayed loss, seeded, renewals",
            rules,
            ALL_AND_R,
            &[],
            &[SomeRenewed, SomeGrantedAfterFaults],
        );
        let rules = Rules { registers: Registers::GiveWayToFloor, ..rules };
        check(
            "delayed loss, seeded, renewals, floors",
            rules,
            ALL_AND_R,
            &[],
            &[SomeRenewed, SomeGrantedAfterFaults],
        );
    }

    #[test]
    fn keeps_them_if_it_waits_until_clocks_have_passed_the_fences() {
        let happen = [SomeGrantedAfterFaults, SomeGrantedAfterRelease];
        let greatest = if is_long() { 3 } else { 2 };
        let rules = losses(1, Back::AfterClocksAndTtl, Rules::of_product(2, 2, greatest));
        check("delayed loss, clocks", rules, ALL_AND_R, &[], &happen);
        if is_long() {
            let rules = losses(1, Back::AfterClocksAndTtl, three());
            check("delayed loss, clocks", rules, ALL_AND_R, &[], &happen);
        }
        let rules = losses(1, Back::AfterClocksAndTtl, Rules { greatest: 2, ..renewed() });
        check(
            "delayed loss, clocks, renewals",
            rules,
            ALL_AND_R,
            &[],
            &[SomeRenewed, SomeGrantedAfterFaults],
        );
        let rules = Rules { registers: Registers::GiveWayToFloor, ..rules };
        check(
            "delayed loss, clocks, renewals, floors",
            rules,
            ALL_AND_R,
            &[],
            &[SomeRenewed, SomeGrantedAfterFaults],
        );
    }
}

/// Each with one rule turned to the wrong one, and nothing else.
mod the_wrong_rule {
    use super::*;

    #[test]
    fn a_key_taken_on_a_low_proposal_lets_a_fence_be_granted_twice() {
        let rules = Rules { low: Low::TakesTheKey, ..Rules::of_product(2, 1, 2) };
        counterexample("key taken on low", rules, Unique, 10);
        counterexample("key taken on low", rules, Ordered, 10);
    }

    #[test]
    fn a_renewal_that_takes_any_free_node_outlives_a_newer_grant() {
        let rules = Rules {
            retake: Retake::Always,
            faults: Faults::ClockSteps(1),
            renewals: 1,
            ..Rules::of_product(2, 1, 2)
        };
        counterexample("re-taken though the number moved on", rules, NoRenewalOutlives, 14);
        let late = LateRenewal::IsCounted;
        let rules = Rules { faults: Faults::None, late_renewal: late, ..rules };
        counterexample("the same, late, no faults", rules, NoRenewalOutlives, 14);
    }

    #[test]
    fn a_release_that_is_a_withdrawal_lets_a_renewal_outlive_a_newer_grant() {
        let withdrawal = Withdrawal::OfAll;
        let rules =
            Rules { withdrawal, faults: Faults::ClockSteps(1), ..Rules::of_product(2, 1, 2) };
        let rules = Rules { renewals: 1, ..rules };
        counterexample("all are withdrawn", rules, NoRenewalOutlives, 15);
    }

    #[test]
    fn a_token_proposed_again_after_its_release_lets_two_hold() {
        let rules = Rules { token: Token::IsProposedAgain, ..Rules::of_product(2, 2, 3) };
        counterexample("token proposed again", rules, Exclusive, 11);
    }

    #[test]
    fn a_grant_that_does_not_set_the_ttl_again_lets_two_hold() {
        let rules = Rules { ttl: Ttl::StaysAsItIs, ..Rules::of_product(2, 2, 3) };
        counterexample("ttl not set again", rules, Exclusive, 11);
    }

    #[test]
    fn a_register_forgotten_without_a_floor_lets_a_fence_be_granted_twice() {
        let rules = Rules { registers: Registers::AreForgotten, ..Rules::of_product(2, 1, 2) };
        counterexample("forgotten without a floor", rules, Unique, 10);
        counterexample("forgotten without a floor", rules, Ordered, 10);
    }
}

/// The reduction of the model changes none of its results.
#[test]
fn merging_states_changes_no_outcome() {
    let small = Rules { states: States::AreKeptApart, ..Rules::of_product(2, 1, 2) };
    check("states kept apart", small, ALL, &[], GRANTS);
    let rules = Rules { faults: Faults::ClockSteps(1), ..small };
    counterexample("states kept apart, clock step", rules, Exclusive, 9);
    let rules = Rules { faults: Faults::Losses(1, Back::AfterTtl), ..small };
    counterexample("states kept apart, delayed loss", rules, Ordered, 10);
    let rules = Rules { low: Low::TakesTheKey, ..small };
    counterexample("states kept apart, key taken on low", rules, Unique, 10);
}
