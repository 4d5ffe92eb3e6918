//! `mysql://` URLs.

use crate::backend::sql::encryption::tls_of_url;
use crate::backend::sql::tables::{InfoColumn, TableNames};
use crate::backend::sql::url_params::{UrlParams, UrlWords, decoded, wrong};
use crate::backend::tls_files::TlsFiles;
use crate::base::error::LockError;

const WORDS: UrlWords =
    UrlWords { database: "MySQL", qualifier: "a database", encryption: "ssl-mode=required" };

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
    pub(crate) params: UrlParams,
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
        TableNames { prefix: &self.params.table, quote: '`', pins: self.params.pins, info }
    }

    pub(crate) fn parse(url: &str) -> Result<Self, LockError> {
        let mut encrypted = false;
        let (address, params) = UrlParams::parse(url, WORDS, |name, value| {
            match name {
            "ssl-mode" | "sslmode" => {
                encrypted = is_encrypted(value)?;
                Ok(())
            }
            _ => Err(wrong(format!("`{name}` is not a parameter of a MySQL URL")).remedy(
                "parameters are create, table, pin, forget, connect_timeout, ssl-mode, ca, cert, key and insecure",
            )),
        }
        })?;
        let feature = ("mysql-tls", cfg!(feature = "mysql-tls"));
        let tls = tls_of_url(params.tls_files.clone(), encrypted, WORDS.encryption, feature)?;
        let parsed = Self { tls, ..Self::of_address(address, params)? };
        let names_schema = parsed.database.is_some() || parsed.params.table.contains('.');
        if !names_schema {
            return Err(wrong("the MySQL URL names no database").remedy(FORM));
        }
        Ok(parsed)
    }

    fn of_address(address: &str, params: UrlParams) -> Result<Self, LockError> {
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
        let decoded = |text: Option<&str>| {
            let given = text.filter(|text| !text.is_empty());
            given.map(|text| decoded(text, WORDS)).transpose()
        };
        Ok(Self {
            hosts,
            user: decoded(user)?,
            password: decoded(password)?,
            database: decoded(Some(path))?,
            params,
            tls: None,
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_hosts_a_login_and_parameters() {
        let url = "mysql://u:p%40s%3As@h1:3307,[::1],h2/db?table=app.lock";
        let parsed = MysqlUrl::parse(url).unwrap();
        let hosts: Vec<_> = parsed.hosts.iter().map(|it| (it.name.as_str(), it.port)).collect();
        assert_eq!(hosts, [("h1", 3307), ("::1", 3306), ("h2", 3306)]);
        assert_eq!(parsed.user.as_deref(), Some("u"));
        assert_eq!(parsed.password.as_deref(), Some("p@s:s"));
        assert_eq!(parsed.database.as_deref(), Some("db"));
        assert_eq!(parsed.params.table, "app.lock");
        let plain = MysqlUrl::parse("mariadb://h/db").unwrap();
        assert_eq!((plain.user, plain.password), (None, None));
    }

    #[test]
    fn an_invalid_url_is_refused_without_its_password() {
        for (url, expected) in [
            ("mysql://u:secret@h/db?table=Lock", "table"),
            ("mysql://u:secret@h/db?ssl-mode=sometimes", "ssl-mode"),
            ("mysql://u:secret@h/db?ssl-mode=PREFERRED", "ssl-mode=required"),
            ("mysql://u:secret@h/db?nonsense=1", "nonsense"),
            ("mysql://u:secret@h/db?ca=/a.pem", "ssl-mode=required"),
            ("mysql://u:secret@h/db?ssl-mode=required&insecure=false", "insecure"),
            ("mysql://u:secret@h/db?ssl-mode=required&cert=/a.pem", "key"),
            ("mysql://u:secret@h:x/db", "port"),
            ("mysql://u:?secret@h/db", "%3F"),
            ("mysql://u:secret@/db", "host"),
            ("mysql://u:secret@h", "database"),
        ] {
            let error = MysqlUrl::parse(url).err().unwrap().to_string();
            assert!(error.contains(expected) && !error.contains("secret"), "{url}: {error}");
        }
    }
}
