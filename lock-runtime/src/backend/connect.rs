//! Opens the store of a URL.

use std::sync::Arc;
use std::time::Duration;

use super::DynBackend;
use super::memory::Memory;
use crate::backend::credentials::Provider;
use crate::base::clock::Clock;
use crate::base::error::{ErrorKind, LockError};
use crate::base::pool_settings::POOL_SETTINGS;

/// Settings of a pool for its store.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
pub(crate) struct BackendConfig<'a> {
    /// Prefix of every key.
    pub(crate) key_prefix: &'a str,
    pub(crate) clock: Clock,
    /// Time limit of one request.
    pub(crate) request_timeout: Duration,
    /// Time limit of a connection attempt, until requests can be sent over the connection.
    pub(crate) connect_timeout: Duration,
    /// How long a node of a quorum may answer nothing before it counts as silent. `None`: the limit follows its response times.
    pub(crate) node_timeout: Option<Duration>,
    /// Provides user and password for each connection.
    pub(crate) credentials: Option<&'a Provider>,
    /// Provides them for each connection to a sentinel.
    pub(crate) sentinel_credentials: Option<&'a Provider>,
}

#[cfg(feature = "_remote")]
impl BackendConfig<'_> {
    pub(crate) fn limits(&self) -> Limits {
        Limits { connect: self.connect_timeout, request: self.request_timeout }
    }

    /// A `connect_timeout` in the URL overrides that of the builder.
    pub(crate) fn with_connect_timeout(self, connect_timeout: Option<Duration>) -> Self {
        Self { connect_timeout: connect_timeout.unwrap_or(self.connect_timeout), ..self }
    }
}

/// Time limits for a server.
#[cfg(feature = "_remote")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// For a connection attempt, until requests can be sent.
    pub(crate) connect: Duration,
    /// For one request; after this time without any answer the connection is replaced.
    pub(crate) request: Duration,
}

/// Opens the store at `url`. Errors show at most the scheme and the host.
pub(crate) async fn connect(
    url: &str,
    config: BackendConfig<'_>,
) -> Result<Arc<dyn DynBackend>, LockError> {
    // Without a scheme, the text before the first `://` may contain a password.
    let parts = url.split_once("://").filter(|(scheme, _)| !scheme.contains([':', '@', '/']));
    let Some((written, rest)) = parts else { return Err(without_scheme(url)) };
    // As in any URL, the case of its scheme does not matter.
    let scheme = &*written.to_ascii_lowercase();
    #[cfg(feature = "_remote")]
    let url = &*format!("{scheme}://{rest}");
    if let Some(error) = setting_of_the_pool(rest) {
        return Err(error);
    }
    // The nodes of a quorum may have parameters of their own.
    if scheme != "redlock"
        && let Some(error) = repeated_parameter(rest)
    {
        return Err(error);
    }
    // A quorum has URLs of its own for its nodes.
    let has_sentinels = scheme.ends_with("+sentinel") || scheme == "redlock";
    if config.sentinel_credentials.is_some() && !has_sentinels {
        let cause = format!("`{scheme}://` has no sentinels");
        return Err(LockError::new(ErrorKind::Config, cause)
            .remedy("leave `.sentinel_credentials(..)` out"));
    }
    match scheme {
        "memory" if rest.contains('?') => {
            Err(LockError::new(ErrorKind::Config, "a `memory://` URL has no `?` parameters")
                .remedy("write `memory://` or `memory://name`; ttl, wait and prefix are set on `LockPool::builder(url)`"))
        }
        "memory" if config.credentials.is_some() => {
            Err(LockError::new(ErrorKind::Config, "`memory://` does not log in, so it takes no credentials")
                .remedy("leave `.credentials(..)` out, or name a server: `redis://host:6379`"))
        }
        "memory" => Ok(Arc::new(Memory::open(rest, config.clock)?)),
        _ if config.clock.paused_runtime().is_some() => Err(paused_clock()),
        #[cfg(feature = "redis")]
        scheme if is_of_redis(scheme) => super::redis::open(url, config).await,
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => super::mysql::open(url, config).await,
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => super::postgres::open(url, config).await,
        #[cfg(feature = "etcd")]
        "etcd" | "etcds" => super::etcd::open(url, config).await,
        #[cfg(feature = "zookeeper")]
        "zookeeper" | "zookeepers" => super::zookeeper::open(url, config).await,
        _ => Err(unknown(scheme)),
    }
}

