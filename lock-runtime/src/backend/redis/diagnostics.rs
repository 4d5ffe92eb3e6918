//! Settings and states of a server by which locks could be lost, as far as the user may read them.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime};

use redis::{Cmd, FromRedisValue, RedisError, Value};

use crate::backend::clock_distance::ClockDistance;
use crate::backend::{Finding, Warning};

/// The oldest version with all commands that are used.
const OLDEST: (u64, u64) = (6, 2);

type InfoAnswer = Result<Value, RedisError>;

/// The command that a new pool sends. It is allowed nearly everywhere and has most of the information.
pub(crate) fn info_command() -> Cmd {
    // 6.2 does not accept several sections in one command.
    redis::cmd("INFO")
}

/// The commands for settings that `INFO` does not have. They need more rights.
pub(crate) fn config_commands() -> [Cmd; 2] {
    ["appendfsync", "save"].map(|name| {
        let mut get = redis::cmd("CONFIG");
        get.arg("GET").arg(name);
        get
    })
}

/// The warnings about the server at `server`. Information that is missing in its answers leads to no warning.
/// `for_all`: it has to serve all keys.
pub(crate) fn warnings(
    server: &str,
    for_all: bool,
    info: &InfoAnswer,
    more: &[InfoAnswer],
) -> Vec<Warning> {
    let facts = Facts::of(server, for_all, info, more);
    let all =
        [facts.part(), facts.replica(), facts.eviction(), facts.persistence(), facts.version()];
    all.into_iter().flatten().collect()
}

/// The checks of the server at `server`, by the same answers.
pub(crate) fn findings(
    server: &str,
    for_all: bool,
    info: &InfoAnswer,
    more: &[InfoAnswer],
) -> Vec<Finding> {
    let facts = Facts::of(server, for_all, info, more);
    let known = |name: &str| facts.info(name).map(str::to_owned);
    // How often the file is flushed decides.
    let persistence = || facts.set("appendfsync").map(|how| format!("append-only file, {how}"));
    let checks = [
        ("version", facts.version(), known("redis_version")),
        ("role", facts.replica().or_else(|| facts.part()), known("role")),
        ("eviction", facts.eviction(), known("maxmemory_policy")),
        ("persistence", facts.persistence(), persistence()),
    ];
    let finding =
        |(check, warning, state): (_, Option<Warning>, Option<String>)| match (warning, state) {
            (Some(warning), _) => Finding::warning(check, &warning),
            (None, Some(state)) => Finding::good(check, state),
            (None, None) => Finding::unknown(
                check,
                "this login may not read it",
                "allow the login to run `INFO` and `CONFIG GET`, or use a login that may run them",
            ),
        };
    checks.into_iter().map(|check| finding(check).at(server)).collect()
}

/// The check of a server's clock, by its answer to `TIME`. The request was sent, and the answer received, at the moments of
/// `asked`.
pub(crate) fn clock_finding(
    server: &str,
    time: &InfoAnswer,
    asked: &RangeInclusive<SystemTime>,
) -> Finding {
    let distance = time.as_ref().ok().and_then(|time| clock_distance(time, asked));
    let finding = match distance {
        None => {
            Finding::unknown("clock", "this login may not read it", "allow the login to run `TIME`")
        }
        Some(distance) => match distance.warning(format_args!("Redis at {server}")) {
            Some(warning) => Finding::warning("clock", &warning),
            None => Finding::good("clock", format!("{distance} this machine")),
        },
    };
    finding.at(server)
}

/// The answer to [`info_command`]; empty if it is an error.
pub(crate) struct Info(String);

impl Info {
    pub(crate) fn of(answer: &InfoAnswer) -> Self {
        Self(parsed(answer).unwrap_or_default())
    }

    /// Identifies the server until its restart.
    pub(crate) fn run_id(&self) -> Option<&str> {
        self.get("run_id")
    }

    /// Whether the server is part of a cluster.
    pub(crate) fn is_part(&self) -> bool {
        self.get("cluster_enabled") == Some("1")
    }

