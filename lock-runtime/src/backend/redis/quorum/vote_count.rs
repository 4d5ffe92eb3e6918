//! Counts the votes of one round.

use std::time::Duration;

use crate::backend::{BackendError, FailureKind};

/// What a node answers to a proposal.
#[derive(Clone, Debug)]
pub(crate) enum Vote {
    /// The lock is the proposer's at this node.
    Granted,
    /// It is somebody else's.
    Held {
        /// When the node forgets the holder, if it can tell.
        expires_in: Option<Duration>,
        /// The first digits of the holder, to see whether nodes name the same one.
        by: Vec<u8>,
    },
    /// The node has promised to accept no number up to one that is not below the proposed one. Nothing was changed.
    Low(u64),
    /// It did not answer in time, or refuses.
    Failed(BackendError),
}

/// What the votes come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A majority has granted.
    Granted,
    /// So many nodes have another holder that no majority can be had, whatever the others say.
    Held {
        /// When enough of them forget their holder, if they can tell.
        expires_in: Option<Duration>,
        /// Whether the nodes name different holders: several are competing, and none may have won.
        split: bool,
    },
    /// No majority with this number, but perhaps with one above this.
    Low(u64),
    /// No majority, and the nodes that failed could have made one.
    Failed,
}

/// The votes of one round, one place for each node.
#[derive(Clone, Debug)]
pub(crate) struct Tally(Vec<Option<Vote>>);

impl Tally {
    pub(crate) fn new(nodes: usize) -> Self {
        Self(vec![None; nodes])
    }

    pub(crate) const fn majority_of(nodes: usize) -> usize {
        nodes / 2 + 1
    }

    /// A node that has answered is not asked again.
    pub(crate) fn count(&mut self, node: usize, vote: Vote) {
        if let Some(place @ None) = self.0.get_mut(node) {
            *place = Some(vote);
        }
    }

    /// Whether somebody has still to answer.
    pub(crate) fn is_open(&self) -> bool {
        self.0.iter().any(Option::is_none)
    }

    /// The nodes of `silent`, a bit for each, have failed if they have not answered by now.
    pub(crate) fn close(&mut self, silent: u64, silence: impl Fn(usize) -> BackendError) {
        for (node, place) in self.0.iter_mut().enumerate() {
            if silent >> node & 1 == 1 {
                place.get_or_insert_with(|| Vote::Failed(silence(node)));
            }
        }
    }

    /// Whether some vote went, or may have gone, to a competitor.
    pub(crate) fn is_contested(&self) -> bool {
        self.0.iter().flatten().any(|vote| matches!(vote, Vote::Held { .. } | Vote::Low(_)))
    }

