//! `redis://` URLs.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use redis::{ProtocolVersion, RedisConnectionInfo};
use url::{Host, Url};

use crate::backend::BackendConfig;
use crate::backend::Warning;
use crate::backend::credentials::{Provider, beside_password};
use crate::backend::tls_files::{TlsFiles, Trust};
use crate::base::error::{ErrorKind, LockError};
use crate::base::text;

const DEFAULT_PORT: u16 = 6379;

const REPLICAS: &str = "replicas";

const CONNECT_TIMEOUT: &str = "connect_timeout";

/// What `CLIENT LIST` says about a connection.
pub(crate) const LIBRARY: &str = "lock-runtime";
pub(crate) const LIBRARY_VERSION: &str = env!("CARGO_PKG_VERSION");

const DATABASE: &str = "db";

const INSECURE: &str = "insecure";

/// The Redis scheme for `scheme`, which may be a scheme of Valkey, or `unix`.
pub(crate) fn scheme_of_redis(scheme: &str) -> Cow<'_, str> {
    match scheme.strip_prefix("valkey") {
        Some(rest) => ["redis", rest].concat().into(),
        None if scheme == "unix" => "redis+unix".into(),
        None => scheme.into(),
    }
}

/// The log-in of a `user` with this `password`, where the server wants them.
pub(crate) fn login_of(user: Option<String>, password: Option<String>) -> RedisConnectionInfo {
    let login = RedisConnectionInfo::default()
        .set_protocol(ProtocolVersion::RESP3)
        .set_lib_name(LIBRARY, LIBRARY_VERSION);
    with_user(login, user, password)
}

/// `login` with `user` and `password` in place of its own.
fn with_user(
    mut login: RedisConnectionInfo,
    user: Option<String>,
    password: Option<String>,
) -> RedisConnectionInfo {
    if let Some(user) = user {
        login = login.set_username(user);
    }
    if let Some(password) = password {
        login = login.set_password(password);
    }
    login
}

/// One server, and the log-in there. `Display` shows neither user nor password.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// A Unix socket instead of host and port.
    pub(crate) socket: Option<PathBuf>,
    pub(crate) tls: Option<TlsFiles>,
    pub(crate) login: RedisConnectionInfo,
    /// Provides user and password at each log-in.
    pub(crate) credentials: Option<Provider>,
    pub(crate) scripts: ScriptMode,
    /// How many replicas have to confirm a grant before it counts.
    pub(crate) replicas: u16,
    /// The time limit for connecting; `None` for that of the pool.
    pub(crate) connect_timeout: Option<Duration>,
}

/// Whether locks are kept by Lua scripts: `?scripts=`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ScriptMode {
    /// If the server runs scripts.
    #[default]
    Auto,
    /// A server that runs no scripts is an error.
    On,
    /// No script is sent; locks are kept by plain commands.
    Off,
}

