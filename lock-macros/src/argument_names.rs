//! The names of the arguments, and their names in other libraries.

use crate::diagnostics::{closest, listed};

/// Every argument with an example.
pub(crate) const ARGUMENTS: [(&str, &str); 20] = [
    ("key", "key = \"order:<id>\""),
    ("keys", "keys = [\"account:<from>\", \"account:<to>\"]"),
    ("ttl", "ttl = \"30s\""),
    ("wait", "wait = \"3s\""),
    ("renew", "renew = true"),
    ("max_hold", "max_hold = \"10m\""),
    ("min_hold", "min_hold = \"50s\""),
    ("lock_delay", "lock_delay = \"2s\""),
    ("linger", "linger = \"50ms\""),
    ("on_conflict", "on_conflict = \"skip\""),
    ("on_lost", "on_lost = \"notify\""),
    ("release", "release = \"background\""),
    ("on_error", "on_error = |error| ..."),
    ("pool", "pool = \"name\""),
    ("guard", "guard = lock"),
    ("when", "when = amount > 0"),
    ("reentrant", "reentrant = true"),
    ("retry_delay", "retry_delay = \"100ms\""),
    ("retry_count", "retry_count = 10"),
    ("name", "name = \"settle\""),
];

/// Not part of lists: `crate` is rarely needed.
const CRATE: (&str, &str) = ("crate", "crate = path::to::lock_runtime");

const PREFIX: &str =
    "a prefix is a setting of the pool\nhelp: write `LockPool::builder(url).key_prefix(\"app:\")`";

/// Arguments of other libraries that are not supported, and what applies instead.
const PLANNED: [(&str, &str); 5] = [
    ("prefix", PREFIX),
    ("key_prefix", PREFIX),
    ("mode", "`mode` is not supported yet: every lock is exclusive"),
    ("permits", "`permits` is not supported yet: every lock has one holder"),
    (
        "fair",
        "`fair` is not an argument: waiters are served in FIFO order, even across processes if the store keeps a wait queue",
    ),
];

/// Arguments of other libraries that take another kind of value here, and what to write.
const TRANSLATED: [(&[&str], &str); 4] = [
    (&["unless"], "it is `when` with the opposite condition\nhelp: write `when = !(condition)`"),
    (
        &["no_wait", "nowait", "try_lock", "nonblocking", "non_blocking"],
        "a single attempt is a `wait` of zero\nhelp: write `wait = \"0s\"`",
    ),
    (
        &["block", "blocking"],
        "it is a `wait` of any length\nhelp: `wait = \"0s\"` is one attempt, `wait = \"forever\"` has no limit",
    ),
    (
        &["fallback", "otherwise"],
        "it is a value of `on_conflict`\nhelp: write `on_conflict = path::to::fallback`",
    ),
];

/// `timeout` and similar names mean the ttl in some libraries and the wait in others.
const AMBIGUOUS: [&str; 4] = ["timeout", "lock_timeout", "timeout_ms", "lock_time"];

/// Names in other libraries, by the argument with the same meaning.
const FOREIGN: [(&str, &[&str]); 17] = [
    (
        "key",
        &["resource", "id", "lock_key", "lock_name", "lock_id", "value", "mutex", "path", "topic"],
    ),
    ("keys", &["resources", "lock_keys"]),
    (
        "ttl",
        &[
            "expire",
            "expires",
            "expiry",
            "expiration",
            "expire_time",
            "expire_after",
            "expires_in",
            "lease",
            "lease_time",
            "lease_ms",
            "lease_duration",
            "lock_ttl",
            "ttl_ms",
            "ttl_secs",
            "ttl_seconds",
            "px",
            "ex",
            "duration",
            "validity",
            "time_to_live",
            "auto_release",
            "auto_release_time",
            "lock_at_most_for",
            "lock_at_most",
            "at_most",
        ],
    ),
    (
        "wait",
        &[
            "wait_time",
            "wait_timeout",
            "acquire_timeout",
            "acquire_wait",
            "blocking_timeout",
            "block",
            "blocking",
            "max_wait",
            "patience",
            "try_lock",
            "no_wait",
            "nowait",
            "nonblocking",
            "non_blocking",
            "wait_for",
            "wait_ms",
            "wait_secs",
        ],
    ),
    (
        "renew",
        &[
            "watchdog",
            "auto_renew",
            "auto_renewal",
            "auto_extend",
            "autoextend",
            "renewal",
            "extend",
            "keep_alive",
            "keepalive",
            "heartbeat",
            "renew_interval",
            "extend_interval",
            "automatic_extension_threshold",
        ],
    ),
    ("max_hold", &["max_lease", "max_lifetime", "max_duration"]),
    ("min_hold", &["lock_at_least_for", "lock_at_least", "at_least"]),
    ("lock_delay", &["lockdelay", "delay_after_loss"]),
    ("linger", &["sticky", "affinity", "keep_for", "idle_timeout"]),
    (
        "on_conflict",
        &["on_busy", "on_locked", "on_failure", "fail_strategy", "fallback", "otherwise", "skip"],
    ),
    ("on_lost", &["on_loss", "on_lock_lost"]),
    ("release", &["unlock", "release_mode", "release_policy", "background_release"]),
    ("on_error", &["error", "map_err", "error_handler", "custom_error"]),
    (
        "pool",
        &[
            "client",
            "executor",
            "backend",
            "store",
            "connection",
            "provider",
            "manager",
            "lock_pool",
        ],
    ),
    ("when", &["condition", "cond", "only_if", "if", "unless"]),
    (
        "retry_delay",
        &[
            "retry_interval",
            "retry_after",
            "sleep",
            "delay",
            "poll_interval",
            "interval",
            "backoff",
        ],
    ),
    (
        "retry_count",
        &["retry_times", "retries", "tries", "max_retries", "retry", "attempts", "max_attempts"],
    ),
];

