//! States of a cluster by which locks could be lost or refused.

use crate::backend::etcd::locks::EtcdLocks;
use crate::backend::etcd::protocol::cluster::{self, AlarmKind, MemberStatus};
use crate::backend::{BackendError, FailureKind, Warning};

/// The first version with watches that a client numbers, and with all other requests of the store.
const OLDEST: [u32; 3] = [3, 4, 0];

/// The first versions in which a leader that was paused does not revoke leases that its successor has renewed
/// (<https://github.com/etcd-io/etcd/issues/15247>).
const KEEPS_RENEWED_LEASES: [[u32; 3]; 2] = [[3, 4, 31], [3, 5, 13]];

impl EtcdLocks {
    pub(crate) async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        let member = self.link.member().await?;
        self.leases.read_own(&member).await?;
        let status = member.call("/etcdserverpb.Maintenance/Status", &[]).await;
        let alarms = member.call("/etcdserverpb.Maintenance/Alarm", &[]).await;
        let members = member.call("/etcdserverpb.Cluster/MemberList", &[]).await;
        let mut warnings = Vec::new();
        if let Some(status) = permitted(status)? {
            warn_of_member(&MemberStatus::read(&status)?, &mut warnings);
        }
        if let Some(alarms) = permitted(alarms)? {
            warnings.extend(cluster::alarms(&alarms)?.into_iter().map(warning_of));
        }
        if let Some(members) = permitted(members)? {
            warn_of_voters(cluster::voters(&members)?, &mut warnings);
        }
        Ok(warnings)
    }

    /// Whether a majority of the cluster answers.
    pub(crate) async fn probe(&self) -> Result<(), BackendError> {
        self.leases.read_own(&self.link.member().await?).await
    }
}

/// `None` if the login may not ask.
fn permitted<T>(answer: Result<T, BackendError>) -> Result<Option<T>, BackendError> {
    match answer {
        Err(error) if error.kind() == FailureKind::Rejected => Ok(None),
        answer => answer.map(Some),
    }
}

fn warning_of(alarm: AlarmKind) -> Warning {
    match alarm {
        AlarmKind::NoSpace => Warning::new(
            "etcd has no space, so it takes no locks",
            "compact and defragment, then `etcdctl alarm disarm`; raise `--quota-backend-bytes`",
        ),
        AlarmKind::Corrupt => Warning::new(
            "etcd has found different data at its members",
            "replace the member that `etcdctl endpoint hashkv` shows, then `etcdctl alarm disarm`",
        ),
    }
}

fn warn_of_member(status: &MemberStatus, warnings: &mut Vec<Warning>) {
    if status.is_learner {
        warnings.push(Warning::new(
            "this member of etcd is a learner, which serves no locks",
            "name voting members in the URL, or run `etcdctl member promote`",
        ));
    }
    let mut numbers = status.version.split('.').map(|number| number.parse().unwrap_or_default());
    let version: [u32; 3] = std::array::from_fn(|_| numbers.next().unwrap_or_default());
    let is_mended = |mended: &[u32; 3]| version[..2] != mended[..2] || version >= *mended;
    if version >= OLDEST && !KEEPS_RENEWED_LEASES.iter().all(is_mended) {
        warnings.push(Warning::new(
            format!(
                "a leader of etcd {} that was paused ends the leases of held locks",
                status.version
            ),
            "update the members to 3.4.31, to 3.5.13, or to a later version",
        ));
    }
    if version < OLDEST {
        warnings.push(Warning::new(
            format!("etcd {} is older than 3.4", status.version),
            "update the members: the watches of older versions are not understood",
        ));
    }
}

fn warn_of_voters(voters: usize, warnings: &mut Vec<Warning>) {
    if voters < 3 {
        let text = match voters {
            0 | 1 => "etcd has a single member: no lock is granted or renewed while it is down",
            _ => "etcd has two members: no lock is granted or renewed while one of them is down",
        };
        warnings.push(Warning::new(text, "add members until there are three or five"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_learners_and_small_clusters_are_warned_of() {
        let warned = |version: &str, is_learner, voters| {
            let mut warnings = Vec::new();
            let status = MemberStatus { version: version.to_owned(), is_learner };
            warn_of_member(&status, &mut warnings);
            warn_of_voters(voters, &mut warnings);
            warnings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        };
        assert_eq!(warned("3.4.31", false, 3), "");
        assert_eq!(warned("3.5.13", false, 3), "");
        assert!(warned("3.4.23", false, 3).contains("paused"));
        assert!(warned("3.5.12", false, 3).contains("paused"));
        assert!(!warned("3.3.27", false, 3).contains("paused"));
        assert_eq!(warned("3.10.0", false, 5), "");
        assert!(warned("3.3.27", false, 3).contains("older than 3.4"));
        assert!(warned("3.6.0", true, 3).contains("promote"));
        assert!(warned("3.6.0", false, 1).contains("single member"));
        assert!(warned("3.6.0", false, 2).contains("two members"));
        let alarms = cluster::alarms(&[0x12, 4, 0x08, 7, 0x10, 1, 0x12, 2, 0x10, 2]).unwrap();
        assert_eq!(alarms, [AlarmKind::NoSpace, AlarmKind::Corrupt]);
        assert!(alarms.into_iter().map(warning_of).all(|it| it.to_string().contains("disarm")));
    }
}
