//! `postgres://` URLs.

use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::TargetSessionAttrs;

use crate::backend::sql::encryption::tls_of_url;
use crate::backend::sql::tables::{FORGET_AFTER, InfoColumn, Pins, TableNames, is_identifier};
use crate::backend::tls_files::{TlsFiles, Trust};
use crate::base::error::{ErrorKind, LockError};
use crate::base::text;

/// How long a connection is idle before the system checks it.
const KEEPALIVE: Duration = Duration::from_secs(10);

const PIN: &str = "write `?pin=on` in the URLs of all processes, for `guard.pin_sql()` in transactions of your own";

const FORM: &str = "write `postgres://user:password@host:5432/database`, with several hosts for a primary that moves: `postgres://host1,host2/database`";

/// A database, and how its tables are used.
#[derive(Clone, Debug)]
pub(crate) struct Database {
    /// Where to connect: each of the hosts. `Debug` does not show the password.
    pub(crate) servers: Vec<Config>,
    /// What stands before `_lease` and `_queue` in the names of the tables: `?table=`.
    pub(crate) table: String,
    /// Whether missing tables are made: `?create=on`.
    pub(crate) creates: bool,
    /// Whether grants are written for pins: `?pin=on`.
    pub(crate) pins: Pins,
    /// How long rows of free locks stay: `?forget=`.
    pub(crate) forget_after: Duration,
    /// With `sslmode=require`.
    pub(crate) tls: Option<TlsFiles>,
}

impl Database {
    /// The names of the tables.
    pub(crate) fn names(&self) -> TableNames<'_> {
        let info = InfoColumn::Named;
        TableNames { prefix: &self.table, quote: '"', pins: self.pins, info }
    }

    pub(crate) fn parse(url: &str) -> Result<Self, LockError> {
        let (address, query) = url.split_once('?').unwrap_or((url, ""));
        if query.contains('@') && !address.contains('@') {
            // The text is not shown: it may be a part of the password.
            return Err(wrong("a `?` stands in front of the `@`".to_owned())
                .remedy("write `%3F` for a `?`, and `%40` for an `@`, in a user or a password"));
        }
        let (mut table, mut creates, mut forget_after) = ("lock".to_owned(), false, FORGET_AFTER);
        let (mut pins, mut connect_timeout) = (Pins::Off, None);
        let (mut others, mut files, mut encrypted) = (Vec::new(), TlsFiles::default(), false);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "table" if is_identifier(value) => table = value.to_owned(),
                "table" => {
                    return Err(wrong(format!("`table={value}` is not a valid table name")).remedy(
                        "write up to 48 letters, digits and `_`, with a schema if needed: `?table=app.lock` uses `app.lock_lease` and `app.lock_queue`",
                    ));
                }
                "create" => {
                    creates = match value {
                        "on" => true,
                        "off" => false,
                        _ => {
                            return Err(wrong(format!("`create={value}` is neither on nor off"))
                                .remedy("write `?create=on` to make missing tables at the start"));
                        }
                    };
                }
                "pin" => {
                    pins = Pins::parse(value).ok_or_else(|| {
                        wrong(format!("`pin={value}` is neither on nor off")).remedy(PIN)
                    })?;
                }
                "forget" => {
                    let given = text::duration(value).filter(|age| !age.is_zero());
                    forget_after = given.ok_or_else(|| {
                        wrong(format!("`forget={value}` is not a duration"))
                            .remedy("write for example `?forget=24h`, longer than every ttl")
                    })?;
                }
                "ca" => files.ca = Some(decoded(value)?),
                "cert" => files.cert = Some(decoded(value)?),
                "key" => files.key = Some(decoded(value)?),
                "insecure" if matches!(value, "" | "true") => files.trust = Trust::Any,
                "insecure" => {
                    return Err(wrong("`insecure` in the PostgreSQL URL has an unknown value")
                        .remedy("write `?sslmode=require&insecure`, or better `?sslmode=require&ca=/path.pem`"));
                }
                // All certificates are verified, including the name.
                "sslmode" if ["require", "verify-ca", "verify-full"].contains(&value) => {
                    encrypted = true;
                    others.push("sslmode=require");
                }
                "sslmode" if ["prefer", "allow"].contains(&value) => {
                    return Err(wrong(format!("`sslmode={value}` does not guarantee encryption"))
                        .remedy("write `sslmode=require`, or `sslmode=disable`"));
                }
                "sslmode" if value == "disable" => encrypted = false,
                // The client takes only whole seconds.
                "connect_timeout" if !value.bytes().all(|it| it.is_ascii_digit()) => {
                    let given = text::duration(value).filter(|limit| !limit.is_zero());
                    connect_timeout = Some(given.ok_or_else(|| {
                        wrong(format!("`connect_timeout={value}` is not a duration")).remedy(
                            "write for example `?connect_timeout=10s`, or a number of seconds",
                        )
                    })?);
                }
                _ => others.push(pair),
            }
        }
        let feature = ("postgres-tls", cfg!(feature = "postgres-tls"));
        let tls = tls_of_url(files, encrypted, "sslmode=require", feature)?;
        if !encrypted {
            others.push("sslmode=disable");
        }
        let others = others.join("&");
        let servers =
            each_host(address).into_iter().map(|address| server(&format!("{address}?{others}")));
        let mut servers = servers.collect::<Result<Vec<_>, _>>()?;
        for (server, limit) in servers.iter_mut().zip(connect_timeout.iter().cycle()) {
            server.connect_timeout(*limit);
        }
        Ok(Self { servers, table, creates, pins, forget_after, tls })
    }

    pub(crate) fn has_password(&self) -> bool {
        let password = self.servers.first().and_then(|server| server.get_password());
        password.is_some_and(|password| !password.is_empty())
    }

    /// The time limit for connecting in the URL.
    pub(crate) fn connect_timeout(&self) -> Option<Duration> {
        self.servers.first()?.get_connect_timeout().copied()
    }
}