impl Endpoint {
    pub(crate) fn parse(text: &str) -> Result<Self, LockError> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(wrong("the URL has no scheme"));
        };
        match &*scheme_of_redis(scheme) {
            "redis+unix" => Self::of_socket(rest),
            scheme => Self::of_host(&format!("{scheme}://{rest}")),
        }
    }

    /// `[user:password@]/path[?db=..]`, the form of redis-rs, redis-py and go-redis. The latter two also accept the
    /// login as query parameters.
    fn of_socket(rest: &str) -> Result<Self, LockError> {
        const FORM: &str = "write `redis+unix:///run/redis.sock?db=0`, with `user:password@` in front of the path where the server wants them";
        if rest.contains('#') {
            return Err(wrong("the URL has a `#fragment`, which has no meaning here")
                .remedy("percent-encode a `#` as `%23`"));
        }
        let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = match before.find('/') {
            Some(at) => before.split_at(at),
            None => (before, ""),
        };
        let path = decoded(path)?;
        if path.len() < 2 || path.contains('@') {
            return Err(wrong("the URL names no path of a socket").remedy(FORM));
        }
        if !(authority.is_empty() || authority.ends_with('@')) {
            return Err(wrong("the URL names a host in front of the path of a socket").remedy(FORM));
        }
        let (mut user, mut password, mut others) = (None, None, Vec::new());
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                // A `+` stands for itself, as in the other places of a password.
                Some(("user" | "username", name)) => user = Some(decoded(name)?),
                Some(("pass" | "password", secret)) => password = Some(decoded(secret)?),
                _ => others.push(pair),
            }
        }
        let plain = format!("redis://{authority}localhost?{}", others.join("&"));
        let mut endpoint = Self::of_host(&plain)?;
        endpoint.socket = Some(path.into());
        endpoint.login = with_user(endpoint.login, user, password);
        if cfg!(not(unix)) {
            return Err(
                wrong("this system has no Unix sockets").remedy("write `redis://host:6379`")
            );
        }
        Ok(endpoint)
    }

    fn of_host(text: &str) -> Result<Self, LockError> {
        // A list of hosts may be valid, as a name with commas.
        if names_several_hosts(text) {
            return Err(wrong("the URL names several hosts").remedy(
                "write `redis+cluster://host1,host2` for a Redis Cluster, `redis+sentinel://host1,host2/service` for Sentinel, or `redlock://host1,host2,host3` for a quorum of independent servers",
            ));
        }
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
                .remedy("percent-encode a `#` in the password as `%23`; a private authority goes into `?ca=/path.pem`, and `?insecure` accepts any certificate"));
        }
        let user = Some(url.username()).filter(|user| !user.is_empty());
        let user = user.map(decoded).transpose()?;
        let password = url.password().map(decoded).transpose()?;
        let mut login = login_of(user, password);
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
        if let Some((_, text)) = url.query_pairs().find(|(name, _)| name == DATABASE) {
            let database = text.parse::<u16>().ok().map(i64::from);
            let in_path = (login.db() != 0).then(|| login.db());
            match database {
                Some(database) if in_path.is_none_or(|it| it == database) => {
                    login = login.set_db(database);
                }
                _ => {
                    return Err(wrong(
                        "`?db=` in the URL is not a database number, or not that of the path",
                    )
                    .remedy("write `redis://host:6379?db=3` or `redis://host:6379/3`"));
                }
            }
        }
        let (tls, scripts) = query(&url)?;
        let replicas = replicas(&url)?;
        let connect_timeout = connect_timeout(&url)?;
        let port = url.port().unwrap_or(DEFAULT_PORT);
        let (socket, credentials) = (None, None);
        Ok(Self { host, port, socket, tls, login, credentials, scripts, replicas, connect_timeout })
    }

    /// With the pool's provider of credentials, if there is one.
    pub(crate) fn of_pool(self, config: BackendConfig<'_>) -> Result<Self, LockError> {
        self.with_credentials(config.credentials)
    }

    /// With `provider` in place of the URL's password.
    pub(crate) fn with_credentials(self, provider: Option<&Provider>) -> Result<Self, LockError> {
        let credentials = beside_password(provider, self.login.password().is_some())?;
        Ok(Self { credentials, ..self })
    }

    /// A weakness of working connections to the server.
    pub(crate) fn warning(&self) -> Option<Warning> {
        let files = self.tls.as_ref().filter(|files| files.trust == Trust::Any);
        files.map(|_| {
            Warning::new(
                format!(
                    "the certificate of Redis at {self} is not verified (`?insecure`): a host in between can read the password and impersonate the server"
                ),
                "name the certificate or its authority by `?ca=/path.pem`, and leave `?insecure` out of the URL",
            )
        })
    }
}

impl Endpoint {
    /// An error if the URL has `?replicas=`, for a `kind` of store that does not wait for replicas.
    pub(crate) fn reject_replicas(&self, kind: &str) -> Result<(), LockError> {
        if self.replicas == 0 {
            return Ok(());
        }
        Err(wrong(format!("`?replicas=` has no meaning for {kind}"))
            .remedy("it is for `redis://` and `redis+sentinel://`; leave it out"))
    }

