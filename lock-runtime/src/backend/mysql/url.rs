//! `mysql://` URLs.

use std::time::Duration;

use crate::backend::sql::encryption::tls_of_url;
use crate::backend::sql::tables::{FORGET_AFTER, InfoColumn, Pins, TableNames, is_identifier};
use crate::backend::tls_files::{TlsFiles, Trust};
use crate::base::error::{ErrorKind, LockError};
use crate::base::text;

const PIN: &str = "write `?pin=on` in the URLs of all processes, for `guard.pin_sql()` in transactions of your own";

const FORM: &str = "write `mysql://user:password@host:3306/database`, with several hosts for a primary that moves: `mysql://host1,host2/database`";

const PORT: u16 = 3306;

/// A server of a URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MysqlHost {
    pub(crate) name: String,
    pub(crate) port: u16,
}

impl MysqlHost {
    fn parse(text: &str) -> Option<Self> {
        let (name, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (name, port) = rest.split_once(']')?;
                (name, port.strip_prefix(':').or(port.is_empty().then_some(""))?)
            }
            None => text.split_once(':').unwrap_or((text, "")),
        };
        let port = if port.is_empty() { PORT } else { port.parse().ok()? };
        (!name.is_empty() && port != 0).then(|| Self { name: name.to_owned(), port })
    }
}

/// A database, and how its tables are used.
#[derive(Clone)]
pub(crate) struct MysqlUrl {
    pub(crate) hosts: Vec<MysqlHost>,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: Option<String>,
    /// What stands before `_lease` and `_queue` in the names of the tables: `?table=`.
    pub(crate) table: String,
    /// Whether missing tables are made: `?create=on`.
    pub(crate) creates: bool,
    /// Whether grants are written for pins: `?pin=on`.
    pub(crate) pins: Pins,
    /// How long rows of free locks stay: `?forget=`.
    pub(crate) forget_after: Duration,
    pub(crate) connect_timeout: Option<Duration>,
    /// With `ssl-mode=required`.
    pub(crate) tls: Option<TlsFiles>,
}

impl MysqlUrl {
    pub(crate) fn has_password(&self) -> bool {
        self.password.as_ref().is_some_and(|password| !password.is_empty())
    }

    /// The names of the tables.
    pub(crate) fn names(&self) -> TableNames<'_> {
        let info = InfoColumn::Named;
        TableNames { prefix: &self.table, quote: '`', pins: self.pins, info }
    }

    pub(crate) fn parse(url: &str) -> Result<Self, LockError> {
        let (address, query) = url.split_once('?').unwrap_or((url, ""));
        if query.contains('@') && !address.contains('@') {
            // The text is not shown: it may be a part of the password.
            return Err(wrong("a `?` stands in front of the `@`".to_owned())
                .remedy("write `%3F` for a `?`, and `%40` for an `@`, in a user or a password"));
        }
        let mut parsed = Self::of_address(address)?;
        let (mut files, mut encrypted) = (TlsFiles::default(), false);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "ca" => files.ca = Some(decoded(value)?),
                "cert" => files.cert = Some(decoded(value)?),
                "key" => files.key = Some(decoded(value)?),
                "insecure" if matches!(value, "" | "true") => files.trust = Trust::Any,
                "insecure" => {
                    return Err(wrong("`insecure` in the MySQL URL has an unknown value").remedy(
                        "write `?ssl-mode=required&insecure`, or better `?ssl-mode=required&ca=/path.pem`",
                    ));
                }
                "ssl-mode" | "sslmode" => encrypted = is_encrypted(value)?,
                _ => parsed.set(name, value)?,
            }
        }
        parsed.tls = tls_of_url(
            files,
            encrypted,
            "ssl-mode=required",
            ("mysql-tls", cfg!(feature = "mysql-tls")),
        )?;
        let names_schema = parsed.database.is_some() || parsed.table.contains('.');
        if !names_schema {
            return Err(wrong("the MySQL URL names no database").remedy(FORM));
        }
        Ok(parsed)
    }

    fn of_address(address: &str) -> Result<Self, LockError> {
        let rest = address.split_once("://").map_or(address, |(_, rest)| rest);
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let (user, password) = match login.map(|login| login.split_once(':')) {
            Some(Some((user, password))) => (Some(user), Some(password)),
            Some(None) => (login, None),
            None => (None, None),
        };
        let parsed: Option<Vec<_>> = hosts.split(',').map(MysqlHost::parse).collect();
        let hosts = parsed
            .ok_or_else(|| wrong("a host or port in the MySQL URL is invalid").remedy(FORM))?;
        let decoded =
            |text: Option<&str>| text.filter(|text| !text.is_empty()).map(decoded).transpose();
        Ok(Self {
            hosts,
            user: decoded(user)?,
            password: decoded(password)?,
            database: decoded(Some(path))?,
            table: "lock".to_owned(),
            creates: false,
            pins: Pins::Off,
            forget_after: FORGET_AFTER,
            connect_timeout: None,
            tls: None,
        })
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), LockError> {
        match name {
            "table" if is_identifier(value) => self.table = value.to_owned(),
            "table" => {
                return Err(wrong(format!("`table={value}` is not a valid table name")).remedy(
                    "write up to 48 letters, digits and `_`, with a database if needed: `?table=app.lock` uses `app.lock_lease` and `app.lock_queue`",
                ));
            }
            "create" => {
                self.creates = match value {
                    "on" => true,
                    "off" => false,
                    _ => {
                        return Err(wrong(format!("`create={value}` is neither on nor off"))
                            .remedy("write `?create=on` to make missing tables at the start"));
                    }
                };
            }
            "pin" => {
                self.pins = Pins::parse(value).ok_or_else(|| {
                    wrong(format!("`pin={value}` is neither on nor off")).remedy(PIN)
                })?;
            }
            "forget" => {
                let given = text::duration(value).filter(|age| !age.is_zero());
                self.forget_after = given.ok_or_else(|| {
                    wrong(format!("`forget={value}` is not a duration"))
                        .remedy("write for example `?forget=24h`, longer than every ttl")
                })?;
            }
            "connect_timeout" => {
                let seconds = value.parse().ok().map(Duration::from_secs);
                let given = seconds.or_else(|| text::duration(value));
                let given = given.filter(|limit| !limit.is_zero()).ok_or_else(|| {
                    wrong(format!("`connect_timeout={value}` is not a duration"))
                        .remedy("write for example `?connect_timeout=3s`")
                })?;
                self.connect_timeout = Some(given);
            }
            _ => {
                return Err(wrong(format!("`{name}` is not a parameter of a MySQL URL")).remedy(
                    "parameters are create, table, pin, forget, connect_timeout, ssl-mode, ca, cert, key and insecure",
                ));
            }
        }
        Ok(())
    }
}

