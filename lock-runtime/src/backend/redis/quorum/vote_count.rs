//! Counts the votes of one round and derives the decision.

use std::time::Duration;

use crate::backend::{BackendError, FailureKind};

/// The answer of a node to a proposal.
#[derive(Clone, Debug)]
pub(crate) enum Vote {
    /// The node has stored the lock for the proposal.
    Granted,
    /// Another owner holds the lock on this node.
    Held {
        /// Time until the holder's lease expires on the node, if known.
        expires_in: Option<Duration>,
        /// The first digits of the holder's token, to compare the holders of different nodes.
        by: Vec<u8>,
    },
    /// The node has promised to accept no number up to this one, and the proposed one is not above it. Nothing has
    /// changed.
    Low(u64),
    /// The node did not answer in time, or returned an error.
    Failed(BackendError),
}

/// The result of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// A majority has granted.
    Granted,
    /// Too many nodes have another holder: no majority is possible, whatever the remaining nodes answer.
    Held {
        /// Time until the leases on enough of these nodes expire, if known.
        expires_in: Option<Duration>,
        /// Whether several proposals compete and none is known to have a majority.
        split: bool,
    },
    /// No majority for the proposed number, but possibly for a number above this one.
    Low(u64),
    /// No majority, but the failed nodes could have completed one.
    Failed,
}

/// The votes of one round, one entry for each node; `None` until the node has voted.
#[derive(Clone, Debug)]
pub(crate) struct VoteCount(Vec<Option<Vote>>);

impl VoteCount {
    pub(crate) fn new(nodes: usize) -> Self {
        Self(vec![None; nodes])
    }

    pub(crate) const fn majority_of(nodes: usize) -> usize {
        nodes / 2 + 1
    }

    /// Records a vote. Only the first vote of a node counts.
    pub(crate) fn count(&mut self, node: usize, vote: Vote) {
        if let Some(entry @ None) = self.0.get_mut(node) {
            *entry = Some(vote);
        }
    }

