//! A checked model and the outcome.

use std::collections::BTreeMap;

use stateright::{Checker, HasDiscoveries, Model};

use crate::claims::{Claim, Claims};
use crate::rules::Rules;
use crate::story;
use crate::world::World;

/// The outcome of one check.
#[derive(Debug)]
pub struct Checked {
    pub states: usize,
    /// The shortest way to the first state that shows it, of each claim for which there is one: the
    /// counterexample of an invariant, the example of anything else.
    pub found: BTreeMap<&'static str, Vec<String>>,
}

impl Checked {
    /// The steps after which `claim` does not hold, or has happened.
    pub fn steps(&self, claim: Claim) -> Option<&[String]> {
        self.found.get(claim.name()).map(Vec::as_slice)
    }
}

/// Looks at every state there is, unless all of `claims` are found before.
fn explore(title: &str, rules: Rules, claims: &[Claim], finish_when: HasDiscoveries) -> Checked {
    let world = World { rules, claims: Claims::new(claims) };
    // One thread goes strictly by depth, and so finds the shortest way.
    let checker = world.checker().threads(1).finish_when(finish_when).spawn_bfs().join();
    assert!(checker.is_done(), "{title}: the check was cut off");
    let found = checker.discoveries();
    let found: BTreeMap<_, _> = found
        .into_iter()
        .map(|(name, path)| (name, story::told(&rules, path.into_vec())))
        .collect();
    let (states, depth) = (checker.unique_state_count(), checker.max_depth() - 1);
    println!("{title}: {states} states, depth {depth}");
    for claim in claims.iter().filter(|claim| claim.is_invariant()) {
        match found.get(claim.name()) {
            None => println!("  {} holds", claim.name()),
            Some(steps) => {
                println!("  {} fails after {} steps:", claim.name(), steps.len());
                steps.iter().for_each(|step| println!("    {step}"));
            }
        }
    }
    Checked { states, found }
}

/// Exhausts the model: each of `fail` has a counterexample, each of `hold` has none, and each of `happen` happens.
#[track_caller]
pub fn check(
    title: &str,
    rules: Rules,
    hold: &[Claim],
    fail: &[Claim],
    happen: &[Claim],
) -> Checked {
    assert!(!hold.is_empty(), "with nothing that holds the check would end early");
    let claims: Vec<_> = [hold, fail, happen].concat();
    let checked = explore(title, rules, &claims, HasDiscoveries::All);
    for claim in hold {
        assert_eq!(checked.steps(*claim), None, "{title}: {claim:?} does not hold");
    }
    for claim in fail.iter().chain(happen) {
        assert!(checked.steps(*claim).is_some(), "{title}: {claim:?} was not found");
    }
    checked
}

/// The shortest way to break `claim`, of exactly so many steps.
#[track_caller]
pub fn counterexample(title: &str, rules: Rules, claim: Claim, steps: usize) {
    let checked = explore(title, rules, &[claim], HasDiscoveries::AnyFailures);
    let found = checked.steps(claim).map(<[String]>::len);
    assert_eq!(found, Some(steps), "{title}: {claim:?} in {} states", checked.states);
}
