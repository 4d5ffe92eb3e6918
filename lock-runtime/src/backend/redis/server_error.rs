//! What a server says instead of what it was asked, sorted by what a caller can do about it.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::backend::{BackendError, FailureKind};

/// The server's answer that it does not have the script of this hash.
pub(crate) fn is_unknown_script(error: &RedisError) -> bool {
    error.code() == Some("NOSCRIPT")
}

/// Where a key is that the server does not have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Redirect<'a> {
    /// Its slot is at this address now.
    Moved(&'a str),
    /// Its slot is on the way to this address, and this key was moved or is new.
    Ask(&'a str),
}

/// Where the server says that it has to be asked.
pub(crate) fn redirect(error: &BackendError) -> Option<Redirect<'_>> {
    let error = error.cause::<RedisError>()?;
    let (to, _) = error.redirect_node()?;
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::Moved) => Some(Redirect::Moved(to)),
        ErrorKind::Server(ServerErrorKind::Ask) => Some(Redirect::Ask(to)),
        _ => None,
    }
}

/// Whether the keys of one command are at two servers for the moment.
pub(crate) fn is_try_again(error: &BackendError) -> bool {
    error.cause::<RedisError>().is_some_and(|error| error.code() == Some("TRYAGAIN"))
}

/// Whether a server of a cluster says that the keys are not here, or not now.
pub(crate) fn is_about_slots(error: &RedisError) -> bool {
    matches!(error.code(), Some("MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN" | "CROSSSLOT"))
}

/// Whether the keys of one command are in several slots, of which the server allows one.
pub(crate) fn crosses_slots(error: &RedisError) -> bool {
    // Proxies that keep slots say it in words of their own.
    let in_words = || error.detail().is_some_and(|detail| detail.contains("same slot"));
    error.code() == Some("CROSSSLOT") || (error.code() == Some("ERR") && in_words())
}

/// The same of what became of a request.
pub(crate) fn is_across_slots(error: &BackendError) -> bool {
    error.cause::<RedisError>().is_some_and(crosses_slots)
}

/// Whether the server does not accept the user or the password.
pub(crate) fn is_about_the_login(error: &RedisError) -> bool {
    matches!(error.code(), Some("NOAUTH" | "WRONGPASS"))
        || error.kind() == ErrorKind::AuthenticationFailed
}

/// Whether the connection ended instead of an answer.
pub(crate) fn is_hang_up(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Io
}

/// Whether the command itself is not known here or not allowed to this user, so that it has done nothing.
pub(crate) fn is_unknown_command(error: &RedisError) -> bool {
    let detail = error.detail().unwrap_or_default();
    let says = |texts: &[&str]| texts.iter().any(|text| detail.contains(text));
    match error.code() {
        Some("NOPERM") => says(&["to run the"]),
        // Servers, servers without Lua, and proxies of several makes.
        Some("ERR") => {
            says(&["unknown command", "unsupported command", "not allowed", "scripting engine"])
        }
        _ => false,
    }
}

/// Whether the command is allowed, but not this key of ours.
pub(crate) fn is_forbidden_key(error: &RedisError) -> bool {
    error.code() == Some("NOPERM") && !is_unknown_command(error)
}

/// Whether the key holds something that is no lock of this kind.
pub(crate) fn is_wrong_type(error: &RedisError) -> bool {
    error.code() == Some("WRONGTYPE")
}

/// Whether the server refuses for a reason that has nothing to do with what this user may do.
pub(crate) fn is_transient(error: &RedisError) -> bool {
    let code = error.code().map(|code| unscripted(code, error.detail().unwrap_or_default()).0);
    matches!(
        code,
        Some(
            "OOM"
                | "LOADING"
                | "READONLY"
                | "MISCONF"
                | "NOREPLICAS"
                | "BUSY"
                | "MASTERDOWN"
                | "CLUSTERDOWN"
                | "TRYAGAIN"
                | "MOVED"
                | "ASK"
        )
    )
}

/// Whether the server has as many connections as it may have.
pub(crate) fn is_full(error: &RedisError) -> bool {
    let detail = error.detail().unwrap_or_default();
    error.code() == Some("ERR") && detail.starts_with("max number of clients")
}

/// Whether only a replica says so: the server is not the master any more.
pub(crate) fn is_of_a_replica(error: &RedisError) -> bool {
    let code = error.code().map(|code| unscripted(code, error.detail().unwrap_or_default()).0);
    matches!(code, Some("READONLY" | "MASTERDOWN" | "UNBLOCKED"))
}