    /// An error if the URL has `?scripts=off`, for a `kind` of store that needs scripts.
    pub(crate) fn reject_scripts_off(&self, kind: &str) -> Result<(), LockError> {
        if self.scripts != ScriptMode::Off {
            return Ok(());
        }
        Err(wrong(format!("`?scripts=off` has no meaning for {kind}"))
            .remedy("it is for a single server; leave it out"))
    }
}

fn names_several_hosts(text: &str) -> bool {
    let (_, rest) = text.split_once("://").unwrap_or_default();
    let (login, hosts) = rest.rsplit_once('@').unwrap_or(("", rest));
    let hosts = hosts.split(['/', '?']).next().unwrap_or_default();
    // A `/` or `?` in front of an `@` is an error of its own.
    hosts.contains(',') && !login.contains(['/', '?'])
}

fn replicas(url: &Url) -> Result<u16, LockError> {
    let wanted = url.query_pairs().find(|(name, _)| name == REPLICAS);
    wanted.map_or(Ok(0), |(_, count)| {
        count.parse().map_err(|_| {
            wrong("`?replicas=` in the URL is not a number").remedy(
                "write for example `?replicas=1`: a lock is granted when one replica has confirmed it",
            )
        })
    })
}

fn connect_timeout(url: &Url) -> Result<Option<Duration>, LockError> {
    let Some((_, value)) = url.query_pairs().find(|(name, _)| name == CONNECT_TIMEOUT) else {
        return Ok(None);
    };
    let limit = text::duration(&value).filter(|limit| !limit.is_zero());
    limit.map(Some).ok_or_else(|| {
        wrong("`?connect_timeout=` in the URL is not a time")
            .remedy("write for example `?connect_timeout=10s` or `?connect_timeout=2500ms`")
    })
}

/// The TLS and script parameters of the query.
fn query(url: &Url) -> Result<(Option<TlsFiles>, ScriptMode), LockError> {
    let encrypted = url.scheme() == "rediss";
    let (mut files, mut scripts) = (TlsFiles::default(), ScriptMode::default());
    let mut trust = Trust::Verified;
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
                    "auto" => ScriptMode::Auto,
                    "on" => ScriptMode::On,
                    "off" => ScriptMode::Off,
                    _ => {
                        return Err(wrong("`?scripts=` in the URL has an unknown value")
                            .remedy("write `?scripts=auto`, `?scripts=on` or `?scripts=off`"));
                    }
                };
                continue;
            }
            INSECURE => {
                trust = match &*value {
                    "" | "true" => Trust::Any,
                    "false" => Trust::Verified,
                    _ => {
                        return Err(wrong("`?insecure=` in the URL has an unknown value")
                            .remedy("write `?insecure`, or better `?ca=/path.pem`"));
                    }
                };
                if !encrypted {
                    return Err(wrong("`?insecure` is for TLS")
                        .remedy("leave it out, or write `rediss://` instead of `redis://`"));
                }
                continue;
            }
            REPLICAS | CONNECT_TIMEOUT | DATABASE => continue,
            _ => {
                return Err(wrong(format!("`?{name}=` in the URL is not known"))
                    .remedy("known are `db`, `scripts`, `replicas` and `connect_timeout`, for `rediss://` `ca`, `cert`, `key` and `insecure`, and for sentinels `sentinel_user` and `sentinel_password`; ttl, wait and prefix are set on `LockPool::builder(url)`"));
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
    if trust == Trust::Any && files.ca.is_some() {
        return Err(wrong(
            "`?insecure` accepts any certificate, and `?ca=` only those of an authority",
        )
        .remedy("leave `?insecure` out"));
    }
    files.trust = trust;
    Ok((encrypted.then_some(files), scripts))
}

pub(crate) fn decoded(part: &str) -> Result<String, LockError> {
    let text = percent_decode_str(part).decode_utf8();
    text.map(Into::into)
        .map_err(|_| wrong("user or password in the URL is not percent-encoded UTF-8"))
}