/// The error for a URL without `://` after its scheme. Any other text in it may be a password, so only the name of a known
/// scheme is shown.
#[cold]
fn without_scheme(url: &str) -> LockError {
    let word = url.split(':').next().unwrap_or_default().trim();
    let Some(scheme) = SCHEMES.into_iter().find(|known| known.eq_ignore_ascii_case(word)) else {
        return LockError::new(ErrorKind::Config, "the store's URL has no scheme").remedy(
            "write for example `redis://127.0.0.1:6379`, or `memory://` for locks of one process",
        );
    };
    let server = match scheme {
        "memory" => "",
        "redis" | "rediss" | "valkey" => "host:6379",
        "redis+sentinel" | "rediss+sentinel" => "host:26379/service",
        "redis+unix" => "/path",
        "postgres" | "postgresql" | "mysql" | "mariadb" => "host/database",
        _ => "host1,host2,host3",
    };
    LockError::new(ErrorKind::Config, format!("the URL has no `://` after `{scheme}`"))
        .remedy(format!("write `{scheme}://{server}`"))
}

fn parameter_names(query: &str) -> impl Iterator<Item = &str> {
    query.split('&').filter_map(|pair| pair.split('=').next())
}

/// The error for a URL that has a setting of the pool among its parameters.
fn setting_of_the_pool(rest: &str) -> Option<LockError> {
    let (_, query) = rest.split_once('?')?;
    let known = |name: &str| POOL_SETTINGS.iter().find(|setting| setting.name == name);
    let setting = parameter_names(query).find_map(known)?;
    let cause = format!("`{}` is a setting of the pool, not a parameter of its URL", setting.name);
    let remedy = setting.remedy(|variable| format!("LOCK_{variable}"));
    Some(LockError::new(ErrorKind::Config, cause).remedy(remedy))
}

/// The error for a URL that has a parameter twice: each reader would take another one of them.
fn repeated_parameter(rest: &str) -> Option<LockError> {
    // With an `@`, it may be a part of a password.
    let (_, query) = rest.split_once('?').filter(|(_, query)| !query.contains('@'))?;
    let names: Vec<_> = parameter_names(query).collect();
    let is_repeated = |(at, name): &(usize, &&str)| !name.is_empty() && names[..*at].contains(name);
    let (_, name) = names.iter().enumerate().find(is_repeated)?;
    let cause = format!("the URL has the parameter `{name}` twice");
    Some(LockError::new(ErrorKind::Config, cause).remedy("write it once"))
}

/// Whether the scheme is one of Redis or Valkey.
fn is_of_redis(scheme: &str) -> bool {
    let (server, rest) = scheme.split_once('+').unwrap_or((scheme, ""));
    match server {
        "redis" | "valkey" => matches!(rest, "" | "sentinel" | "cluster" | "unix"),
        "rediss" | "valkeys" => matches!(rest, "" | "sentinel" | "cluster"),
        "redlock" | "unix" => rest.is_empty(),
        _ => false,
    }
}

#[cold]
fn paused_clock() -> LockError {
    let cause =
        "the clock of this tokio runtime is paused, and would jump ahead while a server is awaited";
    LockError::new(ErrorKind::Config, cause).remedy(
        "write `memory://` for a test in virtual time, or leave `start_paused` out of a test with a server",
    )
}

const SCHEMES: [&str; 16] = [
    "redis",
    "rediss",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
    "redis+unix",
    "redlock",
    "valkey",
    "memory",
    "mysql",
    "mariadb",
    "postgres",
    "postgresql",
    "etcd",
    "zookeeper",
];

/// The scheme that `scheme` is a misspelling of.
fn meant_scheme(scheme: &str) -> Option<&'static str> {
    // In other libraries and tools.
    const OTHERS: [(&str, &str); 14] = [
        ("mem", "memory"),
        ("inmemory", "memory"),
        ("in-memory", "memory"),
        ("local", "memory"),
        ("sentinel", "redis+sentinel"),
        ("redis-sentinel", "redis+sentinel"),
        ("redis_sentinel", "redis+sentinel"),
        ("sentinels", "redis+sentinel"),
        ("cluster", "redis+cluster"),
        ("redis-cluster", "redis+cluster"),
        ("redis_cluster", "redis+cluster"),
        ("quorum", "redlock"),
        ("zk", "zookeeper"),
        ("pg", "postgres"),
    ];
    // The last one is another database.
    let is_meant = matches!(scheme, "etcds" | "zookeepers" | "mssql");
    if is_meant || SCHEMES.contains(&scheme) || is_of_redis(scheme) {
        return None;
    }
    let other = OTHERS.iter().find(|(other, _)| *other == scheme).map(|(_, meant)| *meant);
    let most_typos = if scheme.len() < 5 { 1 } else { 2 };
    let by_typo = || {
        let distance = |known: &&&str| strsim::osa_distance(known, scheme);
        SCHEMES.iter().min_by_key(distance).filter(|known| distance(known) <= most_typos).copied()
    };
    other.or_else(by_typo)
}

