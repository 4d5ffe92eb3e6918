//! What a server says instead of what it was asked, sorted by what a caller can do about it.

use redis::{ErrorKind, RedisError};

use crate::backend::{BackendError, Failure};

/// The server's answer that it does not have the script of this hash.
pub(super) fn is_unknown_script(error: &RedisError) -> bool {
    error.code() == Some("NOSCRIPT")
}

/// Sorts `error`, which came from the server at `server` after a request was sent.
pub(super) fn failure(server: &str, error: RedisError) -> BackendError {
    let (failure, what, remedy) = match error.code() {
        Some(code) => refusal(code, &error),
        None => breakdown(&error),
    };
    BackendError::new(failure, format!("Redis at {server} {what}")).remedy(remedy).because(error)
}

fn refusal(code: &str, error: &RedisError) -> (Failure, String, &'static str) {
    let detail = error.detail().unwrap_or_default();
    let said = format!("answered {code} {detail}");
    match code {
        "NOAUTH" => (
            Failure::Refused,
            "wants a password".to_owned(),
            "put it into the URL: `redis://:password@host:6379`, or `redis://user:password@host:6379`",
        ),
        "WRONGPASS" => (
            Failure::Refused,
            "does not accept the user or the password".to_owned(),
            "check both in the URL; special characters are percent-encoded there",
        ),
        "NOPERM" => (
            Failure::Refused,
            said,
            "allow the ACL user `+set +get +mget +del +pexpire +pttl +time +eval +evalsha +hello +ping +client|setinfo +select` on the lock keys and on `lock_runtime:fence` (behind the pool's prefix)",
        ),
        "WRONGTYPE" => (
            Failure::Refused,
            said,
            "the lock's key, or `lock_runtime:fence`, holds something that is no lock of ours: rename one of the two. A hash is a lock of Redisson, which uses another format",
        ),
        "OOM" => (
            Failure::Refused,
            said,
            "raise `maxmemory` or free memory; keep `maxmemory-policy noeviction`, other policies drop locks",
        ),
        "MISCONF" => (
            Failure::Refused,
            said,
            "the server cannot write its snapshot and refuses writes; look at its log and its disk",
        ),
        "NOREPLICAS" => {
            (Failure::Refused, said, "`min-replicas-to-write` is not met; look after the replicas")
        }
        "READONLY" => (
            Failure::NotNow,
            said,
            "the server is a replica, or was one a moment ago; point the URL at the master",
        ),
        "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "BUSY" => (
            Failure::NotNow,
            said,
            "the server cannot serve yet; it was asked again until the wait was over",
        ),
        "MOVED" | "ASK" | "CROSSSLOT" => (
            Failure::Refused,
            said,
            "the server is part of a Redis Cluster, which `redis://` does not serve",
        ),
        "ERR" if detail.starts_with("max number of clients") => {
            (Failure::NotNow, said, "raise `maxclients` on the server, or close unused connections")
        }
        _ => (
            Failure::Refused,
            said,
            "the server refuses what a lock needs; it has to be Redis or Valkey 6.2 or newer",
        ),
    }
}

fn breakdown(error: &RedisError) -> (Failure, String, &'static str) {
    const CHECK: &str =
        "check that the server is up and reachable, and the host and port in the URL";
    match error.kind() {
        ErrorKind::AuthenticationFailed => (
            Failure::Refused,
            "does not accept the user or the password".to_owned(),
            "check both in the URL; special characters are percent-encoded there",
        ),
        ErrorKind::Io if error.is_connection_refusal() => {
            (Failure::NotNow, "refuses connections".to_owned(), CHECK)
        }
        ErrorKind::Io => {
            (Failure::Unknown, "closed the connection before it answered".to_owned(), CHECK)
        }
        ErrorKind::Parse => (
            Failure::Unknown,
            "does not speak the Redis protocol".to_owned(),
            "check the port in the URL; TLS needs `rediss://`",
        ),
        _ => (Failure::Unknown, format!("failed: {error}"), CHECK),
    }
}
