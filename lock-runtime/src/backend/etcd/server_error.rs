//! Errors of a member, classified by what a caller can do about them.

use std::time::Duration;

use crate::backend::etcd::protocol::protobuf::MalformedMessage;
use crate::backend::{BackendError, FailureKind};
use crate::base::text::rounded;

const PERMISSION_DENIED: u32 = 7;

/// The status that a call has ended with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallStatus {
    pub(crate) code: u32,
    pub(crate) message: String,
}

impl CallStatus {
    /// The user lacks a right.
    pub(crate) fn is_denied(&self) -> bool {
        self.code == PERMISSION_DENIED
    }

    /// The lease of a key is gone. Nothing was written.
    pub(crate) fn is_without_lease(&self) -> bool {
        self.message.contains("requested lease not found")
    }

    pub(crate) fn is_without_auth(&self) -> bool {
        self.message.contains("authentication is not enabled")
    }

    /// The call had no token.
    pub(crate) fn is_without_login(&self) -> bool {
        self.message.contains("user name is empty")
    }

    /// The token of the connection has ended, or is older than the rights. Nothing was applied.
    pub(crate) fn is_without_token(&self) -> bool {
        ["invalid auth token", "revision of auth store is old"]
            .iter()
            .any(|text| self.message.contains(text))
    }

    /// Another connection may be served: to another member, or with a new token.
    pub(crate) fn ends_connection(&self) -> bool {
        const OF_THE_MEMBER: [&str; 6] = [
            "no leader",
            "for learner",
            "server stopped",
            "unhealthy cluster",
            "raft cluster is unhealthy",
            "leader changed",
        ];
        self.is_without_token() || OF_THE_MEMBER.iter().any(|text| self.message.contains(text))
    }

    /// The error, and whether it ends the connection. What a member has given up may be executed later. What is sent on the next
    /// connection comes after that, or the late request puts no key.
    #[cold]
    pub(crate) fn into_end(self) -> (BackendError, bool) {
        let leaves = self.ends_connection();
        let error = self.into_error();
        let ends = leaves || error.kind() == FailureKind::MaybeApplied;
        (error, ends)
    }

    #[cold]
    pub(crate) fn into_error(self) -> BackendError {
        let (kind, what, remedy) = meaning(&self);
        let message = if what.is_empty() {
            format!("etcd has failed: {} (code {})", self.message, self.code)
        } else {
            format!("etcd {what}: {} (code {})", self.message, self.code)
        };
        BackendError::new(kind, message).remedy(remedy)
    }
}

/// A part of etcd's text if its database is full.
const WITHOUT_SPACE: &str = "database space exceeded";

/// Whether the member refuses a put because its database is full.
pub(crate) fn is_without_space(error: &BackendError) -> bool {
    error.message().contains(WITHOUT_SPACE)
}

/// A part of etcd's text if the user lacks a right.
const DENIED: &str = "permission denied";

/// Whether the user lacks a right.
pub(crate) fn is_denied(error: &BackendError) -> bool {
    error.kind() == FailureKind::Rejected && error.message().contains(DENIED)
}

/// Texts of etcd's errors, what they mean, and what to do. The first text that is found counts.
const MEANINGS: [(&str, FailureKind, &str, &str); 24] = {
    use FailureKind::{MaybeApplied, NotApplied, Rejected};
    [
        (
            DENIED,
            Rejected,
            "refuses access to the keys of the locks",
            "grant the user's role the path of the URL: `etcdctl role grant-permission locks readwrite --prefix=true /locks/`",
        ),
        (
            "authentication failed",
            Rejected,
            "refuses the login",
            "check user and password in the URL, or the provider of `.credentials(..)`",
        ),
        (
            "user name is empty",
            Rejected,
            "asks for a login",
            "put it into the URL, `etcd://user:password@host/locks`, or give the builder `.credentials(..)`",
        ),
        ("invalid auth token", NotApplied, "asks for another login", "the pool logs in on its own"),
        (
            "revision of auth store is old",
            NotApplied,
            "has changed its users or roles",
            "the pool logs in on its own",
        ),
        (
            WITHOUT_SPACE,
            Rejected,
            "has no space, and takes no writes",
            "compact and defragment, then `etcdctl alarm disarm`; raise `--quota-backend-bytes`",
        ),
        (
            "corrupt cluster",
            Rejected,
            "has found different data at its members, and takes no requests",
            "replace the member that `etcdctl endpoint hashkv` shows, then `etcdctl alarm disarm`",
        ),
        (
            "too many requests",
            NotApplied,
            "is overloaded",
            "look at the disks' latency: `etcd_disk_wal_fsync_duration_seconds`",
        ),
        (
            "too many operations in txn",
            Rejected,
            "takes no request for so many keys",
            "raise `--max-txn-ops` on all members, above the number of keys, or ask for fewer keys at once",
        ),
        (
            "request is too large",
            Rejected,
            "takes no request of this size",
            "raise `--max-request-bytes` on all members, or ask for fewer or shorter keys at once",
        ),
        (
            "larger than max",
            Rejected,
            "takes no message of this size",
            "raise `--max-request-bytes` on all members, or ask for fewer or shorter keys at once",
        ),
        (
            "too large lease TTL",
            Rejected,
            "takes no lease of this length",
            "ask for a shorter ttl, min_hold and lock_delay",
        ),
        (
            "no leader",
            NotApplied,
            "has no leader",
            "wait until a majority of the members is up and connected",
        ),
        (
            "leader changed",
            MaybeApplied,
            "has elected another leader meanwhile",
            "it passes on its own",
        ),
        (
            "for learner",
            NotApplied,
            "has not made this member a voter yet",
            "name voting members in the URL, or run `etcdctl member promote`",
        ),
        (
            "unhealthy cluster",
            MaybeApplied,
            "has lost its majority",
            "look at `etcdctl endpoint health --cluster`",
        ),
        (
            "raft cluster is unhealthy",
            MaybeApplied,
            "has lost its majority",
            "look at `etcdctl endpoint health --cluster`",
        ),
        ("server stopped", MaybeApplied, "has stopped this member", "it passes on its own"),
        (
            "request timed out",
            MaybeApplied,
            "has not reached a majority in time",
            "look at `etcdctl endpoint health --cluster`, and at the disks' latency",
        ),
        (
            "requested lease not found",
            NotApplied,
            "has ended the lease of the pool",
            "it is made again automatically",
        ),
        (
            "lease already exists",
            NotApplied,
            "already has this lease",
            "another one is made automatically",
        ),
        (
            "root user does not exist",
            Rejected,
            "has no users",
            "leave the login out of the URL, or add users with `etcdctl user add`",
        ),
        (
            "unknown service",
            Rejected,
            "does not know the request",
            "update the members to etcd 3.4 or newer, and check the port",
        ),
        (
            "unknown method",
            Rejected,
            "does not know the request",
            "update the members to etcd 3.4 or newer, and check the port",
        ),
    ]
};

