//! What a `redis://` URL says.

use std::fmt;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use redis::{ProtocolVersion, RedisConnectionInfo};
use url::{Host, Url};

use crate::error::{ErrorKind, LockError};

const DEFAULT_PORT: u16 = 6379;

const REPLICAS: &str = "replicas";

const CONNECT_TIMEOUT: &str = "connect_timeout";

/// One server, and how to log in. Displays without user and password.
#[derive(Clone, Debug)]
pub(super) struct Endpoint {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) tls: Option<TlsFiles>,
    pub(super) login: RedisConnectionInfo,
    pub(super) scripts: Scripts,
    /// How many replicas have to have a lock before it is believed in.
    pub(super) replicas: u16,
    /// How long a connection may take to be made, if not as the pool's builder says.
    pub(super) connect_timeout: Option<Duration>,
}

/// Whether locks are kept by Lua scripts: `?scripts=`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Scripts {
    /// If the server runs them.
    #[default]
    Auto,
    /// A server that does not is an error.
    On,
    /// By plain commands, and no script is ever sent.
    Off,
}

/// PEM files for a TLS connection; without `ca` the system's root certificates hold.
#[derive(Clone, Debug, Default)]
pub(super) struct TlsFiles {
    pub(super) ca: Option<String>,
    pub(super) cert: Option<String>,
    pub(super) key: Option<String>,
}

impl Endpoint {
    pub(super) fn parse(text: &str) -> Result<Self, LockError> {
        let url = Url::parse(text).map_err(|error| match error {
            url::ParseError::EmptyHost => wrong("the URL names no host"),
            error => wrong(format!("the URL is not valid: {error}")),
        })?;
        let host = match url.host() {
            Some(Host::Domain(name)) if !name.is_empty() => name.to_owned(),
            Some(Host::Ipv4(address)) => address.to_string(),
            Some(Host::Ipv6(address)) => address.to_string(),
            _ => return Err(wrong("the URL names no host")),
        };
        if url.fragment().is_some() {
            return Err(wrong("the URL has a `#fragment`, which has no meaning here")
                .remedy("percent-encode a `#` in the password as `%23`; certificates are always verified, a private authority goes into `?ca=/path.pem`"));
        }
        let mut login = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_lib_name("lock-runtime", env!("CARGO_PKG_VERSION"));
        if !url.username().is_empty() {
            login = login.set_username(decoded(url.username())?);
        }
        if let Some(password) = url.password() {
            login = login.set_password(decoded(password)?);
        }
        match url.path().trim_matches('/') {
            "" => {}
            rest if rest.contains('@') => return Err(broken_password("/", "%2F")),
            database => {
                let database = database.parse::<u16>().map_err(|_| {
                    wrong(format!("`/{database}` in the URL is not a database number"))
                })?;
                login = login.set_db(i64::from(database));
            }
        }
        let (tls, scripts) = query(&url)?;
        let replicas = replicas(&url)?;
        let connect_timeout = connect_timeout(&url)?;
        let port = url.port().unwrap_or(DEFAULT_PORT);
        Ok(Self { host, port, tls, login, scripts, replicas, connect_timeout })
    }
}

impl Endpoint {
    /// An error if the URL asks for replicas where nobody would wait for them.
    pub(super) fn wants_no_replicas(&self, kind: &str) -> Result<(), LockError> {
        if self.replicas == 0 {
            return Ok(());
        }
        Err(wrong(format!("`?replicas=` has no meaning for {kind}"))
            .remedy("it is for `redis://` and `redis+sentinel://`; leave it out"))
    }
}

fn replicas(url: &Url) -> Result<u16, LockError> {
    let wanted = url.query_pairs().find(|(name, _)| name == REPLICAS);
    wanted.map_or(Ok(0), |(_, count)| {
        count.parse().map_err(|_| {
            wrong("`?replicas=` in the URL is not a number").remedy(
                "write for example `?replicas=1`: a lock is granted when one replica has it",
            )
        })
    })
}

fn connect_timeout(url: &Url) -> Result<Option<Duration>, LockError> {
    let Some((_, text)) = url.query_pairs().find(|(name, _)| name == CONNECT_TIMEOUT) else {
        return Ok(None);
    };
    let limit = duration(&text).filter(|limit| !limit.is_zero());
    limit.map(Some).ok_or_else(|| {
        wrong("`?connect_timeout=` in the URL is not a time")
            .remedy("write for example `?connect_timeout=10s` or `?connect_timeout=2500ms`")
    })
}

/// A whole number of `ms`, `s` or `m`.
fn duration(text: &str) -> Option<Duration> {
    let unit = text.find(|character: char| !character.is_ascii_digit())?;
    let (number, unit) = text.split_at(unit);
    let number: u64 = number.parse().ok()?;
    match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "m" => number.checked_mul(60).map(Duration::from_secs),
        _ => None,
    }
}

