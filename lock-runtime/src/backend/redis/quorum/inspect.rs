//! The holder of a lock in the view of a majority.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use crate::backend::redis::protocol::inspect::{StoredLock, stored_lock};
use crate::backend::redis::protocol::value::duration;
use crate::backend::redis::quorum::message::{BallotRequest, StoredVote};
use crate::backend::redis::quorum::nodes::{NodeReply, Nodes, ReplyContent};
use crate::backend::redis::quorum::vote_count::VoteCount;
use crate::backend::{BackendError, FailureKind, Inspection, LockHolder};
use crate::base::fence::Fence;
use crate::base::key::Key;

/// What a node has at the key of a lock.
#[derive(Clone, Debug)]
enum NodeView {
    Free,
    Taken { vote: StoredVote, expires_in: Option<Duration> },
    Failed(BackendError),
}

/// The views of all nodes, one entry for each; `None` until the node has answered.
struct NodeViews(Vec<Option<NodeView>>);

/// What a majority of the nodes says.
#[derive(Debug, PartialEq)]
enum MajorityView {
    Held(LockHolder),
    /// No owner has a majority.
    Free,
    /// The nodes that failed could make a majority for an owner.
    Unknown,
}

impl NodeView {
    fn of(reply: Result<Value, BackendError>) -> Self {
        let read = |reply: Value| stored_lock(&reply).map(|(lock, _)| lock);
        match reply.and_then(read) {
            Ok(None) => Self::Free,
            Ok(Some(StoredLock { value, left })) => {
                Self::Taken { vote: StoredVote::parse(&value), expires_in: duration(left) }
            }
            Err(error) => Self::Failed(error),
        }
    }
}

impl NodeViews {
    /// The view of a majority, as soon as no missing answer can change it.
    fn decision(&self) -> Option<MajorityView> {
        let nodes = self.0.len();
        let majority = VoteCount::majority_of(nodes);
        let known = || self.0.iter().flatten();
        let taken = || {
            known().filter_map(|view| match view {
                NodeView::Taken { vote, expires_in } => Some((vote, *expires_in)),
                NodeView::Free | NodeView::Failed(_) => None,
            })
        };
        let mut counts: HashMap<&[u8], usize> = HashMap::new();
        for (vote, _) in taken() {
            *counts.entry(&vote.token).or_default() += 1;
        }
        let first = counts.into_iter().max_by_key(|(_, count)| *count);
        let most = first.map_or(0, |(_, count)| count);
        if let Some((token, _)) = first.filter(|_| most >= majority) {
            let of_nodes: Vec<_> = taken().filter(|(vote, _)| vote.token == token).collect();
            return Some(MajorityView::Held(holder(majority, &of_nodes)));
        }
        let failed = known().filter(|view| matches!(view, NodeView::Failed(_))).count();
        let missing = nodes - known().count();
        if most + missing + failed < majority {
            return Some(MajorityView::Free);
        }
        (missing == 0).then_some(MajorityView::Unknown)
    }

    /// The error if the failed nodes decide.
    fn failure(&self) -> BackendError {
        let errors = self.0.iter().flatten().filter_map(|view| match view {
            NodeView::Failed(error) => Some(error),
            NodeView::Free | NodeView::Taken { .. } => None,
        });
        let errors: Vec<_> = errors.collect();
        let texts: Vec<_> = errors.iter().map(ToString::to_string).collect();
        let text = format!(
            "the nodes without an answer decide whether the lock is held: {}",
            texts.join("; ")
        );
        let of_first = errors.first().map(|error| (error.kind(), error.remedy_text()));
        let (kind, remedy) = of_first.unwrap_or((FailureKind::NotApplied, ""));
        BackendError::new(kind, text).remedy(remedy)
    }
}

/// The holder with the token that at least a majority of the nodes has.
fn holder(majority: usize, of_nodes: &[(&StoredVote, Option<Duration>)]) -> LockHolder {
    let mut ends: Vec<_> = of_nodes.iter().map(|(_, expires_in)| *expires_in).collect();
    ends.sort_by_key(|end| std::cmp::Reverse(end.unwrap_or(Duration::MAX)));
    let votes = || of_nodes.iter().map(|(vote, _)| *vote);
    // Votes of an earlier round have another number.
    let fence = votes()
        .filter_map(|vote| vote.fence)
        .find(|fence| votes().filter(|vote| vote.fence == Some(*fence)).count() >= majority);
    let owner = votes().next().and_then(StoredVote::owner);
    LockHolder::new(owner.map(|owner| owner.tag()))
        .with_token(owner)
        // Until then a majority has it.
        .with_expiry(ends.get(majority - 1).copied().flatten())
        .with_fence(fence.and_then(|number| Fence::try_from(number).ok()))
        .with_info(votes().next().and_then(StoredVote::info))
}

