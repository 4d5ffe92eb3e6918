//! A way through a model, in words.

use crate::attempt::Sending;
use crate::claims::Claims;
use crate::node::Reply;
use crate::rules::{Back, Faults, Rules};
use crate::world::{State, Step, World};

/// One line for each step.
pub(crate) fn told(rules: &Rules, path: Vec<(State, Option<Step>)>) -> Vec<String> {
    let world = World { rules: *rules, claims: Claims::new(&[]) };
    path.into_iter().filter_map(|(state, step)| Some(line(&world, &state, step?))).collect()
}

fn line(world: &World, state: &State, step: Step) -> String {
    let name = |attempt: u8| ["X", "Y", "Z"][usize::from(attempt)];
    let node_at = |node: u8| &state.nodes[usize::from(node)];
    let attempt_at = |attempt: u8| &state.attempts[usize::from(attempt)];
    match step {
        Step::Propose { attempt, first } => {
            format!("{} sends the proposal of {first} to all", name(attempt))
        }
        Step::Renew { attempt } => format!("{} sends a renewal to all", name(attempt)),
        Step::Release { attempt } => format!("{} sends its release to all", name(attempt)),
        Step::Decide { attempt } => {
            let (x, from) = (name(attempt), attempt_at(attempt));
            match from.sending(from.sent - 1) {
                Sending::Proposal(first) => format!("{x} counts a majority and holds {first}"),
                Sending::Renewal => {
                    format!("{x} counts a majority and holds {} for another ttl", from.fence)
                }
            }
        }
        Step::HandOn { attempt } => {
            let from = attempt_at(attempt);
            format!("{} hands {} on", name(attempt), from.fence + from.handed + 1)
        }
        Step::Reach { attempt, sending, node } => {
            let (x, from, at) = (name(attempt), attempt_at(attempt), node_at(node));
            let what = match from.sending(sending) {
                Sending::Proposal(first) => format!("proposal of {first}"),
                Sending::Renewal => "renewal".to_owned(),
            };
            let answer = match world.reply(&mut at.clone(), attempt, from, sending) {
                Reply::Granted => "which grants".to_owned(),
                Reply::Held => "which has another holder".to_owned(),
                Reply::Low => format!("which has promised {}", at.promised),
            };
            format!("{x}'s {what} (its sending {}) reaches {}, {answer}", sending + 1, at.name)
        }
        Step::ReachRelease { attempt, node } => {
            format!("{}'s release reaches {}", name(attempt), node_at(node).name)
        }
        Step::Expire { node } => {
            let at = node_at(node);
            let Some(key) = at.key else { return "nothing expires".to_owned() };
            let (x, sending) = (name(key.owner), key.until + 1);
            if key.until < attempt_at(key.owner).matters_from() {
                return format!("{x}'s key, set by an earlier sending, expires on {}", at.name);
            }
            format!(
                "the deadline of {x}'s sending {sending} passes; its key expires on {}",
                at.name
            )
        }
        Step::Forget { node, floor } => {
            let at = node_at(node);
            format!(
                "{} forgets that it has promised {}; its floor is {floor}",
                at.name, at.promised
            )
        }
        Step::JumpClock { node } => {
            format!("the clock of {} jumps; it drops its key", node_at(node).name)
        }
        Step::Lose { node } => format!("{} loses all it has", node_at(node).name),
        Step::PassClocks { node } => {
            let at = node_at(node);
            format!("clocks pass all that was proposed before {} lost its data", at.name)
        }
        Step::Return { node } => {
            let at = node_at(node).name;
            match world.rules.faults {
                Faults::Losses(_, Back::Seeded) => format!("{at} is seeded and votes again"),
                Faults::Losses(_, Back::AfterTtlSeeded) => {
                    format!(
                        "what was sent before is past its deadline; {at} is seeded, votes again"
                    )
                }
                _ => format!("what was sent before is past its deadline; {at} votes again"),
            }
        }
    }
}