fn is_encrypted(mode: &str) -> Result<bool, LockError> {
    match &*mode.to_ascii_lowercase().replace('-', "_") {
        // All certificates are verified, including the name.
        "required" | "require" | "verify_ca" | "verify_identity" | "verify_full" => Ok(true),
        "disabled" | "disable" => Ok(false),
        "preferred" | "prefer" | "allow" => {
            Err(wrong(format!("`ssl-mode={mode}` does not guarantee encryption"))
                .remedy("write `ssl-mode=required`, or `ssl-mode=disabled`"))
        }
        _ => Err(wrong(format!("`ssl-mode={mode}` is unknown"))
            .remedy("write `ssl-mode=required`, or `ssl-mode=disabled`")),
    }
}

fn decoded(value: &str) -> Result<String, LockError> {
    let text = percent_encoding::percent_decode_str(value).decode_utf8();
    text.map(Into::into).map_err(|_| wrong("a value in the MySQL URL is not UTF-8"))
}

#[cold]
fn wrong(cause: impl Into<std::borrow::Cow<'static, str>>) -> LockError {
    LockError::new(ErrorKind::Config, cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_hosts_a_login_and_parameters() {
        let url = "mysql://u:p%40s%3As@h1:3307,[::1],h2/db?create=on&table=app.lock&forget=24h&connect_timeout=3";
        let parsed = MysqlUrl::parse(url).unwrap();
        let hosts: Vec<_> = parsed.hosts.iter().map(|it| (it.name.as_str(), it.port)).collect();
        assert_eq!(hosts, [("h1", 3307), ("::1", 3306), ("h2", 3306)]);
        assert_eq!(parsed.user.as_deref(), Some("u"));
        assert_eq!(parsed.password.as_deref(), Some("p@s:s"));
        assert_eq!(parsed.database.as_deref(), Some("db"));
        assert_eq!(parsed.table, "app.lock");
        assert!(parsed.creates);
        assert_eq!(parsed.forget_after, Duration::from_secs(24 * 60 * 60));
        assert_eq!(parsed.connect_timeout, Some(Duration::from_secs(3)));
        let plain = MysqlUrl::parse("mariadb://h/db").unwrap();
        assert_eq!((plain.user, plain.password, plain.creates), (None, None, false));
    }

    #[test]
    fn an_invalid_url_is_refused_without_its_password() {
        for (url, expected) in [
            ("mysql://u:secret@h/db?table=Lock", "table"),
            ("mysql://u:secret@h/db?table=a.b.c", "table"),
            ("mysql://u:secret@h/db?table=x;drop", "table"),
            ("mysql://u:secret@h/db?create=yes", "create"),
            ("mysql://u:secret@h/db?forget=0s", "forget"),
            ("mysql://u:secret@h/db?pin=yes", "?pin=on"),
            ("mysql://u:secret@h/db?connect_timeout=x", "connect_timeout"),
            ("mysql://u:secret@h/db?ssl-mode=sometimes", "ssl-mode"),
            ("mysql://u:secret@h/db?ssl-mode=PREFERRED", "ssl-mode=required"),
            ("mysql://u:secret@h/db?nonsense=1", "nonsense"),
            ("mysql://u:secret@h/db?ca=/a.pem", "ssl-mode=required"),
            ("mysql://u:secret@h/db?ssl-mode=required&insecure=false", "insecure"),
            ("mysql://u:secret@h/db?ssl-mode=required&cert=/a.pem", "key"),
            ("mysql://u:secret@h:x/db", "port"),
            ("mysql://u:?secret@h/db", "%3F"),
            ("mysql://u:12?secret@h/db", "%3F"),
            ("mysql://u:secret@/db", "host"),
            ("mysql://u:secret@h", "database"),
        ] {
            let error = MysqlUrl::parse(url).err().unwrap().to_string();
            assert!(error.contains(expected) && !error.contains("secret"), "{url}: {error}");
        }
    }
}