/// Whether the server is not there yet with all its data. One that has served before takes over the data of another.
pub(crate) fn is_loading(error: &RedisError) -> bool {
    let code = error.code().map(|code| unscripted(code, error.detail().unwrap_or_default()).0);
    code == Some("LOADING")
}

/// The same of the text of an error that a script has answered as a value.
pub(crate) fn is_text_of_a_replica(text: &str) -> bool {
    let (code, detail) = text.split_once(' ').unwrap_or((text, ""));
    matches!(unscripted(code, detail).0, "READONLY" | "MASTERDOWN" | "UNBLOCKED")
}

/// Sorts `error`, which came from the server at `server` after a request was sent.
pub(crate) fn failure(server: &str, error: RedisError) -> BackendError {
    let (failure, what, remedy) = match error.code() {
        Some(code) => {
            let (code, detail) = unscripted(code, error.detail().unwrap_or_default());
            refusal(code, detail)
        }
        None => breakdown(&error),
    };
    BackendError::new(failure, format!("Redis at {server} {what}")).remedy(remedy).because(error)
}

/// Sorts the text of an error that a script has answered as a value, `CODE detail`.
pub(crate) fn script_failure(server: &str, text: &str) -> BackendError {
    let (code, detail) = text.split_once(' ').unwrap_or((text, ""));
    let (code, detail) = unscripted(code, detail);
    let (failure, what, remedy) = refusal(code, detail);
    BackendError::new(failure, format!("Redis at {server} {what}")).remedy(remedy)
}

/// The refusal of a command inside a script as it would be outside. Up to 6.2 a server answers `ERR
/// Error running script (call to f_<hash>): @user_script:9: CODE detail`, later ones `CODE detail
/// script: <hash>, on @user_script:9.`
fn unscripted<'a>(code: &'a str, detail: &'a str) -> (&'a str, &'a str) {
    let inner = detail
        .strip_prefix("Error running script")
        .and_then(|rest| rest.split_once("@user_script:"))
        .and_then(|(_, rest)| rest.split_once(": "))
        .and_then(|(_, inner)| inner.trim_start_matches('-').split_once(' '));
    if let Some((code, detail)) = inner
        && !code.is_empty()
        && code.bytes().all(|byte| byte.is_ascii_uppercase())
    {
        return coded(code, detail.trim_end());
    }
    coded(code, detail.rsplit_once(" script: ").map_or(detail, |(outside, _)| outside))
}

/// Up to 7.0 a user's lack of rights has no code of its own inside a script.
fn coded<'a>(code: &'a str, detail: &'a str) -> (&'a str, &'a str) {
    let forbidden = code == "ERR" && detail.starts_with("The user executing the script can't");
    (if forbidden { "NOPERM" } else { code }, detail)
}

/// What to do about locks that are taken together and are in different slots.
pub(crate) const SHARE_A_SLOT: &str = "locks that are taken together have to share a slot: put what their keys have in common into braces, for example `order:{<id>}` and `stock:{<id>}`";

/// The same at an endpoint that may also be a node of a quorum.
const SHARE_A_SLOT_HERE: &str = "locks that are taken together have to share a slot: put what their keys have in common into braces, for example `order:{<id>}` and `stock:{<id>}`; a node of a quorum that checks slots is written as a cluster, `redis+cluster://host`";

