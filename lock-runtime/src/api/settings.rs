//! Settings of a pool from environment variables.

use std::env::VarError;
use std::time::Duration;

use crate::api::named_pools::DEFAULT;
use crate::api::pool::{LockPool, PoolBuilder};
use crate::base::error::{ErrorKind, LockError};
use crate::base::options::{OnOutage, Wait};
use crate::base::pool_settings::{CONNECT_TIMEOUT, POOL_SETTINGS, PoolSetting};
use crate::base::text;

impl PoolBuilder {
    /// The settings of the pool `name` from environment variables. Those of `"default"` are `LOCK_URL`, `LOCK_TTL` and so
    /// on. Those of `"stock-eu"` are `LOCK_STOCK_EU_URL`, `LOCK_STOCK_EU_TTL` and so on. Only the URL has to be set.
    ///
    /// | variable | value | setting |
    /// |---|---|---|
    /// | `LOCK_URL` | `redis://127.0.0.1:6379` | as [`LockPool::connect`] |
    /// | `LOCK_PREFIX` | `app:` | [`key_prefix`](Self::key_prefix) |
    /// | `LOCK_TTL` | `30s` | [`ttl`](Self::ttl) |
    /// | `LOCK_WAIT` | `3s`, `forever` | [`wait`](Self::wait) |
    /// | `LOCK_REQUEST_TIMEOUT` | `1s` | [`request_timeout`](Self::request_timeout) |
    /// | `LOCK_MAX_WAITERS` | `10000` | [`max_waiters`](Self::max_waiters) |
    /// | `LOCK_ON_OUTAGE` | `wait`, `fail` | [`on_outage`](Self::on_outage) |
    /// | `LOCK_OWNER_INFO` | `on`, `off` | [`owner_info`](Self::owner_info) |
    ///
    /// Times are whole numbers of `ms`, `s`, `m` or `h`. An empty value counts as not set. The other settings belong to the
    /// program, or to the URL.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the URL is not set, or a value is invalid. The same applies to a variable that is none of these and
    /// is named like a setting, such as `LOCK_TTLS` or `LOCK_LINGER`.
    pub fn from_env(name: &str) -> Result<Self, LockError> {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        check_names(name, &names.collect::<Vec<_>>())?;
        from_variables(name, |variable| std::env::var(variable))
    }
}

/// Like [`PoolBuilder::from_env`], with the variables that `read` returns.
fn from_variables(
    name: &str,
    read: impl Fn(&str) -> Result<String, VarError>,
) -> Result<PoolBuilder, LockError> {
    if !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
        let cause = "the name of the pool has characters that a variable cannot have";
        return Err(LockError::new(ErrorKind::Config, cause)
            .in_pool(&name.into())
            .remedy("write it with ASCII letters, digits, `-` and `_`, or build the pool with `LockPool::builder(url)`"));
    }
    let value_of = |setting: &str| {
        let variable = variable(name, setting);
        match read(&variable) {
            Ok(value) if value.is_empty() => Ok(None),
            Ok(value) => Ok(Some(Value { variable, value })),
            Err(VarError::NotPresent) => Ok(None),
            Err(VarError::NotUnicode(_)) => {
                Err(invalid(&variable, "is not valid UTF-8", "set it to plain text"))
            }
        }
    };
    let Some(url) = value_of("URL")? else {
        return Err(invalid(
            &variable(name, "URL"),
            "is not set",
            "set it to the store's URL, for example `redis://127.0.0.1:6379`, or to `memory://` for one process",
        ));
    };
    let mut builder = LockPool::builder(url.value);
    if let Some(prefix) = value_of("PREFIX")? {
        builder = prefix.checked(builder.key_prefix(&*prefix.value))?;
    }
    if let Some(ttl) = value_of("TTL")? {
        builder = ttl.checked(builder.ttl(ttl.time(TIME)?))?;
    }
    if let Some(wait) = value_of("WAIT")? {
        builder = match wait.value.as_str() {
            "forever" => builder.wait(Wait::Forever),
            _ => wait.checked(builder.wait(wait.time(WAIT)?))?,
        };
    }
    if let Some(request_timeout) = value_of("REQUEST_TIMEOUT")? {
        builder = request_timeout.checked(builder.request_timeout(request_timeout.time(TIME)?))?;
    }
    if let Some(max_waiters) = value_of("MAX_WAITERS")? {
        builder = max_waiters.checked(builder.max_waiters(max_waiters.number()?))?;
    }
    if let Some(on_outage) = value_of("ON_OUTAGE")? {
        builder = builder.on_outage(match on_outage.value.as_str() {
            "wait" => OnOutage::Wait,
            "fail" => OnOutage::Fail,
            _ => return Err(on_outage.invalid("write `wait` or `fail`")),
        });
    }
    if let Some(owner_info) = value_of("OWNER_INFO")? {
        builder = builder.owner_info(match owner_info.value.as_str() {
            "on" => true,
            "off" => false,
            _ => return Err(owner_info.invalid("write `on` or `off`")),
        });
    }
    Ok(builder)
}

