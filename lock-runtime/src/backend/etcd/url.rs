//! `etcd://` URLs.

use std::fmt;
use std::time::Duration;

use percent_encoding::percent_decode_str;

use crate::backend::tls_files::{TlsFiles, Trust};
use crate::base::error::{ErrorKind, LockError};
use crate::base::text;

const PORT: u16 = 2379;

const FORM: &str = "write `etcd://host1:2379,host2:2379,host3:2379/locks`";

/// The members of one cluster, and where its locks are. `Debug` does not show the password.
#[derive(Clone)]
pub(crate) struct EtcdCluster {
    /// Host and port of each member.
    pub(crate) members: Vec<(String, u16)>,
    /// What the name of each key begins with: a path without a slash at its end, or nothing.
    pub(crate) root: String,
    pub(crate) login: Option<EtcdLogin>,
    /// With the scheme `etcds`.
    pub(crate) tls: Option<TlsFiles>,
    /// The time limit for connecting; `None` for that of the pool.
    pub(crate) connect_timeout: Option<Duration>,
}

/// User and password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct EtcdLogin {
    pub(crate) user: String,
    pub(crate) password: String,
}

impl fmt::Debug for EtcdCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { members, root, .. } = self;
        f.debug_struct("EtcdCluster")
            .field("members", members)
            .field("root", root)
            .finish_non_exhaustive()
    }
}

impl EtcdCluster {
    pub(crate) fn parse(url: &str) -> Result<Self, LockError> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let is_encrypted = scheme == "etcds";
        if is_encrypted && cfg!(not(feature = "etcd-tls")) {
            return Err(wrong("`etcds://` needs TLS, which this build does not have")
                .remedy("enable the feature `etcd-tls` of lock-runtime"));
        }
        let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, root) = match address.find('/') {
            Some(at) => address.split_at(at),
            None => (address, ""),
        };
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let mut cluster = Self {
            members: hosts.split(',').map(member).collect::<Result<_, _>>()?,
            root: decoded(root)?.trim_end_matches('/').to_owned(),
            login: login.map(user_and_password).transpose()?,
            tls: None,
            connect_timeout: None,
        };
        let mut files = TlsFiles::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "connect_timeout" => {
                    let given = text::duration(value).filter(|limit| !limit.is_zero());
                    cluster.connect_timeout = Some(given.ok_or_else(|| {
                        wrong(format!("`connect_timeout={value}` is no duration"))
                            .remedy("write for example `?connect_timeout=3s`")
                    })?);
                }
                "ca" => files.ca = Some(decoded(value)?),
                "cert" => files.cert = Some(decoded(value)?),
                "key" => files.key = Some(decoded(value)?),
                "insecure" if value.is_empty() => files.trust = Trust::Any,
                _ => {
                    return Err(wrong(format!("an etcd URL has no parameter `{name}`")).remedy(
                        "known are `connect_timeout`, and for `etcds` also `ca`, `cert`, `key` and `insecure`",
                    ));
                }
            }
        }
        cluster.tls = checked(files, is_encrypted)?;
        Ok(cluster)
    }
}

fn checked(files: TlsFiles, is_encrypted: bool) -> Result<Option<TlsFiles>, LockError> {
    let names_files = [&files.ca, &files.cert, &files.key].iter().any(|file| file.is_some());
    if !is_encrypted && (names_files || files.trust == Trust::Any) {
        return Err(wrong("`ca`, `cert`, `key` and `insecure` are for TLS")
            .remedy("write `etcds://`, for a cluster with `https` in `--advertise-client-urls`"));
    }
    if files.cert.is_some() != files.key.is_some() {
        return Err(wrong("a client certificate needs both `cert` and `key`")
            .remedy("write `?cert=/path.pem&key=/path.key`"));
    }
    if files.trust == Trust::Any && files.ca.is_some() {
        let cause = "`insecure` accepts any certificate, and `ca` only those of an authority";
        return Err(wrong(cause).remedy("leave `insecure` out"));
    }
    Ok(is_encrypted.then_some(files))
}

fn user_and_password(login: &str) -> Result<EtcdLogin, LockError> {
    let Some((user, password)) = login.split_once(':') else {
        return Err(wrong("the login in the etcd URL has no password")
            .remedy("write `etcd://user:password@host/locks`"));
    };
    Ok(EtcdLogin { user: decoded(user)?, password: decoded(password)? })
}

fn member(host: &str) -> Result<(String, u16), LockError> {
    let is_address = |host: &str| host.starts_with('[') && host.ends_with(']');
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || is_address(name) => {
            let port: Option<u16> = port.parse().ok().filter(|port| *port != 0);
            (name, port.ok_or_else(|| wrong("a port in the etcd URL is no port").remedy(FORM))?)
        }
        _ => (host, PORT),
    };
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    if name.is_empty() {
        return Err(wrong("the etcd URL names no host").remedy(FORM));
    }
    Ok((decoded(name)?, port))
}

fn decoded(value: &str) -> Result<String, LockError> {
    let text = percent_decode_str(value).decode_utf8();
    text.map(Into::into).map_err(|_| wrong("a value in the etcd URL is no UTF-8"))
}

#[cold]
fn wrong(cause: impl Into<std::borrow::Cow<'static, str>>) -> LockError {
    LockError::new(ErrorKind::Config, cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_root_login_and_parameters_are_read() {
        let url = "etcd://u:p%40s@h1,h2:2380,[::1]:2381/apps/locks/?connect_timeout=3s";
        let cluster = EtcdCluster::parse(url).unwrap();
        let members: Vec<_> =
            cluster.members.iter().map(|(host, port)| (host.as_str(), *port)).collect();
        assert_eq!(members, [("h1", 2379), ("h2", 2380), ("::1", 2381)]);
        assert_eq!(cluster.root, "/apps/locks");
        let login = cluster.login.clone().unwrap();
        assert_eq!((login.user.as_str(), login.password.as_str()), ("u", "p@s"));
        assert_eq!(cluster.connect_timeout, Some(Duration::from_secs(3)));
        assert!(!format!("{cluster:?}").contains("p@s"));
        let plain = EtcdCluster::parse("etcd://h").unwrap();
        assert!(plain.root.is_empty() && plain.login.is_none());
    }

    #[test]
    fn an_invalid_url_is_refused_without_its_password() {
        for (url, expected) in [
            ("etcd://", "no host"),
            ("etcd://h1,,h2", "no host"),
            ("etcd://u:secret@h:x/a", "port"),
            ("etcd://u:secret@h:0/a", "port"),
            ("etcd://secret@h", "no password"),
            ("etcd://u:secret@h/a?connect_timeout=soon", "connect_timeout"),
            ("etcd://u:secret@h/a?prefix=/b", "prefix"),
            ("etcd://u:secret@h/a?ca=/a.pem", "etcds"),
        ] {
            let error = EtcdCluster::parse(url).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("secret"), "{url}: {error}");
        }
    }

    #[cfg(feature = "etcd-tls")]
    #[test]
    fn files_of_tls_are_read() {
        let cluster = EtcdCluster::parse("etcds://h/a?ca=/c%20a.pem").unwrap();
        assert_eq!(cluster.tls.unwrap().ca.as_deref(), Some("/c a.pem"));
        for url in ["etcds://h?cert=/a.pem", "etcds://h?insecure&ca=/a.pem"] {
            EtcdCluster::parse(url).unwrap_err();
        }
    }
}
