//! Error answers of a server, classified by what a caller can do about them.

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use crate::backend::{BackendError, FailureKind};

/// Whether the server does not know the script of this hash.
pub(crate) fn is_unknown_script(error: &RedisError) -> bool {
    error.code() == Some("NOSCRIPT")
}

/// Where the server redirects a command for a key of another server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Redirect<'a> {
    /// The slot is at this address.
    Moved(&'a str),
    /// The slot is being moved to this address, and this key has been moved or does not exist yet.
    Ask(&'a str),
}

/// The redirection in `error`, if there is one.
pub(crate) fn redirect(error: &BackendError) -> Option<Redirect<'_>> {
    let error = error.cause::<RedisError>()?;
    let (to, _) = error.redirect_node()?;
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::Moved) => Some(Redirect::Moved(to)),
        ErrorKind::Server(ServerErrorKind::Ask) => Some(Redirect::Ask(to)),
        _ => None,
    }
}

/// Whether the keys of one command are at two servers while their slot is being moved.
pub(crate) fn is_try_again(error: &BackendError) -> bool {
    error.cause::<RedisError>().is_some_and(|error| error.code() == Some("TRYAGAIN"))
}

/// Whether a slot is being moved, and the server refused a command with several keys for that reason, or ended a script.
pub(crate) fn is_divided(error: &BackendError) -> bool {
    let accesses_a_missing_key =
        |error: &RedisError| error.detail().is_some_and(|detail| detail.contains(NON_LOCAL_KEY));
    is_try_again(error) || error.cause::<RedisError>().is_some_and(accesses_a_missing_key)
}

/// In the answer to a script that accesses a key that it has removed, in a slot that is being moved.
const NON_LOCAL_KEY: &str = "attempted to access a non local key";

/// Whether a server of a cluster does not have the keys, or cannot serve them now.
pub(crate) fn is_about_slots(error: &RedisError) -> bool {
    matches!(error.code(), Some("MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN" | "CROSSSLOT"))
}

/// Whether the server refuses a command because its keys are in several slots.
pub(crate) fn crosses_slots(error: &RedisError) -> bool {
    // Proxies that check slots have messages of their own.
    let is_by_proxy = || error.detail().is_some_and(|detail| detail.contains("same slot"));
    error.code() == Some("CROSSSLOT") || (error.code() == Some("ERR") && is_by_proxy())
}

/// As [`crosses_slots`], for the error of a request.
pub(crate) fn is_across_slots(error: &BackendError) -> bool {
    error.cause::<RedisError>().is_some_and(crosses_slots)
}

/// Whether the server does not accept the user or the password.
pub(crate) fn is_about_the_login(error: &RedisError) -> bool {
    matches!(error.code(), Some("NOAUTH" | "WRONGPASS"))
        || error.kind() == ErrorKind::AuthenticationFailed
}

/// Whether the connection ended before an answer.
pub(crate) fn is_hang_up(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Io
}

/// Whether the server does not know the command or does not allow it to this user, so that it had no effect.
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

/// Whether the server does not know the command or an option of it, so that it had no effect.
pub(crate) fn is_unsupported(error: &RedisError) -> bool {
    let detail = error.detail().unwrap_or_default();
    let is_syntax = error.code() == Some("ERR")
        && (detail.contains("syntax error") || detail.contains("wrong number of arguments"));
    is_syntax || is_unknown_command(error)
}

/// Whether the user may run the command, but not with this key.
pub(crate) fn is_forbidden_key(error: &RedisError) -> bool {
    error.code() == Some("NOPERM") && !is_unknown_command(error)
}

/// Whether the server refuses a request because of its keys: one is forbidden, or they are in several slots.
pub(crate) fn is_about_keys(error: &BackendError) -> bool {
    let error = error.cause::<RedisError>();
    error.is_some_and(|error| is_forbidden_key(error) || crosses_slots(error))
}

/// Whether the key has a value of a type other than that of a lock.
pub(crate) fn is_wrong_type(error: &RedisError) -> bool {
    error.code() == Some("WRONGTYPE")
}

