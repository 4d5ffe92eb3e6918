//! Settings of an ensemble by which locks could be lost or refused.

use std::time::Duration;

use crate::backend::zookeeper::lock_nodes::LockNodes;
use crate::backend::zookeeper::protocol::answer::OperationAnswer;
use crate::backend::zookeeper::protocol::operation::NodeOperation;
use crate::backend::zookeeper::protocol::server_code::ServerCode;
use crate::backend::zookeeper::server_error::failure;
use crate::backend::zookeeper::ttl_classes::timeout_for;
use crate::backend::{BackendError, Warning};

/// The ttl of a pool that sets none.
const USUAL_TTL: Duration = Duration::from_secs(30);

/// The rights to create, write or delete, as bits.
const CHANGES: i32 = 2 | 4 | 8;

impl LockNodes {
    pub(crate) async fn health(&self, has_login: bool) -> Result<Vec<Warning>, BackendError> {
        let session = self.classes.first().await?;
        let access = NodeOperation::ReadAccess { path: self.root_path() };
        let [synced, access] = session.run([self.sync(), access]).await?;
        synced.map_err(failure)?;
        let mut warnings = Vec::new();
        if session.timeout() < timeout_for(USUAL_TTL) {
            warnings.push(Warning::new(
                format!(
                    "ZooKeeper keeps a session for {:?} at most, so locks with the default ttl of 30 s are refused",
                    session.timeout()
                ),
                "raise `maxSessionTimeout` in `zoo.cfg` of all servers, or set a shorter ttl",
            ));
        }
        match access {
            Ok(OperationAnswer::Access(entries)) => {
                let is_open = |scheme: &str, rights| scheme == "world" && rights & CHANGES != 0;
                if has_login && entries.iter().any(|entry| is_open(&entry.scheme, entry.rights)) {
                    warnings.push(Warning::new(
                        "every client of ZooKeeper may change the node above the locks, also without a login",
                        "give it to the login of the locks: `setAcl /locks auth::cdrwa`",
                    ));
                }
            }
            Ok(_) | Err(ServerCode::NO_AUTH | ServerCode::NO_NODE) => {}
            Err(code) => return Err(failure(code)),
        }
        Ok(warnings)
    }

    /// Whether the ensemble has a leader that answers.
    pub(crate) async fn probe(&self) -> Result<(), BackendError> {
        let [answer] = self.classes.first().await?.run([self.sync()]).await?;
        answer.map(drop).map_err(failure)
    }
}
