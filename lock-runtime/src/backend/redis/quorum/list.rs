//! Searches for locks that a majority has.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::backend::redis::cluster::fan_out::{BoxedCall, fan_out};
use crate::backend::redis::protocol::list::locks_on;
use crate::backend::redis::quorum::message::StoredVote;
use crate::backend::redis::quorum::node::{NodeKind, QuorumNode};
use crate::backend::redis::quorum::nodes::Nodes;
use crate::backend::{BackendError, KeyList, KeyPattern};

impl Nodes {
    /// The locks with keys that match, at most `limit`. A majority of the nodes has to answer.
    pub(crate) async fn list(
        self: &Arc<Self>,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<KeyList, BackendError> {
        let search = |node| -> BoxedCall<'_, _> { Box::pin(locks_of(node, pattern, limit)) };
        let searches = self.iter().map(search).collect();
        let (mut candidates, mut failures, mut is_complete) = (BTreeSet::new(), Vec::new(), true);
        for found in fan_out(searches, None).await.into_iter().flatten() {
            match found {
                Ok(list) => {
                    is_complete &= list.is_complete;
                    candidates.extend(list.keys);
                }
                Err(error) => failures.push(error),
            }
        }
        self.check_majority(&failures.iter().collect::<Vec<_>>())?;
        let mut held = Vec::new();
        for key in candidates {
            // One key more than requested shows that there are more.
            if held.len() > limit {
                break;
            }
            // A vote of a minority holds nothing. Where silent nodes decide, the key may be held.
            if !self.inspect(&key).await.is_ok_and(|shown| shown.is_free()) {
                held.push(key);
            }
        }
        Ok(KeyList::new(held, is_complete, limit))
    }
}

async fn locks_of(
    node: &QuorumNode,
    pattern: &KeyPattern,
    limit: usize,
) -> Result<KeyList, BackendError> {
    let is_vote = |value: &[u8]| StoredVote::parse(value).owner().is_some();
    match &node.kind {
        NodeKind::Server(server) => locks_on(server, pattern, limit, is_vote).await,
        NodeKind::Cluster(cluster) => {
            let (mut keys, mut is_complete) = (Vec::new(), true);
            for server in cluster.servers().await? {
                let list = locks_on(server.connection(), pattern, limit, is_vote).await?;
                is_complete &= list.is_complete;
                keys.extend(list.keys);
            }
            Ok(KeyList::new(keys, is_complete, limit))
        }
    }
}