/// Whether the error is temporary and independent of the user's rights.
pub(crate) fn is_transient(error: &RedisError) -> bool {
    matches!(
        code_of(error),
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

/// Whether the server has reached its limit of connections.
pub(crate) fn is_full(error: &RedisError) -> bool {
    let detail = error.detail().unwrap_or_default();
    error.code() == Some("ERR") && detail.starts_with("max number of clients")
}

/// The codes that only a replica answers with.
const OF_A_REPLICA: [&str; 3] = ["READONLY", "MASTERDOWN", "UNBLOCKED"];

/// Whether only a replica gives this answer: the server is no longer the master.
pub(crate) fn is_of_a_replica(error: &RedisError) -> bool {
    code_of(error).is_some_and(|code| OF_A_REPLICA.contains(&code))
}

/// Whether the server is loading its data. A server that has served before does so when it becomes a replica.
pub(crate) fn is_loading(error: &RedisError) -> bool {
    code_of(error) == Some("LOADING")
}

/// As [`is_loading`], for an answer that has not been made an error yet.
pub(crate) fn is_loading_answer(answer: &Value) -> bool {
    matches!(answer, Value::ServerError(error) if error.code() == "LOADING")
}

/// As [`is_of_a_replica`], for the text of an error that a script has returned as a value.
pub(crate) fn is_text_of_a_replica(text: &str) -> bool {
    let (code, detail) = text.split_once(' ').unwrap_or((text, ""));
    OF_A_REPLICA.contains(&unscripted(code, detail).0)
}

/// The failure for `error`, the answer of the server at `server` to a request.
pub(crate) fn failure(server: &str, error: RedisError) -> BackendError {
    let (failure, what, remedy) = match error.code() {
        Some(code) => {
            let (code, detail) = unscripted(code, error.detail().unwrap_or_default());
            refusal(code, detail)
        }
        None => connection_error(&error),
    };
    BackendError::new(failure, format!("Redis at {server} {what}")).remedy(remedy).because(error)
}

/// The failure for the text of an error that a script has returned as a value, `CODE detail`.
pub(crate) fn script_failure(server: &str, text: &str) -> BackendError {
    let (code, detail) = text.split_once(' ').unwrap_or((text, ""));
    let (code, detail) = unscripted(code, detail);
    let (failure, what, remedy) = refusal(code, detail);
    BackendError::new(failure, format!("Redis at {server} {what}")).remedy(remedy)
}

fn code_of(error: &RedisError) -> Option<&str> {
    error.code().map(|code| unscripted(code, error.detail().unwrap_or_default()).0)
}

/// The code and detail of an error inside a script, as a command outside would have them. Up to 6.2 a server answers
/// `ERR Error running script (call to f_<hash>): @user_script:9: CODE detail`, later ones `CODE detail script:
/// <hash>, on @user_script:9.`
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

/// Up to 7.0 a missing right has no code of its own inside a script. The client library hides the code of a refused `SELECT`.
fn coded<'a>(code: &'a str, detail: &'a str) -> (&'a str, &'a str) {
    let code = match code {
        "ERR" if detail.starts_with("The user executing the script can't") => "NOPERM",
        "ERR" if detail.contains("is busy running a script") => "BUSY",
        code => code,
    };
    (code, detail)
}

/// The remedy for locks of one request in different slots.
pub(crate) const SHARE_A_SLOT: &str = "locks that are taken together have to share a slot: put what their keys have in common into braces, for example `order:{<id>}` and `stock:{<id>}`";

/// The same for an endpoint that may also be a node of a quorum.
const SHARE_A_SLOT_HERE: &str = "locks that are taken together have to share a slot: put what their keys have in common into braces, for example `order:{<id>}` and `stock:{<id>}`; a node of a quorum that checks slots is written as a cluster, `redis+cluster://host`";

fn refusal(code: &str, detail: &str) -> (FailureKind, String, &'static str) {
    let answer = format!("answered {code} {detail}");
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
            answer,
            "allow the ACL user `+set +get +mget +del +pexpire +pttl +time +incrby +multi +exec +eval +evalsha +hello +ping +select +publish +subscribe +zadd +zrem +zcard +zscore +zrank +zrange +zpopmin +client|tracking +client|caching` on the lock keys, their wait queues `<key>:lock_runtime:line`, `lock_runtime:fence` (after the pool's prefix) and the channels `&lock_runtime:*`; in a Redis Cluster also `+asking +cluster|slots`, and there and where an endpoint checks slots those keys with a number in braces in front, `~{*}*`; of a quorum also the key `lock_runtime:ballots`; for lists also `+scan +getrange`",
        ),
        "WRONGTYPE" => (
            FailureKind::Rejected,
            answer,
            "the lock's key, its `<key>:lock_runtime:line` or `lock_runtime:fence` has a value of another kind: rename one of the two. A hash under the lock's key is probably a lock of Redisson, which uses another format",
        ),
        "OOM" => (
            FailureKind::Rejected,
            answer,
            "raise `maxmemory` or free memory; keep `maxmemory-policy noeviction`, other policies drop locks",
        ),
        "MISCONF" => (
            FailureKind::Rejected,
            answer,
            "the server cannot write its snapshot and refuses writes; look at its log and its disk",
        ),
        "NOREPLICAS" => (
            FailureKind::Rejected,
            answer,
            "`min-replicas-to-write` is not met; check that the replicas are connected",
        ),
        "READONLY" => (
            FailureKind::NotApplied,
            answer,
            "the server is a replica, or was one a moment ago; point the URL at the master",
        ),
        "LOADING" | "MASTERDOWN" | "UNBLOCKED" | "CLUSTERDOWN" | "TRYAGAIN" | "BUSY" => (
            FailureKind::NotApplied,
            answer,
            "the server cannot serve yet; the request was repeated until the wait was over",
        ),
        "MOVED" | "ASK" => (
            FailureKind::Rejected,
            answer,
            "the server is part of a Redis Cluster: write `redis+cluster://` instead of `redis://`",
        ),
        "CROSSSLOT" => (FailureKind::Rejected, answer, SHARE_A_SLOT_HERE),
        "ERR" if detail.contains("same slot") => (FailureKind::Rejected, answer, SHARE_A_SLOT_HERE),
        "ERR" if detail.contains("cluster support disabled") => (
            FailureKind::Rejected,
            answer,
            "the server is not part of a Redis Cluster: write `redis://` instead of `redis+cluster://`",
        ),
        // The slot is being moved to another server, and the script reads a key that it has removed earlier.
        "ERR" if detail.contains(NON_LOCAL_KEY) => (
            FailureKind::MaybeApplied,
            answer,
            "the slot is being moved to another server of the cluster; the request was repeated until the wait was over",
        ),
        "ERR" | "upstream" if is_of_a_proxy(code, detail) => (
            FailureKind::MaybeApplied,
            answer,
            "the proxy has no answer from its server; check that the server is up and reachable from there",
        ),
        "ERR" if detail.starts_with("max number of clients") => (
            FailureKind::NotApplied,
            answer,
            "raise `maxclients` on the server, or close unused connections",
        ),
        _ => (
            FailureKind::Rejected,
            answer,
            "the server refuses a command that locks need; it has to be Redis or Valkey 6.2 or newer",
        ),
    }
}