    /// Whether a vote is missing.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.0.iter().any(Option::is_none)
    }

    /// Counts a missing vote of the nodes in `silent`, one bit each, as failed.
    pub(crate) fn fail_missing(&mut self, silent: u64, silence: impl Fn(usize) -> BackendError) {
        for (node, entry) in self.0.iter_mut().enumerate() {
            if silent >> node & 1 == 1 {
                entry.get_or_insert_with(|| Vote::Failed(silence(node)));
            }
        }
    }

    /// Whether a vote is, or may be, for a competing proposal.
    pub(crate) fn is_contested(&self) -> bool {
        self.0.iter().flatten().any(|vote| matches!(vote, Vote::Held { .. } | Vote::Low(_)))
    }

    /// Whether a majority of the nodes has not failed.
    pub(crate) fn majority_has_not_failed(&self) -> bool {
        let failed = self.0.iter().flatten().filter(|vote| matches!(vote, Vote::Failed(_)));
        self.0.len() - failed.count() >= Self::majority_of(self.0.len())
    }

    /// The decision, as soon as no missing vote can change it.
    pub(crate) fn decision(&self) -> Option<Decision> {
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
            return Some(Decision::Granted);
        }
        if held.len() > nodes - majority {
            let nodes_of = |holder: &[u8]| held.iter().filter(|(_, by)| *by == holder).count();
            let differs = held.windows(2).any(|pair| pair[0].1 != pair[1].1);
            let split = differs && held.iter().all(|(_, by)| nodes_of(by) < majority);
            // Failed nodes grant nothing, so more leases must expire to make a majority.
            let needed = (held.len() + failed + majority).saturating_sub(nodes).max(1);
            let mut ends: Vec<_> = held.iter().map(|(expires_in, _)| *expires_in).collect();
            ends.sort_by_key(|end| end.unwrap_or(Duration::MAX));
            let expires_in = ends.get(needed - 1).copied().flatten();
            return Some(Decision::Held { expires_in, split });
        }
        if granted + open >= majority {
            return None;
        }
        if granted + open + low.len() >= majority {
            return low.into_iter().max().map(Decision::Low);
        }
        // Missing votes can only decide between a held lock and failed nodes.
        let may_be_held = held.len() + open > nodes - majority;
        (open == 0 || !may_be_held).then_some(Decision::Failed)
    }

    /// Whether a node that counts as failed may have applied the request, or may still do so.
    pub(crate) fn is_ambiguous(&self) -> bool {
        self.0.iter().flatten().any(|vote| match vote {
            Vote::Failed(error) => error.kind() == FailureKind::MaybeApplied,
            Vote::Granted | Vote::Held { .. } | Vote::Low(_) => false,
        })
    }

    /// The text of an error with the answer of each node, and whether a retry may succeed. The error of a failed node
    /// contains the node's name.
    pub(crate) fn summary<'a>(
        &self,
        names: impl Iterator<Item = &'a str>,
    ) -> (String, FailureKind) {
        let nodes = self.0.len();
        let majority = Self::majority_of(nodes);
        let granted = self.0.iter().flatten().filter(|vote| matches!(vote, Vote::Granted)).count();
        let mut text = format!("{granted} of {nodes} nodes granted and {majority} are needed");
        let mut retryable = nodes;
        for (vote, name) in self.0.iter().zip(names) {
            match vote {
                Some(Vote::Granted) | None => {}
                Some(Vote::Held { .. }) => {
                    text.push_str(&format!("; {name} is held by another owner"));
                }
                Some(Vote::Low(_)) => {
                    text.push_str(&format!("; {name} has seen a greater number"));
                }
                Some(Vote::Failed(error)) => {
                    text.push_str(&format!("; {error}"));
                    retryable -= usize::from(error.kind() == FailureKind::Rejected);
                }
            }
        }
        (text, if retryable < majority { FailureKind::Rejected } else { FailureKind::NotApplied })
    }

    /// The remedy of the first failure.
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

    fn vote_count(votes: &[Option<Vote>]) -> VoteCount {
        VoteCount(votes.to_vec())
    }

    /// A decision on part of the votes must equal the decision on all votes, whatever the missing votes are.
    #[test]
    fn an_early_decision_is_final() {
        let kinds = [Vote::Granted, held(1, 10), Vote::Low(7), failed()];
        let nodes = 5;
        let mut early = 0;
        for mask in 0..kinds.len().pow(5) {
            let votes: Vec<_> = (0..nodes)
                .map(|node| kinds[mask / kinds.len().pow(node as u32) % kinds.len()].clone())
                .collect();
            let all = vote_count(&votes.iter().cloned().map(Some).collect::<Vec<_>>());
            let last = all.decision().expect("all have voted");
            for known in 0_u32..1 << nodes {
                let part: Vec<_> = votes
                    .iter()
                    .enumerate()
                    .map(|(node, vote)| (known >> node & 1 == 1).then(|| vote.clone()))
                    .collect();
                let Some(decision) = vote_count(&part).decision() else { continue };
                early += 1;
                // A retry with a greater number is always correct; it costs a round.
                let alike = matches!(decision, Decision::Low(_))
                    || std::mem::discriminant(&decision) == std::mem::discriminant(&last);
                assert!(alike, "{part:?}: {decision:?}, but with all: {last:?}");
                let part = vote_count(&part);
                assert!(
                    decision != Decision::Failed
                        || !part.majority_has_not_failed()
                        || part.is_contested()
                );
            }
        }
        assert!(early > 5_000, "{early}");
    }

    #[test]
    fn a_vote_that_failed_nodes_could_decide_is_not_held() {
        let (g, f) = (Some(Vote::Granted), Some(failed()));
        let h = Some(held(1, 10));
        let all = [g.clone(), g.clone(), h.clone(), h.clone(), f.clone()];
        assert_eq!(vote_count(&all).decision(), Some(Decision::Failed));
        assert!(vote_count(&all).majority_has_not_failed() && vote_count(&all).is_contested());
        let all = [g.clone(), h.clone(), Some(Vote::Low(7)), f.clone(), f.clone()];
        assert_eq!(vote_count(&all).decision(), Some(Decision::Failed));
        assert!(vote_count(&all).majority_has_not_failed(), "three of five");
        let all = [g.clone(), h.clone(), f.clone(), f.clone(), f.clone()];
        assert_eq!(vote_count(&all).decision(), Some(Decision::Failed));
        assert!(!vote_count(&all).majority_has_not_failed());
        let all = [g.clone(), h.clone(), h.clone(), h, f.clone()];
        assert!(matches!(vote_count(&all).decision(), Some(Decision::Held { split: false, .. })));
        let all = [g.clone(), g.clone(), g, f.clone(), f];
        assert_eq!(vote_count(&all).decision(), Some(Decision::Granted));
    }

    #[test]
    fn a_held_lock_is_free_when_enough_leases_expire() {
        let [a, b, c] = [held(1, 30), held(1, 10), held(1, 20)].map(Some);
        let votes = [a, b, c, Some(Vote::Granted), Some(Vote::Granted)];
        let expires_in = |votes: &[Option<Vote>]| match vote_count(votes).decision() {
            Some(Decision::Held { expires_in, .. }) => expires_in,
            other => panic!("{other:?}"),
        };
        assert_eq!(expires_in(&votes), Some(Duration::from_millis(10)));
        let mut votes = votes;
        votes[3] = Some(failed());
        assert_eq!(expires_in(&votes), Some(Duration::from_millis(20)));
        votes[4] = Some(Vote::Held { expires_in: None, by: vec![2] });
        assert_eq!(expires_in(&votes), Some(Duration::from_millis(30)));
    }

    #[test]
    fn a_round_goes_on_while_missing_votes_can_change_its_decision() {
        let [g, h, l, f] = [Vote::Granted, held(1, 10), Vote::Low(7), failed()].map(Some);
        let decision = |votes: [&Option<Vote>; 5]| vote_count(&votes.map(Clone::clone)).decision();
        // The missing vote can complete a majority for the number.
        assert_eq!(decision([&g, &g, &None, &l, &h]), None);
        assert_eq!(decision([&g, &g, &f, &l, &h]), Some(Decision::Low(7)));
        assert_eq!(decision([&g, &None, &f, &l, &f]), Some(Decision::Low(7)));
        // The missing votes can only be more of the same.
        assert_eq!(decision([&f, &f, &f, &None, &None]), Some(Decision::Failed));
        assert_eq!(decision([&f, &f, &h, &None, &None]), None);
        assert_eq!(decision([&h, &h, &f, &f, &None]), None);
    }

    #[test]
    fn three_holders_of_three_nodes_are_split() {
        let votes = [1, 2, 3].map(|holder| Some(held(holder, 10)));
        assert!(matches!(vote_count(&votes).decision(), Some(Decision::Held { split: true, .. })));
    }

    #[test]
    fn the_greatest_number_is_reported_and_different_holders_are_split() {
        let [a, b, c] = [3, 9, 7].map(|number| Some(Vote::Low(number)));
        assert_eq!(vote_count(&[a, b, c]).decision(), Some(Decision::Low(9)));
        let [one, two] = [held(1, 10), held(2, 10)].map(Some);
        for (last, is_split) in [(&one, false), (&two, true)] {
            let decision = vote_count(&[one.clone(), None, last.clone()]).decision();
            let Some(Decision::Held { split, .. }) = decision else { panic!("{decision:?}") };
            assert_eq!(split, is_split);
        }
        let decision = vote_count(&[one.clone(), one, two]).decision();
        let has_majority = matches!(decision, Some(Decision::Held { split: false, .. }));
        assert!(has_majority, "one of them holds the lock: {decision:?}");
    }

    #[test]
    fn the_first_vote_of_a_node_counts_and_silent_nodes_have_failed() {
        let mut votes = VoteCount::new(5);
        votes.count(1, Vote::Granted);
        votes.count(1, held(1, 10));
        votes.count(5, Vote::Granted);
        let silence =
            |node| BackendError::new(FailureKind::MaybeApplied, format!("node {node} is silent"));
        votes.fail_missing(0b01010, silence);
        let names = ["a", "b", "c", "d", "e"];
        let text = |votes: &VoteCount| votes.summary(names.into_iter()).0;
        let start = "1 of 5 nodes granted and 3 are needed";
        assert_eq!(text(&votes), format!("{start}; node 3 is silent"));
        assert!(votes.is_incomplete());
        votes.fail_missing(0b00101, silence);
        assert!(votes.is_incomplete() && !votes.is_contested());
        votes.count(4, failed());
        assert!(!votes.is_incomplete() && !votes.is_contested() && votes.is_ambiguous());
        let silent = "; node 0 is silent; node 2 is silent; node 3 is silent; hung";
        assert_eq!(text(&votes), format!("{start}{silent}"));
    }

    #[test]
    fn a_vote_for_another_proposal_contests_the_round() {
        for vote in [held(1, 10), Vote::Low(7)] {
            let mut votes = VoteCount::new(3);
            votes.count(0, failed());
            assert!(!votes.is_contested());
            votes.count(2, vote);
            assert!(votes.is_contested());
        }
    }

    #[test]
    fn a_summary_names_the_answers_and_a_retry_is_vain_without_a_majority() {
        let rejected = |remedy| {
            let error = BackendError::new(FailureKind::Rejected, "no permission").remedy(remedy);
            Some(Vote::Failed(error))
        };
        let names = || ["a", "b", "c", "d", "e"].into_iter();
        let mut votes =
            [Some(held(1, 10)), Some(Vote::Low(7)), rejected("one"), rejected("two"), None];
        let count = vote_count(&votes);
        assert!(!count.is_ambiguous());
        let text = "0 of 5 nodes granted and 3 are needed; a is held by another owner; \
                    b has seen a greater number; no permission; no permission";
        assert_eq!(count.summary(names()), (text.to_owned(), FailureKind::NotApplied));
        assert_eq!(count.remedy(), "one");
        votes[4] = rejected("three");
        assert_eq!(vote_count(&votes).summary(names()).1, FailureKind::Rejected);
        let count = vote_count(&[failed(), failed(), failed(), failed(), failed()].map(Some));
        assert_eq!(count.summary(names()).1, FailureKind::NotApplied);
        assert_eq!(VoteCount::new(5).remedy(), "");
    }
}