    /// Whether the server is a sentinel, which keeps no keys.
    pub(crate) fn is_sentinel(&self) -> bool {
        self.get("redis_mode") == Some("sentinel")
    }

    /// Whether the server is a replica.
    pub(crate) fn is_replica(&self) -> bool {
        self.get("role") == Some("slave")
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    }
}

struct Facts<'a> {
    server: &'a str,
    for_all: bool,
    info: Info,
    set: HashMap<String, String>,
}

impl<'a> Facts<'a> {
    fn of(server: &'a str, for_all: bool, info: &InfoAnswer, more: &[InfoAnswer]) -> Self {
        let set = more.iter().filter_map(parsed::<HashMap<String, String>>).flatten().collect();
        Self { server, for_all, info: Info::of(info), set }
    }

    fn part(&self) -> Option<Warning> {
        (self.for_all && self.info.is_part()).then(|| {
            Warning::new(
                format!(
                    "Redis at {} is part of a cluster, and refuses the keys of all other servers",
                    self.server
                ),
                "connect to the cluster: `redis+cluster://` instead of `redis://`",
            )
        })
    }

    fn replica(&self) -> Option<Warning> {
        self.info.is_replica().then(|| {
            Warning::new(
                format!("Redis at {} is a replica, which accepts no locks", self.server),
                "point the URL at the master, or at the sentinels that know it: `redis+sentinel://host:26379/service`",
            )
        })
    }

    fn eviction(&self) -> Option<Warning> {
        let policy = self.info("maxmemory_policy").filter(|policy| *policy != "noeviction")?;
        let when = match self.info("maxmemory") {
            Some("0") => "would drop locks if `maxmemory` were set and reached",
            _ => "drops locks when its memory is full",
        };
        Some(Warning::new(
            format!("Redis at {} {when}: its `maxmemory-policy` is `{policy}`", self.server),
            "set `maxmemory-policy noeviction` there, or use a separate server for the locks",
        ))
    }

    fn persistence(&self) -> Option<Warning> {
        const REMEDY: &str = "set `appendonly yes` and `appendfsync always` there, or have the protected resource check fences";
        let server = self.server;
        let text = match (self.info("aof_enabled")?, self.set("save"), self.set("appendfsync")) {
            ("0", Some(""), _) => format!(
                "Redis at {server} keeps nothing on disk: a restart loses all locks, and they are granted again while their holders continue"
            ),
            ("0", _, _) => format!(
                "Redis at {server} has no append-only file: a crash loses the locks since its last snapshot, if it makes any, and they are granted again while their holders continue"
            ),
            (_, _, Some(how)) if how != "always" => format!(
                "Redis at {server} has `appendfsync {how}`: a crash of its machine loses the locks of the last moments, and they are granted again while their holders continue"
            ),
            _ => return None,
        };
        Some(Warning::new(text, REMEDY))
    }

    fn version(&self) -> Option<Warning> {
        let version = self.info("redis_version")?;
        let mut numbers = version.split('.').map_while(|number| number.parse().ok());
        let number = (numbers.next()?, numbers.next()?);
        (number < OLDEST).then(|| {
            Warning::new(
                format!("Redis at {} has version {version}", self.server),
                "the locks are tested with 6.2 and newer: upgrade the server",
            )
        })
    }

    fn info(&self, name: &str) -> Option<&str> {
        self.info.get(name)
    }

    fn set(&self, name: &str) -> Option<&str> {
        self.set.get(name).map(String::as_str)
    }
}

/// The distance of a server's clock, by its answer to `TIME`. `None` if the answer is not a time.
pub(crate) fn clock_distance(
    time: &Value,
    asked: &RangeInclusive<SystemTime>,
) -> Option<ClockDistance> {
    let Value::Array(parts) = time else { return None };
    let [seconds, micros] = parts.as_slice() else { return None };
    let number = |part: &Value| u64::from_redis_value_ref(part).ok();
    let since_epoch = Duration::from_secs(number(seconds)?)
        .checked_add(Duration::from_micros(number(micros)?))?;
    ClockDistance::of(since_epoch, asked)
}