fn decoded(value: &str) -> Result<String, LockError> {
    let text = percent_encoding::percent_decode_str(value).decode_utf8();
    text.map(Into::into).map_err(|_| wrong("a value in the PostgreSQL URL is not UTF-8"))
}

/// One URL for each host, without parameters.
fn each_host(address: &str) -> Vec<String> {
    let Some((scheme, rest)) = address.split_once("://") else { return vec![address.to_owned()] };
    let (authority, path) = match rest.find('/') {
        Some(at) => rest.split_at(at),
        None => (rest, ""),
    };
    let (login, hosts) = match authority.rfind('@') {
        Some(at) => authority.split_at(at + 1),
        None => ("", authority),
    };
    hosts.split(',').map(|host| format!("{scheme}://{login}{host}{path}")).collect()
}

/// The settings of connections to the server at `address`.
fn server(address: &str) -> Result<Config, LockError> {
    let mut config: Config = address.parse().map_err(|error: tokio_postgres::Error| {
        // The text of the client library has no part of the URL except a parameter's name.
        let source = std::error::Error::source(&error).map(ToString::to_string);
        let cause = source.unwrap_or_else(|| error.to_string());
        wrong(format!("the PostgreSQL URL is invalid: {cause}")).remedy(FORM)
    })?;
    if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
        return Err(wrong("the PostgreSQL URL names no host").remedy(FORM));
    }
    if config.get_application_name().is_none() {
        config.application_name("lock_runtime");
    }
    if config.get_target_session_attrs() == TargetSessionAttrs::Any {
        config.target_session_attrs(TargetSessionAttrs::ReadWrite);
    }
    // A connection that a firewall has dropped ends in silence.
    if config.get_keepalives_idle() == Config::new().get_keepalives_idle() {
        config.keepalives_idle(KEEPALIVE);
    }
    if config.get_keepalives_interval().is_none() {
        config.keepalives_interval(KEEPALIVE / 2);
    }
    if config.get_keepalives_retries().is_none() {
        config.keepalives_retries(3);
    }
    if config.get_tcp_user_timeout().is_none() {
        config.tcp_user_timeout(3 * KEEPALIVE);
    }
    Ok(config)
}

#[cold]
fn wrong(cause: impl Into<std::borrow::Cow<'static, str>>) -> LockError {
    LockError::new(ErrorKind::Config, cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_the_store_and_of_the_client_stand_together() {
        let url = "postgres://u:p%40ss@h1:5433,h2/db?create=on&table=app.lock&forget=24h&connect_timeout=3";
        let database = Database::parse(url).unwrap();
        assert_eq!(database.table, "app.lock");
        assert!(database.creates);
        assert_eq!(database.forget_after, Duration::from_secs(24 * 60 * 60));
        let ports: Vec<_> = database.servers.iter().map(|it| it.get_ports().to_vec()).collect();
        assert_eq!(ports, [[5433], [5432]]);
        for server in &database.servers {
            assert_eq!(server.get_hosts().len(), 1);
            assert_eq!(server.get_dbname(), Some("db"));
            assert_eq!(server.get_password(), Some("p@ss".as_bytes()));
            assert_eq!(server.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
        }
        assert_eq!(database.connect_timeout(), Some(Duration::from_secs(3)));
        let database = Database::parse("postgres://h1,h2/db?connect_timeout=2500ms").unwrap();
        assert_eq!(database.connect_timeout(), Some(Duration::from_millis(2_500)));
        assert!(!format!("{database:?}").contains("p@ss"));
    }

    #[test]
    fn an_invalid_url_is_refused_without_its_password() {
        for (url, expected) in [
            ("postgres://u:secret@h/db?table=Lock", "table"),
            ("postgres://u:secret@h/db?table=a.b.c", "table"),
            ("postgres://u:secret@h/db?table=x;drop", "table"),
            ("postgres://u:secret@h/db?create=yes", "create"),
            ("postgres://u:secret@h/db?forget=0s", "forget"),
            ("postgres://u:secret@h/db?connect_timeout=5x", "connect_timeout"),
            ("postgres://u:secret@h/db?pin=yes", "?pin=on"),
            ("postgres://u:secret@h/db?sslmode=sometimes", "sslmode"),
            ("postgres://u:secret@h/db?nonsense=1", "nonsense"),
            ("postgres://u:secret@h/db?ca=/a.pem", "sslmode=require"),
            ("postgres://u:secret@h/db?sslmode=prefer", "sslmode=require"),
            ("postgres://u:secret@h/db?sslmode=require&insecure=false", "insecure"),
            ("postgres://u:secret@h/db?sslmode=require&cert=/a.pem", "key"),
            ("postgres://u:secret@h:x/db", "port"),
            ("postgres://u:?secret@h/db", "%3F"),
            ("postgres://u:12?secret@h/db", "%3F"),
            ("postgres:///db", "host"),
        ] {
            let error = Database::parse(url).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("secret"), "{url}: {error}");
        }
    }
}