#[cold]
fn unknown(scheme: &str) -> LockError {
    if let Some(meant) = meant_scheme(scheme) {
        let cause = format!("`{scheme}://` is not a store");
        return LockError::new(ErrorKind::Config, cause)
            .remedy(format!("did you mean `{meant}://`?"));
    }
    let cause = format!("`{scheme}://` is not a store of this build");
    let remedy = match scheme {
        scheme if is_of_redis(scheme) => {
            "enable the feature `redis` (or `rediss` for TLS) of lock-runtime"
        }
        "mysql" | "mariadb" => "enable the feature `mysql` of lock-runtime",
        "postgres" | "postgresql" => "enable the feature `postgres` of lock-runtime",
        "etcd" => "enable the feature `etcd` of lock-runtime",
        "etcds" => "enable the feature `etcd-tls` of lock-runtime",
        "zookeeper" => "enable the feature `zookeeper` of lock-runtime",
        "zookeepers" => "enable the feature `zookeeper-tls` of lock-runtime",
        "http" | "https" => {
            "a store is reached by its own protocol; write for example `redis://host:6379`"
        }
        _ => {
            "lock-runtime supports, with the feature of each, `redis://host:6379`, `redis+sentinel://host:26379/service`, `redis+cluster://host1,host2`, all with `rediss` for TLS or `valkey` for `redis`, `redis+unix:///path`, `redlock://host1,host2,host3` (a quorum), `postgres://host/database`, `mysql://host/database`, `etcd://host1,host2,host3/path`, `zookeeper://host1,host2,host3/path` and `memory://`"
        }
    };
    LockError::new(ErrorKind::Config, cause).remedy(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_that_a_url_has_twice_is_named() {
        let repeated = |rest| repeated_parameter(rest).map(|error| error.to_string());
        let error = repeated("host:6379?db=3&scripts=off&db=4").unwrap();
        assert!(error.contains("`db` twice; write it once"), "{error}");
        for rest in ["host", "host?", "host?a&&b", "host?db=3&cadb=3", "u:p?x@y?x@host"] {
            assert_eq!(repeated(rest), None, "{rest}");
        }
    }

    #[test]
    fn a_misspelt_scheme_is_named() {
        for (scheme, meant) in [
            ("redi", "redis"),
            ("reddis", "redis"),
            ("mem", "memory"),
            ("inmemory", "memory"),
            ("redis-sentinel", "redis+sentinel"),
            ("cluster", "redis+cluster"),
            ("postgre", "postgres"),
            ("zk", "zookeeper"),
        ] {
            assert_eq!(meant_scheme(scheme), Some(meant), "{scheme}");
        }
        for scheme in
            ["redis", "valkeys+cluster", "etcds", "mysql", "http", "ftp", "consul", "unix", "mssql"]
        {
            assert_eq!(meant_scheme(scheme), None, "{scheme}");
        }
    }

    #[test]
    fn a_scheme_without_its_slashes_is_named() {
        for (url, words) in [
            ("memory:/", "the URL has no `://` after `memory`; write `memory://`"),
            ("memory", "the URL has no `://` after `memory`; write `memory://`"),
            ("redis:/h", "the URL has no `://` after `redis`; write `redis://host:6379`"),
            ("REDIS:h", "the URL has no `://` after `redis`; write `redis://host:6379`"),
            (" redis:secret@h", "the URL has no `://` after `redis`; write `redis://host:6379`"),
            ("etcd:secret", "write `etcd://host1,host2,host3`"),
            ("localhost:6379", "the store's URL has no scheme; write for example"),
            ("secret", "the store's URL has no scheme; write for example"),
            ("", "the store's URL has no scheme; write for example"),
        ] {
            let error = without_scheme(url);
            assert_eq!(error.kind(), ErrorKind::Config);
            let text = format!("{error} {error:?}");
            assert!(text.contains(words) && !text.contains("secret"), "{url}: {text}");
        }
    }

    #[test]
    fn a_setting_of_the_pool_in_a_url_is_named() {
        for (rest, words) in [
            ("host:6379/0?db=1&ttl=5s", "set LOCK_TTL, or call `PoolBuilder::ttl`"),
            ("host?prefix=app:", "set LOCK_PREFIX, or call `PoolBuilder::key_prefix`"),
            ("host/db?owner_info=off", "set LOCK_OWNER_INFO, or call `PoolBuilder::owner_info`"),
            ("a,b,c/root?retry_count", "`retry_count` is a setting of the pool"),
        ] {
            let error = setting_of_the_pool(rest).unwrap();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(words), "{error}");
        }
        for rest in ["host", "host?connect_timeout=5s", "u:p%3Fttl@host?ca=/ttl", "host/ttl?"] {
            assert!(setting_of_the_pool(rest).is_none(), "{rest}");
        }
    }
}