fn meaning(status: &CallStatus) -> (FailureKind, &'static str, &'static str) {
    const RESOURCE_EXHAUSTED: u32 = 8;
    const INVALID_ARGUMENT: u32 = 3;
    const UNIMPLEMENTED: u32 = 12;
    let known = MEANINGS.iter().find(|(text, ..)| status.message.contains(text));
    if let Some((_, kind, what, remedy)) = known {
        return (*kind, what, remedy);
    }
    let kind = match status.code {
        PERMISSION_DENIED | INVALID_ARGUMENT | UNIMPLEMENTED => FailureKind::Rejected,
        RESOURCE_EXHAUSTED => FailureKind::NotApplied,
        _ => FailureKind::MaybeApplied,
    };
    (kind, "", "see the member's log")
}

/// A member could not be reached.
#[cold]
pub(crate) fn unreachable(member: &str, why: &str) -> BackendError {
    BackendError::new(FailureKind::NotApplied, format!("etcd at {member} is unreachable: {why}"))
        .remedy("check host, port and network, and whether the cluster has a leader")
}

/// A connection has ended with requests in flight.
#[cold]
pub(crate) fn connection_lost(member: &str, why: &str) -> BackendError {
    BackendError::new(
        FailureKind::MaybeApplied,
        format!("the connection to etcd at {member} has ended: {why}"),
    )
    .remedy("it is reopened automatically")
}

/// The bytes do not follow the protocol.
#[cold]
pub(crate) fn malformed() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "etcd has answered in an unexpected form")
        .remedy("check that the port is that of `--listen-client-urls`")
}

impl From<MalformedMessage> for BackendError {
    #[cold]
    fn from(_: MalformedMessage) -> Self {
        malformed()
    }
}

/// The lease in which a request was prepared has ended.
#[cold]
pub(crate) fn lease_ended() -> BackendError {
    BackendError::new(FailureKind::NotApplied, "the pool's lease at etcd has ended")
        .remedy("it is made again automatically")
}

/// The user lacks the right to a key of the lease.
#[cold]
pub(crate) fn lease_denied() -> BackendError {
    let message = "etcd refuses the pool's lease, which has a key that the user has no right to";
    BackendError::new(FailureKind::NotApplied, message)
        .remedy("grant the user's role the path of the URL; other locks move to another lease")
}

/// There is no answer in time.
#[cold]
pub(crate) fn unanswered() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "etcd has not answered in time")
        .remedy("check the members' load and disks, and whether the cluster has a leader")
}

/// The cluster asks for a login that it did not want when the connection began.
#[cold]
pub(crate) fn login_wanted() -> BackendError {
    BackendError::new(FailureKind::NotApplied, "etcd asks for a login from now on")
        .remedy("the pool logs in on its own")
}

/// An attempt to connect has taken too long.
#[cold]
pub(crate) fn too_slow(member: &str, limit: Duration) -> BackendError {
    unreachable(member, &format!("it has not served within {:?}", rounded(limit)))
}

/// The queue of a key was different at each look.
#[cold]
pub(crate) fn unsteady() -> BackendError {
    BackendError::new(FailureKind::NotApplied, "etcd had different keys at each look")
        .remedy("look for other programs that write or delete keys of the locks")
}

/// The pool is closed.
#[cold]
pub(crate) fn closed() -> BackendError {
    BackendError::new(FailureKind::NotApplied, "the connection to etcd is closed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_has_a_remedy() {
        for (text, kind, ..) in MEANINGS {
            let status = CallStatus { code: 2, message: format!("etcdserver: {text}") };
            let error = status.into_error();
            assert_eq!(error.kind(), kind, "{text}");
            assert!(!error.remedy_text().is_empty() && error.to_string().contains(text), "{text}");
        }
        let end = |message: &str| CallStatus { code: 14, message: message.to_owned() }.into_end().1;
        assert!(end("etcdserver: request timed out"), "it may be executed later");
        assert!(end("etcdserver: no leader"), "another member may know one");
        assert!(!end("etcdserver: permission denied"), "another member says the same");
        let other = |code| CallStatus { code, message: "etcdserver: oops".to_owned() }.into_error();
        assert_eq!(other(3).kind(), FailureKind::Rejected);
        assert_eq!(other(8).kind(), FailureKind::NotApplied);
        assert_eq!(other(14).kind(), FailureKind::MaybeApplied);
    }
}