/// `LOCK_TTL`, `LOCK_STOCK_EU_TTL`
fn variable(pool: &str, setting: &str) -> String {
    if pool == DEFAULT {
        return format!("LOCK_{setting}");
    }
    let upper = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    format!("LOCK_{}_{setting}", pool.chars().map(upper).collect::<String>())
}

/// Refuses a variable that would be ignored, and is named like a setting.
fn check_names(pool: &str, present: &[String]) -> Result<(), LockError> {
    let start = variable(pool, "");
    let is_of_other_pool = |rest: &str| {
        let mut ends = rest.match_indices('_');
        ends.any(|(end, _)| present.contains(&format!("{start}{}_URL", &rest[..end])))
    };
    for name in present {
        let Some(rest) = name.strip_prefix(&start) else { continue };
        let is_read = rest == "URL" || POOL_SETTINGS.iter().any(|it| it.variable == Some(rest));
        if is_read || is_of_other_pool(rest) {
            continue;
        }
        let remedy = match meant(&rest.to_ascii_lowercase()) {
            Some(Meant::Url) => format!("set {}", variable(pool, "URL")),
            Some(Meant::PartOfUrl) => {
                format!("write it into {}: `redis://user:password@host`", variable(pool, "URL"))
            }
            Some(Meant::AnyTimeout) => format!(
                "set {} (how long a call waits for its lock), {} (after which the lock of a dead process is free) or {} (of one request to the store)",
                variable(pool, "WAIT"),
                variable(pool, "TTL"),
                variable(pool, "REQUEST_TIMEOUT"),
            ),
            Some(Meant::Setting(setting)) => setting.remedy(|setting| variable(pool, setting)),
            None => continue,
        };
        let cause = format!("the environment variable {name} is not one of a pool");
        return Err(LockError::new(ErrorKind::Config, cause).remedy(remedy));
    }
    Ok(())
}

/// What the name of a variable was probably meant for.
enum Meant {
    Url,
    PartOfUrl,
    /// One of several time limits.
    AnyTimeout,
    Setting(&'static PoolSetting),
}

fn meant(name: &str) -> Option<Meant> {
    const UNITS: [&str; 6] = ["_ms", "_millis", "_s", "_sec", "_secs", "_seconds"];
    let without_unit = UNITS.iter().find_map(|unit| name.strip_suffix(unit)).unwrap_or(name);
    let is_meant = |known: &str| {
        let most_typos = if known.len() > 4 { 2 } else { 1 };
        without_unit == known || strsim::osa_distance(name, known) <= most_typos
    };
    match without_unit {
        "timeout" => return Some(Meant::AnyTimeout),
        "user" | "username" | "password" => return Some(Meant::PartOfUrl),
        _ if is_meant("url") => return Some(Meant::Url),
        _ => {}
    }
    let mut settings = POOL_SETTINGS.iter().chain([&CONNECT_TIMEOUT]);
    settings.find(|setting| is_meant(setting.name)).map(Meant::Setting)
}

const TIME: &str = "write a whole number of `ms`, `s`, `m` or `h`, such as `5s`";
const WAIT: &str = "write a whole number of `ms`, `s`, `m` or `h`, such as `5s`, or `forever`";

/// A variable that is set.
struct Value {
    variable: String,
    value: String,
}

impl Value {
    fn time(&self, remedy: &'static str) -> Result<Duration, LockError> {
        text::duration(&self.value).ok_or_else(|| self.invalid(remedy))
    }

    /// `builder`, which has this value, unless the value is out of range.
    fn checked(&self, builder: PoolBuilder) -> Result<PoolBuilder, LockError> {
        match builder.check() {
            Ok(()) => Ok(builder),
            Err(error) => {
                let what = format!("has the value `{}`: {}", self.value, error.cause());
                Err(invalid(&self.variable, &what, "set it to a value in that range"))
            }
        }
    }

    fn number(&self) -> Result<usize, LockError> {
        self.value.parse().map_err(|_| self.invalid("write a whole number, such as `10000`"))
    }