fn refusal(code: &str, detail: &str) -> (FailureKind, String, &'static str) {
    let said = format!("answered {code} {detail}");
    match code {
        "NOAUTH" => (
            FailureKind::Rejected,
            "wants a password".to_owned(),
            "put it into the URL: `redis://:password@host:6379`, or `redis://user:password@host:6379`",
        ),
        "WRONGPASS" => (
            FailureKind::Rejected,
            "does not accept the user or the password".to_owned(),
            "check both in the URL; special characters are percent-encoded there",
        ),
        "NOPERM" => (
            FailureKind::Rejected,
            said,
            "allow the ACL user `+set +get +mget +del +pexpire +pttl +time +eval +evalsha +hello +ping +select +publish +subscribe +zadd +zrem +zcard +zscore +zrank +zrange +zpopmin +client|tracking +client|caching` on the lock keys, their lines `<key>:lock_runtime:line`, `lock_runtime:fence` (behind the pool's prefix) and the channels `&lock_runtime:*`; in a Redis Cluster also `+asking +cluster|slots`, and there and where an endpoint checks slots those keys with a number in braces in front, `~{*}*`",
        ),
        "WRONGTYPE" => (
            FailureKind::Rejected,
            said,
            "the lock's key, its `<key>:lock_runtime:line` or `lock_runtime:fence` holds something that is not ours: rename one of the two. A hash under the lock's key is probably a lock of Redisson, which uses another format",
        ),
        "OOM" => (
            FailureKind::Rejected,
            said,
            "raise `maxmemory` or free memory; keep `maxmemory-policy noeviction`, other policies drop locks",
        ),
        "MISCONF" => (
            FailureKind::Rejected,
            said,
            "the server cannot write its snapshot and refuses writes; look at its log and its disk",
        ),
        "NOREPLICAS" => (
            FailureKind::Rejected,
            said,
            "`min-replicas-to-write` is not met; look after the replicas",
        ),
        "READONLY" => (
            FailureKind::NotApplied,
            said,
            "the server is a replica, or was one a moment ago; point the URL at the master",
        ),
        "LOADING" | "MASTERDOWN" | "UNBLOCKED" | "CLUSTERDOWN" | "TRYAGAIN" | "BUSY" => (
            FailureKind::NotApplied,
            said,
            "the server cannot serve yet; it was asked again until the wait was over",
        ),
        "MOVED" | "ASK" => (
            FailureKind::Rejected,
            said,
            "the server is part of a Redis Cluster: write `redis+cluster://` instead of `redis://`",
        ),
        "CROSSSLOT" => (FailureKind::Rejected, said, SHARE_A_SLOT_HERE),
        "ERR" if detail.contains("same slot") => (FailureKind::Rejected, said, SHARE_A_SLOT_HERE),
        "ERR" if detail.contains("cluster support disabled") => (
            FailureKind::Rejected,
            said,
            "the server is part of no Redis Cluster: write `redis://` instead of `redis+cluster://`",
        ),
        // Its slot is on the way to another server, and the script has removed a key that it then wanted to read.
        "ERR" if detail.contains("attempted to access a non local key") => (
            FailureKind::MaybeApplied,
            said,
            "the slot is being moved to another server of the cluster; it was asked again until the wait was over",
        ),
        "ERR" if detail.starts_with("max number of clients") => (
            FailureKind::NotApplied,
            said,
            "raise `maxclients` on the server, or close unused connections",
        ),
        _ => (
            FailureKind::Rejected,
            said,
            "the server refuses what a lock needs; it has to be Redis or Valkey 6.2 or newer",
        ),
    }
}

fn breakdown(error: &RedisError) -> (FailureKind, String, &'static str) {
    const CHECK: &str =
        "check that the server is up and reachable, and the host and port in the URL";
    const HANGS_UP: &str = "check that the server is up, and the host and port in the URL; it also hangs up at `maxclients` connections, on clients without TLS (`rediss://`) and on those without a certificate (`?cert=/path.pem&key=/path.key`)";
    match error.kind() {
        ErrorKind::AuthenticationFailed => (
            FailureKind::Rejected,
            "does not accept the user or the password".to_owned(),
            "check both in the URL; special characters are percent-encoded there",
        ),
        ErrorKind::Io => (
            FailureKind::MaybeApplied,
            "closed the connection before it answered".to_owned(),
            HANGS_UP,
        ),
        ErrorKind::Parse => (
            FailureKind::MaybeApplied,
            "does not speak the Redis protocol".to_owned(),
            "check the port in the URL; TLS needs `rediss://`",
        ),
        _ => (FailureKind::MaybeApplied, format!("failed: {error}"), CHECK),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_inside_a_script_is_told_as_one_outside() {
        let plain = ("READONLY", "You can't write against a read only replica.");
        for (code, detail) in [
            plain,
            (
                "READONLY",
                "You can't write against a read only replica. script: d524, on @user_script:28.",
            ),
            (
                "ERR",
                "Error running script (call to f_d524): @user_script:28: READONLY You can't write against a read only replica. ",
            ),
            (
                "ERR",
                "Error running script (call to f_d524): @user_script:28: -READONLY You can't write against a read only replica.",
            ),
        ] {
            assert_eq!(unscripted(code, detail), plain, "{code} {detail}");
        }
        let forbidden = "The user executing the script can't run this command or subcommand";
        for detail in [
            format!("{forbidden} script: d524, on @user_script:28."),
            format!("Error running script (call to f_d524): @user_script:28: ERR {forbidden} "),
            format!("Error running script (call to f_d524): @user_script:28: -ERR {forbidden}"),
        ] {
            assert_eq!(unscripted("ERR", &detail), ("NOPERM", forbidden), "{detail}");
        }
        let odd = "Error running script (call to f_d524): @user_script:2: user_script:2: attempt to call a nil value";
        assert_eq!(unscripted("ERR", odd), ("ERR", odd));
        assert_eq!(unscripted("ERR", "syntax error"), ("ERR", "syntax error"));
    }
}