/// Whether a proxy answers in place of its server, which may have served the request. twemproxy answers with the text of the
/// system's error, Envoy with `upstream failure`.
fn is_of_a_proxy(code: &str, detail: &str) -> bool {
    const OF_THE_SYSTEM: [&str; 5] =
        ["timed out", "Connection reset", "Connection refused", "Broken pipe", "No route to host"];
    code == "upstream" || OF_THE_SYSTEM.iter().any(|text| detail.contains(text))
}

fn connection_error(error: &RedisError) -> (FailureKind, String, &'static str) {
    const CHECK: &str =
        "check that the server is up and reachable, and the host and port in the URL";
    const HANGS_UP: &str = "check that the server is up, and the host and port in the URL; it also hangs up at `maxclients` connections, on clients without TLS (`rediss://`) and on those without a certificate (`?cert=/path.pem&key=/path.key`)";
    match error.kind() {
        ErrorKind::AuthenticationFailed => refusal("WRONGPASS", ""),
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
    fn an_error_inside_a_script_is_reported_as_outside() {
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
        // The client library's error for a refused `SELECT`.
        let busy =
            "Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.";
        assert_eq!(unscripted("ERR", busy), ("BUSY", busy));
        let odd = "Error running script (call to f_d524): @user_script:2: user_script:2: attempt to call a nil value";
        assert_eq!(unscripted("ERR", odd), ("ERR", odd));
        assert_eq!(unscripted("ERR", "syntax error"), ("ERR", "syntax error"));
    }

    /// The proxy does not know whether its server has served the request.
    #[test]
    fn an_error_of_a_proxy_without_an_answer_is_ambiguous() {
        for text in [
            "ERR Connection timed out",
            "ERR Operation timed out",
            "ERR Connection reset by peer",
            "ERR Connection refused",
            "upstream failure",
        ] {
            let answer = redis::parse_redis_value(format!("-{text}\r\n").as_bytes());
            let error = answer.and_then(Value::extract_error).unwrap_err();
            assert_eq!(failure("proxy", error).kind(), FailureKind::MaybeApplied, "{text}");
        }
        let refused = redis::parse_redis_value(b"-ERR unknown command\r\n");
        let error = refused.and_then(Value::extract_error).unwrap_err();
        assert_eq!(failure("server", error).kind(), FailureKind::Rejected);
    }
}
