//! Fences of grants: numbers of transactions.

use crate::backend::BackendError;
use crate::backend::zookeeper::lock_node::LockNode;
use crate::backend::zookeeper::lock_nodes::{KeyListing, LockNodes};
use crate::backend::zookeeper::node_path;
use crate::backend::zookeeper::protocol::answer::{Answered, OperationAnswer};
use crate::backend::zookeeper::protocol::operation::NodeOperation;
use crate::backend::zookeeper::protocol::server_code::ServerCode;
use crate::backend::zookeeper::server_error::{failure, malformed};
use crate::backend::zookeeper::session::LiveSession;
use crate::base::fence::Fence;

/// How many fences there are between two transactions.
const FENCES: u64 = 256;

/// The greatest number of fences after the first one of a transaction.
pub(crate) const MOST_FURTHER: u32 = FENCES as u32 - 1;

/// The first fence of a transaction.
pub(crate) fn of_transaction(number: u64) -> Option<Fence> {
    Fence::try_from(number.saturating_mul(FENCES)).ok()
}

impl LockNodes {
    /// The number of a transaction after those of all former grants of the keys, and before those of all later ones. `None` if a
    /// node is gone.
    ///
    /// It is that of the node's creation, which later owners' creations exceed. Several keys that were taken one by one
    /// have no such number. Then a number is written to the containers, under the condition that the nodes are there. Later
    /// owners see it and write a greater one if their own creation came before.
    pub(crate) async fn fence(
        &self,
        session: &LiveSession,
        nodes: &[LockNode],
        listings: &[KeyListing],
    ) -> Result<Option<u64>, BackendError> {
        let first = nodes.first().ok_or_else(malformed)?;
        if first.fence.is_some() && nodes.iter().all(|node| node.fence == first.fence) {
            return Ok(first.fence);
        }
        // The container may have been made in the same transaction.
        if let Some(created) = first.created
            && nodes.iter().all(|node| node.created == Some(created))
            && listings.iter().all(|listing| listing.written <= created)
        {
            return Ok(u64::try_from(created).ok());
        }
        let paths = || nodes.iter().map(|node| node.path.clone());
        let containers = paths().map(|path| node_path::parent(&path).to_owned());
        let checks = paths().map(|path| NodeOperation::Check { path });
        let writes = containers.map(|path| NodeOperation::Touch { path });
        let transaction = NodeOperation::Transaction(checks.chain(writes).collect());
        let [answer] = session.run([transaction]).await?;
        written(answer)
    }
}

/// The number of the transaction that has written. `None` if it was refused because a node is gone.
fn written(answer: Answered) -> Result<Option<u64>, BackendError> {
    let answers = match answer {
        Ok(OperationAnswer::Transaction(answers)) => answers,
        Ok(_) => return Err(malformed()),
        Err(ServerCode::NO_NODE) => return Ok(None),
        Err(code) => return Err(failure(code)),
    };
    match answers.last() {
        Some(OperationAnswer::Node(stat)) => {
            u64::try_from(stat.written).map(Some).map_err(|_| malformed())
        }
        _ => Err(malformed()),
    }
}
