//! What the URLs of both databases have in common: the parameters of the tables, of connecting and of TLS files.

use std::borrow::Cow;
use std::time::Duration;

use crate::backend::sql::tables::{FORGET_AFTER, Pins, is_identifier};
use crate::backend::tls_files::{TlsFiles, Trust};
use crate::base::error::{ErrorKind, LockError};
use crate::base::text;

/// The words of a database in errors about its URL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UrlWords {
    /// The name of the database.
    pub(crate) database: &'static str,
    /// What stands in front of the dot in the name of a table.
    pub(crate) qualifier: &'static str,
    /// The parameter that asks for TLS.
    pub(crate) encryption: &'static str,
}

/// Parameters of both databases.
#[derive(Clone, Debug)]
pub(crate) struct UrlParams {
    /// What stands before `_lease` and `_queue` in the names of the tables: `?table=`.
    pub(crate) table: String,
    /// Whether missing tables are made: `?create=on`.
    pub(crate) creates: bool,
    /// Whether grants are written for pins: `?pin=on`.
    pub(crate) pins: Pins,
    /// How long rows of free locks stay: `?forget=`.
    pub(crate) forget_after: Duration,
    /// The time limit for connecting, if the URL has one: `?connect_timeout=`, as a duration or a number of seconds. Zero is no
    /// limit of its own, as for other clients.
    pub(crate) connect_timeout: Option<Duration>,
    /// Files for TLS, whether or not the URL asks for it.
    pub(crate) tls_files: TlsFiles,
}

impl Default for UrlParams {
    fn default() -> Self {
        Self {
            table: "lock".to_owned(),
            creates: false,
            pins: Pins::Off,
            forget_after: FORGET_AFTER,
            connect_timeout: None,
            tls_files: TlsFiles::default(),
        }
    }
}