fn parsed<T: FromRedisValue>(answer: &InfoAnswer) -> Option<T> {
    T::from_redis_value_ref(answer.as_ref().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(info: &str, more: &[(&str, &str)]) -> Vec<String> {
        let text = |text: &str| Value::BulkString(text.into());
        let more: Vec<_> = more
            .iter()
            .map(|(name, value)| Ok(Value::Array(vec![text(name), text(value)])))
            .collect();
        let all = warnings("h:1", true, &Ok(text(info)), &more);
        all.iter().map(ToString::to_string).collect()
    }

    const FINE: &str = "# Server\r\nredis_version:6.2.0\r\nrole:master\r\nmaxmemory:5\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n";

    #[test]
    fn a_safe_server_and_missing_answers_lead_to_no_warning() {
        assert!(texts(FINE, &[]).is_empty());
        assert!(texts(FINE, &[("appendfsync", "always"), ("save", "")]).is_empty());
        assert!(texts("", &[]).is_empty());
        assert!(texts("redis_version:unknown\r\nfoo\r\n:\r\n", &[("save", "")]).is_empty());
        let refused = || Err(RedisError::from((redis::ErrorKind::Client, "no")));
        assert!(warnings("h:1", true, &refused(), &[refused(), refused()]).is_empty());
        assert!(warnings("h:1", true, &Ok(Value::Int(7)), &[Ok(Value::Nil)]).is_empty());
        let of_cluster = Ok(Value::BulkString("cluster_enabled:1\r\n".into()));
        assert!(warnings("h:1", false, &of_cluster, &[]).is_empty());
    }

    #[test]
    fn each_danger_has_its_warning() {
        let with = |from: &str, to: &str| texts(&FINE.replace(from, to), &[]);
        for (all, expected) in [
            (with("6.2.0", "6.0.16"), "version 6.0.16"),
            (with("master", "slave"), "is a replica"),
            (with("role:", "cluster_enabled:1\r\nrole:"), "`redis+cluster://`"),
            (with("role:", "cluster_enabled:0\r\nrole:"), ""),
            (with("noeviction", "volatile-ttl"), "drops locks when"),
            (with("5\r\nmaxmemory_policy:no", "0\r\nmaxmemory_policy:no"), ""),
            (with("aof_enabled:1", "aof_enabled:0"), "no append-only file"),
            (
                texts(&FINE.replace("aof_enabled:1", "aof_enabled:0"), &[("save", "")]),
                "nothing on disk",
            ),
            (
                texts(&FINE.replace("aof_enabled:1", "aof_enabled:0"), &[("save", "60 1")]),
                "snapshot",
            ),
            (texts(FINE, &[("appendfsync", "everysec")]), "appendfsync everysec"),
        ] {
            if expected.is_empty() {
                assert!(all.is_empty(), "{all:?}");
            } else {
                assert!(all.len() == 1 && all[0].contains(expected), "{expected}: {all:?}");
            }
        }
    }

    #[test]
    fn distances_of_clocks_are_compared() {
        let text = |number: u64| Value::BulkString(number.to_string().into_bytes());
        let at = |seconds, micros| Value::Array(vec![text(seconds), text(micros)]);
        let local = |millis| SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
        let asked = local(10_500)..=local(10_500);
        let ahead = clock_distance(&at(10, 700_000), &asked).unwrap();
        let behind = clock_distance(&at(9, 0), &asked).unwrap();
        assert_eq!(ahead, ClockDistance::Ahead(Duration::from_millis(200)));
        assert_eq!(behind, ClockDistance::Behind(Duration::from_millis(1_500)));
        assert_eq!(ahead.to(behind), Duration::from_millis(1_700));
        assert_eq!(behind.to(ahead), Duration::from_millis(1_700));
        assert_eq!(ahead.to(ahead), Duration::ZERO);
        for odd in [Value::Nil, Value::Array(vec![text(1)]), at(u64::MAX, 0)] {
            assert_eq!(clock_distance(&odd, &asked), None);
        }
    }
}