    /// As soon as it is certain.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        let nodes = self.0.len();
        let majority = Self::majority_of(nodes);
        let (mut granted, mut open, mut failed) = (0, 0, 0);
        let (mut held, mut low) = (Vec::new(), Vec::new());
        for vote in &self.0 {
            match vote {
                Some(Vote::Granted) => granted += 1,
                Some(Vote::Held { expires_in, by }) => held.push((*expires_in, by)),
                Some(Vote::Low(number)) => low.push(*number),
                Some(Vote::Failed(_)) => failed += 1,
                None => open += 1,
            }
        }
        if granted >= majority {
            return Some(Verdict::Granted);
        }
        if held.len() > nodes - majority {
            let split = held.windows(2).any(|pair| pair[0].1 != pair[1].1);
            // The nodes that fail will not make up for those that are held.
            let needed = (held.len() + failed + majority).saturating_sub(nodes).max(1);
            let mut ends: Vec<_> = held.iter().map(|(expires_in, _)| *expires_in).collect();
            ends.sort_by_key(|end| end.unwrap_or(Duration::MAX));
            let expires_in = ends.get(needed - 1).copied().flatten();
            return Some(Verdict::Held { expires_in, split });
        }
        if granted + open >= majority {
            return None;
        }
        if granted + open + low.len() >= majority {
            return low.into_iter().max().map(Verdict::Low);
        }
        // Those that are still to answer can only tell a held lock from failed nodes.
        let may_be_held = held.len() + open > nodes - majority;
        (open == 0 || !may_be_held).then_some(Verdict::Failed)
    }

    /// What each node says, for an error's text, and whether it is worth asking again. Nodes that fail name
    /// themselves.
    pub(crate) fn summary<'a>(
        &self,
        names: impl Iterator<Item = &'a str>,
    ) -> (String, FailureKind) {
        let nodes = self.0.len();
        let majority = Self::majority_of(nodes);
        let granted = self.0.iter().flatten().filter(|vote| matches!(vote, Vote::Granted)).count();
        let mut text = format!("{granted} of {nodes} nodes granted and {majority} are needed");
        let mut passes = nodes;
        for (vote, name) in self.0.iter().zip(names) {
            match vote {
                Some(Vote::Granted) | None => {}
                Some(Vote::Held { .. }) => text.push_str(&format!("; {name} is held by another")),
                Some(Vote::Low(_)) => {
                    text.push_str(&format!("; {name} has seen a greater number"));
                }
                Some(Vote::Failed(error)) => {
                    text.push_str(&format!("; {error}"));
                    passes -= usize::from(error.kind() == FailureKind::Rejected);
                }
            }
        }
        (text, if passes < majority { FailureKind::Rejected } else { FailureKind::NotApplied })
    }

    /// What to do about the first failure.
    pub(crate) fn remedy(&self) -> &'static str {
        let remedy = |vote: &Vote| match vote {
            Vote::Failed(error) => Some(error.remedy_text()),
            Vote::Granted | Vote::Held { .. } | Vote::Low(_) => None,
        };
        self.0.iter().flatten().find_map(remedy).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(by: u8, expires_in: u64) -> Vote {
        Vote::Held { expires_in: Some(Duration::from_millis(expires_in)), by: vec![by] }
    }

    fn failed() -> Vote {
        Vote::Failed(BackendError::new(FailureKind::MaybeApplied, "hung"))
    }

    fn tally(votes: &[Option<Vote>]) -> Tally {
        Tally(votes.to_vec())
    }

    /// Every verdict on part of the votes must be that on all of them, whatever the others turn out to be.
    #[test]
    fn an_early_verdict_is_never_taken_back() {
        let kinds = [Vote::Granted, held(1, 10), Vote::Low(7), failed()];
        let nodes = 5;
        let mut early = 0;
        for mask in 0..kinds.len().pow(5) {
            let votes: Vec<_> = (0..nodes)
                .map(|node| kinds[mask / kinds.len().pow(node as u32) % kinds.len()].clone())
                .collect();
            let all = tally(&votes.iter().cloned().map(Some).collect::<Vec<_>>());
            let last = all.verdict().expect("all have voted");
            for known in 0_u32..1 << nodes {
                let part: Vec<_> = votes
                    .iter()
                    .enumerate()
                    .map(|(node, vote)| (known >> node & 1 == 1).then(|| vote.clone()))
                    .collect();
                let Some(verdict) = tally(&part).verdict() else { continue };
                early += 1;
                // To try again with a greater number is right whatever else there is; it costs a round.
                let alike = matches!(verdict, Verdict::Low(_))
                    || std::mem::discriminant(&verdict) == std::mem::discriminant(&last);
                assert!(alike, "{part:?}: {verdict:?}, but with all: {last:?}");
            }
        }
        assert!(early > 5_000, "{early}");
    }

    #[test]
    fn a_vote_that_failed_nodes_could_decide_is_not_called_held() {
        let (g, f) = (Some(Vote::Granted), Some(failed()));
        let h = Some(held(1, 10));
        let all = [g.clone(), g.clone(), h.clone(), h.clone(), f.clone()];
        assert_eq!(tally(&all).verdict(), Some(Verdict::Failed));
        let all = [g.clone(), h.clone(), h.clone(), h, f.clone()];
        assert!(matches!(tally(&all).verdict(), Some(Verdict::Held { split: false, .. })));
        let all = [g.clone(), g.clone(), g, f.clone(), f];
        assert_eq!(tally(&all).verdict(), Some(Verdict::Granted));
    }

    #[test]
    fn a_held_lock_is_free_when_enough_nodes_forget_it() {
        let [a, b, c] = [held(1, 30), held(1, 10), held(1, 20)].map(Some);
        let votes = [a, b, c, Some(Vote::Granted), Some(Vote::Granted)];
        let expires_in = |votes: &[Option<Vote>]| match tally(votes).verdict() {
            Some(Verdict::Held { expires_in, .. }) => expires_in,
            other => panic!("{other:?}"),
        };
        assert_eq!(expires_in(&votes), Some(Duration::from_millis(10)));
        let mut votes = votes;
        votes[3] = Some(failed());
        assert_eq!(expires_in(&votes), Some(Duration::from_millis(20)));
        votes[4] = Some(Vote::Held { expires_in: None, by: vec![2] });
        assert_eq!(expires_in(&votes), Some(Duration::from_millis(30)));
    }
}