/// What else stands behind the `?`.
fn query(url: &Url) -> Result<(Option<TlsFiles>, Scripts), LockError> {
    let encrypted = url.scheme() == "rediss";
    let (mut files, mut scripts) = (TlsFiles::default(), Scripts::default());
    if url.query().is_some_and(|query| query.contains('@')) {
        return Err(broken_password("?", "%3F"));
    }
    for (name, value) in url.query_pairs() {
        let file = match &*name {
            "ca" => &mut files.ca,
            "cert" => &mut files.cert,
            "key" => &mut files.key,
            "scripts" => {
                scripts = match &*value {
                    "auto" => Scripts::Auto,
                    "on" => Scripts::On,
                    "off" => Scripts::Off,
                    _ => {
                        return Err(wrong("`?scripts=` in the URL has no such value")
                            .remedy("write `?scripts=auto`, `?scripts=on` or `?scripts=off`"));
                    }
                };
                continue;
            }
            REPLICAS | CONNECT_TIMEOUT => continue,
            _ => {
                return Err(wrong(format!("`?{name}=` in the URL is not known"))
                    .remedy("known are `scripts`, `replicas` and `connect_timeout`, and for `rediss://` `ca`, `cert` and `key`; ttl, wait and prefix are set on `LockPool::builder(url)`"));
            }
        };
        if !encrypted {
            return Err(wrong(format!("`?{name}=` is for TLS"))
                .remedy("write `rediss://` instead of `redis://`"));
        }
        *file = Some(value.into_owned());
    }
    if files.cert.is_some() != files.key.is_some() {
        return Err(wrong("a client certificate needs both `?cert=` and `&key=`")
            .remedy("write `rediss://host:6379?cert=/path.pem&key=/path.key`"));
    }
    Ok((encrypted.then_some(files), scripts))
}

pub(super) fn decoded(part: &str) -> Result<String, LockError> {
    let text = percent_decode_str(part).decode_utf8();
    text.map(Into::into)
        .map_err(|_| wrong("user or password in the URL is not percent-encoded UTF-8"))
}

/// What follows is perhaps the rest of a password, and not to be shown.
#[cold]
pub(super) fn broken_password(character: &str, encoded: &str) -> LockError {
    wrong(format!("there is an `@` behind the first `{character}` of the URL"))
        .remedy(format!("percent-encode a `{character}` in the password as `{encoded}`"))
}

#[cold]
pub(super) fn wrong(cause: impl Into<String>) -> LockError {
    LockError::new(ErrorKind::Config, cause.into())
        .remedy("write `redis://user:password@host:6379/0`; user, password, port and database may be left out")
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bracketed = self.host.contains(':');
        if bracketed {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_taken_apart() {
        let endpoint = Endpoint::parse("redis://worker:p%40ss@[::1]:7000/3").unwrap();
        assert_eq!((endpoint.host.as_str(), endpoint.port), ("::1", 7000));
        assert_eq!(endpoint.login.username(), Some("worker"));
        assert_eq!(endpoint.login.password(), Some("p@ss"));
        assert_eq!(endpoint.login.db(), 3);
        assert_eq!(endpoint.to_string(), "[::1]:7000");
        let plain = Endpoint::parse("redis://host").unwrap();
        assert_eq!((plain.port, plain.replicas), (6379, 0));
        assert_eq!(Endpoint::parse("redis://host?replicas=2").unwrap().replicas, 2);
        assert_eq!(plain.connect_timeout, None);
        for (text, millis) in [("2500ms", 2_500), ("10s", 10_000), ("1m", 60_000)] {
            let url = format!("redis://host?connect_timeout={text}");
            let limit = Endpoint::parse(&url).unwrap().connect_timeout;
            assert_eq!(limit, Some(Duration::from_millis(millis)));
        }
        for (query, scripts) in
            [("", Scripts::Auto), ("?scripts=on", Scripts::On), ("?scripts=off", Scripts::Off)]
        {
            let endpoint = Endpoint::parse(&format!("redis://host{query}")).unwrap();
            assert_eq!(endpoint.scripts, scripts);
        }
    }

    #[test]
    fn a_wrong_url_is_a_config_error_without_the_password() {
        for url in [
            "redis://",
            "redis://:c4n4ry@host:port",
            "redis://:c4n4ry@host:6379/orders",
            "redis://:c4n4ry@host:99999",
            "redis://:c4n4ry@host?ttl=5s",
            "redis://:c4n4ry@host?ca=/x.pem",
            "redis://:c4n4ry@host?scripts=c4n4ry",
            "redis://:c4n4ry@host?replicas=-1",
            "redis://:c4n4ry@host?replicas=",
            "redis://:c4n4ry@host?connect_timeout=5",
            "redis://:c4n4ry@host?connect_timeout=0s",
            "redis://:c4n4ry@host?connect_timeout=s",
            "redis://:c4n4ry@host?connect_timeout=99999999999999999999s",
            "redis://:c4n4ry@host?connect_timeout=307445734561825861m",
            "redis://:c4n4ry@host#insecure",
            "rediss://:c4n4ry@host?cert=/x.pem",
            "redis://:c4n4ry%ff@host",
            "redis://worker:1/c4n4ry@host",
            "redis://worker:1?c4n4ry@host",
            "redis://worker:1?c4n4ry=@host",
            "redis://worker:1#c4n4ry@host",
        ] {
            let error = Endpoint::parse(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
            assert!(!format!("{error} {error:?}").contains("c4n4ry"), "{error}");
        }
    }
}
