//! `postgres://` URLs.

use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::TargetSessionAttrs;

use crate::backend::sql::encryption::tls_of_url;
use crate::backend::sql::tables::{InfoColumn, TableNames};
use crate::backend::sql::url_params::{UrlParams, UrlWords, wrong};
use crate::backend::tls_files::TlsFiles;
use crate::base::error::LockError;

/// How long a connection is idle before the system checks it.
const KEEPALIVE: Duration = Duration::from_secs(10);

const WORDS: UrlWords =
    UrlWords { database: "PostgreSQL", qualifier: "a schema", encryption: "sslmode=require" };

const FORM: &str = "write `postgres://user:password@host:5432/database`, with several hosts for a primary that moves: `postgres://host1,host2/database`";

const PARAMETERS: &str = "parameters are create, table, pin, forget, connect_timeout, sslmode, ca, cert, key and insecure, and those of libpq that the client knows";

/// A database, and how its tables are used.
#[derive(Clone, Debug)]
pub(crate) struct Database {
    /// Where to connect: each of the hosts. `Debug` does not show the password.
    pub(crate) servers: Vec<Config>,
    pub(crate) params: UrlParams,
    /// With `sslmode=require`.
    pub(crate) tls: Option<TlsFiles>,
}

impl Database {
    /// The names of the tables.
    pub(crate) fn names(&self) -> TableNames<'_> {
        let info = InfoColumn::Named;
        TableNames { prefix: &self.params.table, quote: '"', pins: self.params.pins, info }
    }

    pub(crate) fn parse(url: &str) -> Result<Self, LockError> {
        let (mut others, mut encrypted) = (Vec::new(), false);
        let (address, params) = UrlParams::parse(url, WORDS, |name, value| {
            match (name, value) {
                // All certificates are verified, including the name.
                ("sslmode", "require" | "verify-ca" | "verify-full") => encrypted = true,
                ("sslmode", "disable") => encrypted = false,
                ("sslmode", "prefer" | "allow") => {
                    return Err(wrong(format!("`sslmode={value}` does not guarantee encryption"))
                        .remedy("write `sslmode=require`, or `sslmode=disable`"));
                }
                // Of the client library.
                (name, "") => others.push(name.to_owned()),
                (name, value) => others.push(format!("{name}={value}")),
            }
            Ok(())
        })?;
        let feature = ("postgres-tls", cfg!(feature = "postgres-tls"));
        let tls = tls_of_url(params.tls_files.clone(), encrypted, WORDS.encryption, feature)?;
        others.push(format!("sslmode={}", if encrypted { "require" } else { "disable" }));
        let others = others.join("&");
        let servers =
            each_host(address).into_iter().map(|address| server(&format!("{address}?{others}")));
        let mut servers = servers.collect::<Result<Vec<_>, _>>()?;
        for (server, limit) in servers.iter_mut().zip(params.connect_timeout.iter().cycle()) {
            server.connect_timeout(*limit);
        }
        Ok(Self { servers, params, tls })
    }

    pub(crate) fn has_password(&self) -> bool {
        let password = self.servers.first().and_then(|server| server.get_password());
        password.is_some_and(|password| !password.is_empty())
    }
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
        let remedy = if cause.contains("unknown option") { PARAMETERS } else { FORM };
        wrong(format!("the PostgreSQL URL is invalid: {cause}")).remedy(remedy)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_the_store_and_of_the_client_stand_together() {
        let url =
            "postgres://u:p%40ss@h1:5433,h2/db?table=app.lock&connect_timeout=3&options=-cx%3D1";
        let database = Database::parse(url).unwrap();
        assert_eq!(database.params.table, "app.lock");
        let ports: Vec<_> = database.servers.iter().map(|it| it.get_ports().to_vec()).collect();
        assert_eq!(ports, [[5433], [5432]]);
        for server in &database.servers {
            assert_eq!(server.get_hosts().len(), 1);
            assert_eq!(server.get_dbname(), Some("db"));
            assert_eq!(server.get_password(), Some("p@ss".as_bytes()));
            assert_eq!(server.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
            assert_eq!(server.get_connect_timeout(), Some(&Duration::from_secs(3)));
            assert_eq!(server.get_options(), Some("-cx=1"));
        }
        assert!(!format!("{database:?}").contains("p@ss"));
    }

    #[test]
    fn an_invalid_url_is_refused_without_its_password() {
        for (url, expected) in [
            ("postgres://u:secret@h/db?table=Lock", "table"),
            ("postgres://u:secret@h/db?sslmode=sometimes", "sslmode"),
            ("postgres://u:secret@h/db?creat=on", "parameters are create, table"),
            ("postgres://u:secret@h/db?ca=/a.pem", "sslmode=require"),
            ("postgres://u:secret@h/db?sslmode=prefer", "sslmode=require"),
            ("postgres://u:secret@h/db?sslmode=require&insecure=false", "insecure"),
            ("postgres://u:secret@h/db?sslmode=require&cert=/a.pem", "key"),
            ("postgres://u:secret@h:x/db", "port"),
            ("postgres://u:?secret@h/db", "%3F"),
            ("postgres:///db", "host"),
        ] {
            let error = Database::parse(url).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("secret"), "{url}: {error}");
        }
    }
}