impl UrlParams {
    /// The address in `url`, and its parameters. Those of one database only are passed to `other`, by name and value.
    pub(crate) fn parse<'a>(
        url: &'a str,
        words: UrlWords,
        mut other: impl FnMut(&'a str, &'a str) -> Result<(), LockError>,
    ) -> Result<(&'a str, Self), LockError> {
        let (address, query) = url.split_once('?').unwrap_or((url, ""));
        if query.contains('@') {
            // The text is not shown: it may be a part of the password.
            return Err(wrong("a `?` stands in front of an `@`")
                .remedy("write `%3F` for a `?` in a user or a password, and `%40` for an `@` in a parameter"));
        }
        let mut params = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if !params.set(name, value, words)? {
                other(name, value)?;
            }
        }
        Ok((address, params))
    }

    /// Whether `name` is a parameter of both databases.
    fn set(&mut self, name: &str, value: &str, words: UrlWords) -> Result<bool, LockError> {
        let UrlWords { database, qualifier, encryption } = words;
        match name {
            "table" if is_identifier(value) => self.table = value.to_owned(),
            "table" => {
                return Err(wrong(format!("`table={value}` is not a valid table name")).remedy(format!(
                    "write up to 48 letters, digits and `_`, with {qualifier} if needed: `?table=app.lock` uses `app.lock_lease` and `app.lock_queue`",
                )));
            }
            "create" => {
                self.creates =
                    switch(name, value, "write `?create=on` to make missing tables at the start")?;
            }
            "pin" => {
                let is_on = switch(
                    name,
                    value,
                    "write `?pin=on` in the URLs of all processes, for `guard.pin_sql()` in transactions of your own",
                )?;
                self.pins = if is_on { Pins::On } else { Pins::Off };
            }
            "forget" => {
                let given = text::duration(value).filter(|age| !age.is_zero());
                self.forget_after = given.ok_or_else(|| {
                    wrong(format!("`forget={value}` is not a duration"))
                        .remedy("write for example `?forget=24h`, longer than every ttl")
                })?;
            }
            "connect_timeout" => {
                let is_number = value.bytes().all(|digit| digit.is_ascii_digit());
                let seconds = value.parse().ok().filter(|_| is_number).map(Duration::from_secs);
                let given = seconds.or_else(|| text::duration(value)).ok_or_else(|| {
                    wrong(format!("`connect_timeout={value}` is not a duration"))
                        .remedy("write for example `?connect_timeout=10s`, or a number of seconds")
                })?;
                self.connect_timeout = Some(given).filter(|limit| !limit.is_zero());
            }
            "ca" => self.tls_files.ca = Some(decoded(value, words)?),
            "cert" => self.tls_files.cert = Some(decoded(value, words)?),
            "key" => self.tls_files.key = Some(decoded(value, words)?),
            "insecure" if matches!(value, "" | "true") => self.tls_files.trust = Trust::Any,
            "insecure" => {
                let cause = format!("`insecure` in the {database} URL has an unknown value");
                return Err(wrong(cause).remedy(format!(
                    "write `?{encryption}&insecure`, or better `?{encryption}&ca=/path.pem`"
                )));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Whether the parameter `name` is on.
fn switch(name: &str, value: &str, remedy: &'static str) -> Result<bool, LockError> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(wrong(format!("`{name}={value}` is neither on nor off")).remedy(remedy)),
    }
}

/// `value` without percent encoding.
pub(crate) fn decoded(value: &str, words: UrlWords) -> Result<String, LockError> {
    let text = percent_encoding::percent_decode_str(value).decode_utf8();
    text.map(Into::into)
        .map_err(|_| wrong(format!("a value in the {} URL is not UTF-8", words.database)))
}

/// An error about the URL of a database. The cause must not show a password.
#[cold]
pub(crate) fn wrong(cause: impl Into<Cow<'static, str>>) -> LockError {
    LockError::new(ErrorKind::Config, cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: UrlWords =
        UrlWords { database: "SQL", qualifier: "a schema", encryption: "tls=on" };

    fn parsed(query: &str) -> Result<UrlParams, LockError> {
        let url = format!("sql://u:secret@h/db?{query}");
        let other = |name: &str, _: &str| Err(wrong(format!("`{name}` is unknown")));
        UrlParams::parse(&url, WORDS, other).map(|(address, params)| {
            assert_eq!(address, "sql://u:secret@h/db");
            params
        })
    }

    #[test]
    fn parameters_of_both_databases_are_taken_and_others_are_passed_on() {
        let params = parsed("create=on&table=app.lock&forget=24h&pin=on&ca=/a%20b.pem&insecure");
        let params = params.unwrap();
        assert_eq!(params.table, "app.lock");
        assert!(params.creates && params.pins == Pins::On);
        assert_eq!(params.forget_after, Duration::from_secs(24 * 60 * 60));
        assert_eq!(params.tls_files.ca.as_deref(), Some("/a b.pem"));
        assert_eq!(params.tls_files.trust, Trust::Any);
        let mut others = Vec::new();
        let other = |name, value| {
            others.push((name, value));
            Ok(())
        };
        let (_, params) = UrlParams::parse("sql://h?a=1&create=off&b", WORDS, other).unwrap();
        assert_eq!((others, params.creates), (vec![("a", "1"), ("b", "")], false));
    }

    #[test]
    fn a_time_limit_for_connecting_is_a_duration_or_a_number_of_seconds() {
        for (value, expected) in
            [("3", Some(3_000)), ("2500ms", Some(2_500)), ("0", None), ("0s", None)]
        {
            let params = parsed(&format!("connect_timeout={value}")).unwrap();
            assert_eq!(params.connect_timeout, expected.map(Duration::from_millis), "{value}");
        }
    }

    #[test]
    fn an_invalid_parameter_is_refused_without_the_password() {
        for (query, expected) in [
            ("table=Lock", "table"),
            ("table=a.b.c", "a schema"),
            ("table=x;drop", "table"),
            ("create=yes", "?create=on"),
            ("create", "?create=on"),
            ("pin=yes", "?pin=on"),
            ("forget=0s", "forget"),
            ("connect_timeout=5x", "connect_timeout"),
            ("insecure=false", "?tls=on&ca="),
            ("ca=%ff", "UTF-8"),
            ("nonsense=1", "nonsense"),
            ("connect_timeout=+5", "connect_timeout"),
            ("nonsense=@", "%40"),
        ] {
            let error = parsed(query).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("secret"), "{query}: {error}");
        }
        for url in ["sql://u:12?secret@h/db", "sql://u@x:p?secret@h/db"] {
            let other = |name: &str, _: &str| Err(wrong(format!("`{name}` is unknown")));
            let error = UrlParams::parse(url, WORDS, other).unwrap_err().to_string();
            assert!(error.contains("%3F") && !error.contains("secret"), "{error}");
        }
    }
}
