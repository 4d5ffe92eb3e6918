//! What is claimed of a model: what holds in every state, and what happens in some.

use std::sync::atomic::{AtomicBool, Ordering};

use stateright::Property;

use crate::world::World;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// M: no two leases are valid at the same time.
    Exclusive,
    /// F1: a grant's numbers are above those of all that were granted before its acquire began.
    Ordered,
    /// F2: no number is granted twice.
    Unique,
    /// R: no renewal that was sent after a greater number was granted succeeds.
    NoRenewalOutlives,
    /// H: no number is handed on after a greater one was granted.
    HandedOnInOrder,
    /// In some state every attempt has been granted.
    SomeAllGranted,
    /// In some, a lock that was released is held again.
    SomeGrantedAfterRelease,
    /// In some, a lock is held by a renewal.
    SomeRenewed,
    /// In some, a number has been handed on.
    SomeHandedOn,
    /// In some, all faults are over, all nodes are there, and more than one has been granted.
    SomeGrantedAfterFaults,
}

const COUNT: usize = Claim::SomeGrantedAfterFaults as usize + 1;

impl Claim {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exclusive => "M",
            Self::Ordered => "F1",
            Self::Unique => "F2",
            Self::NoRenewalOutlives => "R",
            Self::HandedOnInOrder => "H",
            Self::SomeAllGranted => "all are granted",
            Self::SomeGrantedAfterRelease => "granted after a release",
            Self::SomeRenewed => "renewed",
            Self::SomeHandedOn => "handed on",
            Self::SomeGrantedAfterFaults => "granted after the faults",
        }
    }

    /// Whether it is about every state.
    pub const fn is_invariant(self) -> bool {
        (self as usize) < Self::SomeAllGranted as usize
    }
}

#[derive(Debug)]
pub(crate) struct Claims {
    claims: Vec<Claim>,
    /// The checker would go on to deeper states that show the same; the first one is the shortest way there.
    is_found: [AtomicBool; COUNT],
}

impl Claims {
    pub(crate) fn new(claims: &[Claim]) -> Self {
        Self { claims: claims.to_vec(), is_found: [const { AtomicBool::new(false) }; COUNT] }
    }

    pub(crate) fn properties(&self) -> Vec<Property<World>> {
        self.claims.iter().map(|claim| property(*claim)).collect()
    }

    fn holds(&self, claim: Claim, holds: bool) -> bool {
        holds || self.is_found[claim as usize].swap(true, Ordering::Relaxed)
    }

    fn happens(&self, claim: Claim, happens: bool) -> bool {
        happens && !self.is_found[claim as usize].swap(true, Ordering::Relaxed)
    }
}

fn property(claim: Claim) -> Property<World> {
    macro_rules! always {
        ($claim:ident, $holds:ident) => {
            Property::always(claim.name(), |world, state| {
                world.claims.holds(Claim::$claim, world.$holds(state))
            })
        };
    }
    macro_rules! sometimes {
        ($claim:ident, $happens:ident) => {
            Property::sometimes(claim.name(), |world, state| {
                world.claims.happens(Claim::$claim, world.$happens(state))
            })
        };
    }
    match claim {
        Claim::Exclusive => always!(Exclusive, is_exclusive),
        Claim::Ordered => always!(Ordered, is_ordered),
        Claim::Unique => always!(Unique, is_unique),
        Claim::NoRenewalOutlives => always!(NoRenewalOutlives, no_renewal_outlives),
        Claim::HandedOnInOrder => always!(HandedOnInOrder, is_handed_on_in_order),
        Claim::SomeAllGranted => sometimes!(SomeAllGranted, all_are_granted),
        Claim::SomeGrantedAfterRelease => {
            sometimes!(SomeGrantedAfterRelease, is_granted_after_release)
        }
        Claim::SomeRenewed => sometimes!(SomeRenewed, is_renewed),
        Claim::SomeHandedOn => sometimes!(SomeHandedOn, is_handed_on),
        Claim::SomeGrantedAfterFaults => {
            sometimes!(SomeGrantedAfterFaults, is_granted_after_faults)
        }
    }
}