/// The name of a supported argument.
pub(crate) fn known(name: &str) -> Option<&'static str> {
    arguments().map(|(known, _)| known).find(|known| *known == name)
}

pub(crate) fn example(name: &str) -> &'static str {
    arguments().find(|(known, _)| *known == name).map_or("", |(_, example)| example)
}

fn arguments() -> impl Iterator<Item = (&'static str, &'static str)> {
    ARGUMENTS.into_iter().chain([CRATE])
}

/// The argument that `name` means in another library, in snake case or in camel case.
pub(crate) fn meant(name: &str) -> Option<&'static str> {
    let name = snake_case(name);
    known(&name).or_else(|| {
        FOREIGN.iter().find(|(_, foreign)| foreign.contains(&&*name)).map(|(own, _)| *own)
    })
}

/// `leaseTime` is `lease_time`, and `lockTTL` is `lock_ttl`.
fn snake_case(name: &str) -> String {
    let mut snake = String::with_capacity(name.len() + 4);
    let mut after_lower = false;
    for c in name.chars() {
        if c.is_uppercase() && after_lower {
            snake.push('_');
        }
        after_lower = c.is_lowercase() || c.is_numeric();
        snake.extend(c.to_lowercase());
    }
    snake
}

/// `write` is the text of a supported argument, with the value of this one if it fits.
pub(crate) fn explain_unknown(name: &str, write: impl FnOnce(&'static str) -> String) -> String {
    if let Some((_, sentence)) = PLANNED.iter().find(|(planned, _)| *planned == name) {
        return (*sentence).to_owned();
    }
    if AMBIGUOUS.contains(&&*snake_case(name)) {
        return format!(
            "`{name}` is not an argument: it is ambiguous\n\
             help: `wait = \"3s\"` is how long to wait for the lock\n\
             help: `ttl = \"30s\"` is how long a crashed holder blocks others"
        );
    }
    if let Some((_, sentence)) =
        TRANSLATED.iter().find(|(names, _)| names.contains(&&*snake_case(name)))
    {
        return format!("`{name}` is not an argument: {sentence}");
    }
    if let Some(own) = meant(name) {
        return format!("`{name}` is called `{own}` here\nhelp: write `{}`", write(own));
    }
    let names = || ARGUMENTS.iter().map(|(name, _)| *name);
    match closest(name, names()) {
        Some(own) => format!("unknown argument `{name}`\nhelp: did you mean `{own}`?"),
        None => format!("unknown argument `{name}`\nhelp: the arguments are {}", listed(names())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_foreign_name_is_an_argument() {
        for (own, foreign) in FOREIGN {
            assert!(known(own).is_some(), "{own}");
            for name in foreign {
                assert_eq!(known(name), None, "{name}");
            }
        }
    }

    #[test]
    fn a_foreign_name_has_one_meaning() {
        let mut all: Vec<&str> =
            FOREIGN.iter().flat_map(|(_, foreign)| foreign.iter().copied()).collect();
        all.extend(AMBIGUOUS);
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn every_unknown_name_is_explained() {
        let explain_unknown = |name| explain_unknown(name, |own| example(own).to_owned());
        assert!(explain_unknown("timeout").contains("ambiguous"));
        assert!(explain_unknown("lockTimeout").contains("ambiguous"));
        assert!(explain_unknown("lockAtMostFor").contains("write `ttl = \"30s\"`"));
        assert!(explain_unknown("lock_at_most_for").contains("write `ttl = \"30s\"`"));
        assert!(explain_unknown("lockAtLeastFor").contains("write `min_hold = \"50s\"`"));
        assert!(explain_unknown("leaseTime").contains("write `ttl = \"30s\"`"));
        assert!(explain_unknown("waitTime").contains("write `wait = \"3s\"`"));
        assert!(explain_unknown("maxHold").contains("`maxHold` is called `max_hold` here"));
        assert!(explain_unknown("TTL").contains("`TTL` is called `ttl` here"));
        assert!(explain_unknown("lockTTL").contains("`lockTTL` is called `ttl` here"));
        assert!(explain_unknown("unless").contains("write `when = !(condition)`"));
        assert!(explain_unknown("noWait").contains("write `wait = \"0s\"`"));
        assert!(explain_unknown("blocking").contains("`wait = \"0s\"` is one attempt"));
        assert!(explain_unknown("fallback").contains("write `on_conflict = path::to::fallback`"));
        assert!(explain_unknown("lease_time").contains("write `ttl = \"30s\"`"));
        assert!(explain_unknown("tll").contains("did you mean `ttl`?"));
        assert!(explain_unknown("colour").contains("the arguments are `key`"));
        assert!(explain_unknown("mode").contains("not supported yet"));
    }
}