impl Nodes {
    /// Reads `key` at all nodes. A node without an answer in time counts as failed.
    pub(crate) async fn inspect(self: &Arc<Self>, key: &Key) -> Result<Inspection, BackendError> {
        let sent = self.clock.now();
        let until = sent + self.request_timeout * 3 / 4;
        let requests: Arc<[BallotRequest]> = [BallotRequest::inspection(key)].into();
        let mut replies = self.send(&requests, false);
        let mut views = NodeViews(vec![None; self.iter().count()]);
        while views.decision().is_none() {
            tokio::select! {
                biased;
                reply = replies.recv() => {
                    let Some(NodeReply { node, content }) = reply else { break };
                    let ReplyContent::Results(results) = content else { continue };
                    for (_, result) in results {
                        if let Some(view) = views.0.get_mut(node) {
                            *view = Some(NodeView::of(result));
                        }
                    }
                }
                () = self.clock.sleep_until(until) => break,
            }
        }
        let waited = self.clock.now().since(sent);
        for (node, view) in views.0.iter_mut().enumerate() {
            view.get_or_insert_with(|| NodeView::Failed(self.silence_of(node, waited)));
        }
        match views.decision() {
            Some(MajorityView::Held(holder)) => Ok(Inspection::new(Some(holder))),
            Some(MajorityView::Free) => Ok(Inspection::new(None)),
            Some(MajorityView::Unknown) | None => Err(views.failure()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/00000001";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb/00000002";

    /// `web-7/4711 src/orders.rs:42`.
    const TEXT: &str = "7765622d372f34373131207372632f6f72646572732e72733a3432";

    fn taken(value: &str, millis: i64) -> Option<NodeView> {
        let reply = vec![Value::BulkString(value.into()), Value::Int(millis), Value::Int(-1)];
        Some(NodeView::of(Ok(Value::Array(reply))))
    }

    fn failed() -> Option<NodeView> {
        Some(NodeView::of(Err(BackendError::new(FailureKind::MaybeApplied, "hung"))))
    }

    fn free() -> Option<NodeView> {
        taken("", -2)
    }

    fn decision<const N: usize>(views: [Option<NodeView>; N]) -> Option<MajorityView> {
        NodeViews(views.into()).decision()
    }

    #[test]
    fn a_majority_with_one_token_is_the_holder() {
        let (one, other) = (format!("{A}#70#1"), format!("{A}#70#5"));
        let views = [taken(&one, 300), taken(&other, 200), taken(&one, 100), free(), None];
        let Some(MajorityView::Held(holder)) = decision(views) else { panic!("it is held") };
        assert_eq!(holder.owner.unwrap().to_string(), "aaaaaaaa");
        assert_eq!(holder.expires_in, Some(Duration::from_millis(100)));
        assert_eq!(holder.fence.unwrap().get(), 70);
        // More nodes than needed: two may expire.
        let views = [300, 200, 100, 50, 20].map(|millis| taken(&one, millis));
        let Some(MajorityView::Held(holder)) = decision(views) else { panic!("it is held") };
        assert_eq!(holder.expires_in, Some(Duration::from_millis(100)));
    }

    #[test]
    fn the_holder_has_the_text_of_its_votes() {
        let value = format!("{A}{TEXT}#70#1");
        let views = [taken(&value, 300), taken(&value, 200), free()];
        let Some(MajorityView::Held(holder)) = decision(views) else { panic!("it is held") };
        assert_eq!(holder.info.unwrap().to_string(), "web-7/4711 src/orders.rs:42");
        assert_eq!(holder.fence.unwrap().get(), 70);
    }

    #[test]
    fn numbers_of_different_rounds_are_no_fence() {
        let (one, next) = (format!("{A}#70#1"), format!("{A}#90#1"));
        let views = [taken(&one, 300), taken(&next, 300), free()];
        let Some(MajorityView::Held(holder)) = decision(views) else { panic!("it is held") };
        assert_eq!(holder.fence, None);
    }

    #[test]
    fn competing_votes_and_minorities_hold_nothing() {
        assert_eq!(decision([taken(A, 9), taken(B, 9), free()]), Some(MajorityView::Free));
        assert_eq!(decision([taken(A, 9), free(), free()]), Some(MajorityView::Free));
        assert_eq!(decision([free(), free(), None]), Some(MajorityView::Free));
        assert_eq!(decision([free(), None, None]), None);
    }

    #[test]
    fn failed_nodes_that_could_complete_a_majority_leave_it_open() {
        assert_eq!(decision([taken(A, 9), failed(), free()]), Some(MajorityView::Unknown));
        assert_eq!(decision([taken(A, 9), failed(), None]), None);
        assert_eq!(decision([free(), failed(), free()]), Some(MajorityView::Free));
        assert_eq!(decision([failed(), failed(), free()]), Some(MajorityView::Unknown));
        let error = NodeViews(vec![failed(), failed(), free()]).failure();
        assert!(error.to_string().ends_with("hung; hung"), "{error}");
    }

    #[test]
    fn values_of_other_clients_and_kept_ones_are_held() {
        let views = [taken("theirs", 9), taken("theirs", -1), free()];
        let Some(MajorityView::Held(holder)) = decision(views) else { panic!("it is held") };
        assert_eq!((holder.owner, holder.fence), (None, None));
        let kept = format!("~{A}#70#1");
        let views = [taken(&kept, 9), taken(&kept, 9), free()];
        let Some(MajorityView::Held(holder)) = decision(views) else { panic!("it is held") };
        assert_eq!(holder.owner.unwrap().to_string(), "aaaaaaaa");
    }
}