    fn invalid(&self, remedy: &'static str) -> LockError {
        invalid(&self.variable, &format!("has the value `{}`", self.value), remedy)
    }
}

#[cold]
fn invalid(variable: &str, what: &str, remedy: &'static str) -> LockError {
    let cause = format!("the environment variable {variable} {what}");
    LockError::new(ErrorKind::Config, cause).remedy(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, variables: &[(&str, &str)]) -> Result<PoolBuilder, LockError> {
        from_variables(name, |variable| {
            let found = variables.iter().find(|(one, _)| *one == variable);
            found.map(|(_, value)| (*value).to_owned()).ok_or(VarError::NotPresent)
        })
    }

    #[test]
    fn each_setting_is_read() {
        let all = [
            ("LOCK_URL", "memory://"),
            ("LOCK_PREFIX", "app:"),
            ("LOCK_TTL", "7s"),
            ("LOCK_WAIT", "forever"),
            ("LOCK_REQUEST_TIMEOUT", "250ms"),
            ("LOCK_MAX_WAITERS", "17"),
            ("LOCK_ON_OUTAGE", "fail"),
            ("LOCK_OWNER_INFO", "off"),
        ];
        let shown = format!("{:?}", read(DEFAULT, &all).unwrap());
        for part in [
            "app:",
            "ttl: 7s",
            "wait: Forever",
            "request_timeout: 250ms",
            "17",
            "on_outage: Fail",
            "owner_info: false",
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        let other =
            read("stock-eu", &[("LOCK_STOCK_EU_URL", "memory://"), ("LOCK_STOCK_EU_WAIT", "2m")]);
        assert!(format!("{:?}", other.unwrap()).contains("wait: For(120s)"));
    }

    #[test]
    fn pools_with_different_names_have_different_variables() {
        for name in ["库存", "stock.eu", "stock eu"] {
            let error = read(name, &[("LOCK_URL", "memory://")]).unwrap_err();
            assert!(error.to_string().contains("ASCII letters"), "{error}");
        }
    }

    #[test]
    fn a_wrong_value_is_an_error_that_names_its_variable() {
        for (variable, value, words) in [
            ("LOCK_URL", "", "LOCK_URL is not set"),
            ("LOCK_TTL", "5", "LOCK_TTL has the value `5`; write a whole number of"),
            ("LOCK_WAIT", "never", "such as `5s`, or `forever`"),
            ("LOCK_TTL", "1ms", "LOCK_TTL has the value `1ms`: a ttl of 1ms is not between"),
            (
                "LOCK_REQUEST_TIMEOUT",
                "2h",
                "LOCK_REQUEST_TIMEOUT has the value `2h`: a request_timeout",
            ),
            ("LOCK_PREFIX", &"p".repeat(300), "LOCK_PREFIX has the value `ppp"),
            ("LOCK_MAX_WAITERS", "many", "such as `10000`"),
            ("LOCK_ON_OUTAGE", "no", "`wait` or `fail`"),
            ("LOCK_OWNER_INFO", "no", "`on` or `off`"),
        ] {
            let error = read(DEFAULT, &[(variable, value), ("LOCK_URL", "memory://")]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn a_variable_that_would_be_ignored_and_is_named_like_a_setting_is_refused() {
        let check = |pool: &str, names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            check_names(pool, &names).map_err(|error| error.to_string())
        };
        for (name, words) in [
            (
                "LOCK_TTLS",
                "LOCK_TTLS is not one of a pool; set LOCK_TTL, or call `PoolBuilder::ttl`",
            ),
            ("LOCK_TTL_MS", "set LOCK_TTL, or"),
            ("LOCK_WIAT", "set LOCK_WAIT, or"),
            ("LOCK_ULR", "set LOCK_URL"),
            ("LOCK_PASSWORD", "write it into LOCK_URL"),
            ("LOCK_TIMEOUT", "set LOCK_WAIT (how long"),
            ("LOCK_TIMEOUT_MS", "LOCK_REQUEST_TIMEOUT (of one"),
            ("LOCK_KEY_PREFIX", "set LOCK_PREFIX, or call `PoolBuilder::key_prefix`"),
            ("LOCK_MAX_WAITER", "set LOCK_MAX_WAITERS"),
            ("LOCK_LINGER", "call `PoolBuilder::linger`"),
            ("LOCK_CONNECT_TIMEOUT", "call `PoolBuilder::connect_timeout`"),
        ] {
            let error = check(DEFAULT, &["LOCK_URL", name]).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let error = check("stock-eu", &["LOCK_STOCK_EU_TLL"]).unwrap_err();
        assert!(error.contains("set LOCK_STOCK_EU_TTL"), "{error}");
        // Of other programs, of another pool, and of all pools.
        let others = ["LOCK_FILE", "LOCK_DIR", "LOCK", "LOCK_TEST_SERVERS", "LOCK_ORDER", "TTLS"];
        let of_a_pool = ["LOCK_KEY_URL", "LOCK_KEY_PREFIX", "LOCK_KEY_TTL"];
        let known = ["LOCK_URL", "LOCK_TTL", "LOCK_OWNER_INFO", "LOCK_REQUEST_TIMEOUT"];
        for names in [&others[..], &of_a_pool, &known] {
            check(DEFAULT, names).unwrap();
        }
    }
}