/// The text after `character` is not shown: it may be the rest of a password.
#[cold]
pub(crate) fn broken_password(character: &str, encoded: &str) -> LockError {
    wrong(format!("there is an `@` after the first `{character}` of the URL"))
        .remedy(format!("percent-encode a `{character}` in the password as `{encoded}`"))
}

#[cold]
pub(crate) fn wrong(cause: impl Into<String>) -> LockError {
    LockError::new(ErrorKind::Config, cause.into())
        .remedy("write `redis://user:password@host:6379/0`; user, password, port and database may be left out")
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.socket {
            return write!(f, "{}", path.display());
        }
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
    fn the_parts_of_a_url_are_parsed() {
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
        for (query, scripts) in [
            ("", ScriptMode::Auto),
            ("?scripts=on", ScriptMode::On),
            ("?scripts=off", ScriptMode::Off),
        ] {
            let endpoint = Endpoint::parse(&format!("redis://host{query}")).unwrap();
            assert_eq!(endpoint.scripts, scripts);
        }
    }

    #[test]
    fn several_hosts_are_no_single_server() {
        for url in ["redis://h1:6379,h2:6379", "redis://u:p@h1,h2/0", "valkey://h1,h2?db=1"] {
            let error = Endpoint::parse(url).unwrap_err().to_string();
            assert!(
                error.contains("several hosts; write `redis+cluster://host1,host2`"),
                "{error}"
            );
        }
        for url in ["redis://u:a,b@h1", "redis://h1/0?ca=a,b"] {
            let error = Endpoint::parse(url).err().map(|error| error.to_string());
            assert!(!error.is_some_and(|error| error.contains("several hosts")), "{url}");
        }
    }

    #[test]
    fn a_server_has_several_forms_of_url() {
        let parse = |url: &str| Endpoint::parse(url).unwrap();
        for (url, database) in [
            ("redis://host?db=3", 3),
            ("redis://host/3?db=3", 3),
            ("redis://host/0", 0),
            ("valkey://host/2", 2),
            ("valkeys://host?insecure", 0),
            ("rediss://host?insecure=false&ca=/x.pem", 0),
        ] {
            let endpoint = parse(url);
            assert_eq!((endpoint.login.db(), &*endpoint.host), (database, "host"), "{url}");
        }
        assert!(parse("valkey://host").tls.is_none() && parse("valkeys://host").tls.is_some());
        assert!(parse("rediss://host").warning().is_none());
        assert!(parse("rediss://host?insecure").warning().is_some());
        for (url, user, password, database) in [
            ("redis+unix:///run/redis.sock", None, None, 0),
            ("unix:///run/redis.sock?db=4", None, None, 4),
            ("valkey+unix://worker:p%40ss@/run/redis.sock", Some("worker"), Some("p@ss"), 0),
            ("unix:///run/redis.sock?user=worker&pass=a+b&db=1", Some("worker"), Some("a+b"), 1),
            ("unix:///run/redis.sock?password=pw", None, Some("pw"), 0),
        ] {
            let Endpoint { socket, login, tls, .. } = parse(url);
            assert_eq!(socket.unwrap().to_str(), Some("/run/redis.sock"), "{url}");
            let got = (login.username(), login.password(), login.db());
            assert_eq!(got, (user, password, database), "{url}");
            assert!(tls.is_none());
        }
        assert_eq!(parse("unix:///run/redis.sock").to_string(), "/run/redis.sock");
    }

    #[test]
    fn a_wrong_url_is_a_config_error_without_the_password() {
        for url in [
            "redis://:c4n4ry@host/1?db=2",
            "redis://:c4n4ry@host?db=-1",
            "redis://:c4n4ry@host?insecure",
            "rediss://:c4n4ry@host?insecure=c4n4ry",
            "rediss://:c4n4ry@host?insecure&ca=/x.pem",
            "redis+unix://",
            "redis+unix:///",
            "unix://c4n4ry/path",
            "unix://:c4n4ry@/path#x",
            "unix:///path?pass=c4n4ry&ca=/x.pem",
            "unix://worker:1/c4n4ry@/path",
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
