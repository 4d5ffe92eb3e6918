//! Settings of an ensemble by which locks could be lost or refused.

use std::time::Duration;

use crate::backend::zookeeper::lock_nodes::{LockNodes, confirmed};
use crate::backend::zookeeper::protocol::answer::OperationAnswer;
use crate::backend::zookeeper::protocol::operation::NodeOperation;
use crate::backend::zookeeper::protocol::server_code::ServerCode;
use crate::backend::zookeeper::server_error::failure;
use crate::backend::zookeeper::ttl_classes::LONGEST_TICK;
use crate::backend::{BackendError, Warning};

/// The ttl of a pool that sets none.
const USUAL_TTL: Duration = Duration::from_secs(30);

/// The rights to create, write or delete, as bits.
const CHANGES: i32 = 2 | 4 | 8;

impl LockNodes {
    pub(crate) async fn health(&self, has_login: bool) -> Result<Vec<Warning>, BackendError> {
        let session = self.classes.first().await?;
        let access = NodeOperation::ReadAccess { path: self.root_path() };
        let [answer, access] = session.run([self.confirm(), access]).await?;
        confirmed(&answer)?;
        let mut warnings = Vec::new();
        if session.timeout() < self.classes.timeout_for(USUAL_TTL) {
            warnings.push(Warning::new(
                format!(
                    "ZooKeeper keeps a session for {:?} at most, so locks with the default ttl of 30 s are refused",
                    session.timeout()
                ),
                "raise `maxSessionTimeout` in `zoo.cfg` of all servers, or set a shorter ttl",
            ));
        }
        // The ensemble serves without this server too.
        if let Ok(shortest) = self.classes.shortest().await
            && shortest > 2 * LONGEST_TICK
        {
            warnings.push(Warning::new(
                format!(
                    "ZooKeeper's shortest session is {shortest:?}, so its ticks may be longer than {LONGEST_TICK:?}: a server that is cut off could end a session before the ttls of its locks"
                ),
                "set `tickTime` in `zoo.cfg` of all servers to 2000 at most",
            ));
        }
        match access {
            Ok(OperationAnswer::Access(entries)) => {
                let is_open = |scheme: &str, rights| scheme == "world" && rights & CHANGES != 0;
                if has_login && entries.iter().any(|entry| is_open(&entry.scheme, entry.rights)) {
                    warnings.push(Warning::new(
                        "every client of ZooKeeper may change the node above the locks, even without a login",
                        "give it to the login of the locks: `setAcl /locks auth::cdrwa`",
                    ));
                }
            }
            Ok(_) | Err(ServerCode::NO_AUTH | ServerCode::NO_NODE) => {}
            Err(code) => return Err(failure(code)),
        }
        Ok(warnings)
    }

    /// Whether a majority of the ensemble answers.
    pub(crate) async fn probe(&self) -> Result<(), BackendError> {
        let [answer] = self.classes.first().await?.run([self.confirm()]).await?;
        confirmed(&answer)
    }
}
