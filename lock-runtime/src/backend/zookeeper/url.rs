//! `zookeeper://` URLs.

use std::fmt;
use std::time::Duration;

use percent_encoding::percent_decode_str;

use crate::backend::tls_files::{TlsFiles, Trust};
use crate::backend::zookeeper::protocol::operation::NodeAccess;
use crate::base::error::{ErrorKind, LockError};
use crate::base::text;

const PORT: u16 = 2181;
const TLS_PORT: u16 = 2281;

const FORM: &str = "write `zookeeper://host1:2181,host2:2181,host3:2181/locks`";

/// The servers of one ensemble, and how its nodes are used. `Debug` does not show the password.
#[derive(Clone)]
pub(crate) struct Ensemble {
    /// Host and port of each server.
    pub(crate) servers: Vec<(String, u16)>,
    /// The node below which the locks are: a path without a slash at its end.
    pub(crate) root: String,
    /// `user:password`, as the server takes it.
    pub(crate) login: Option<String>,
    /// `?acl=`. The creator's alone by default where there is a login.
    pub(crate) access: Option<NodeAccess>,
    /// With the scheme `zookeepers`.
    pub(crate) tls: Option<TlsFiles>,
    /// The time limit for connecting; `None` for that of the pool.
    pub(crate) connect_timeout: Option<Duration>,
}

impl fmt::Debug for Ensemble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { servers, root, .. } = self;
        f.debug_struct("Ensemble")
            .field("servers", servers)
            .field("root", root)
            .finish_non_exhaustive()
    }
}

impl Ensemble {
    pub(crate) fn parse(url: &str) -> Result<Self, LockError> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let is_encrypted = scheme == "zookeepers";
        if is_encrypted && cfg!(not(feature = "zookeeper-tls")) {
            return Err(wrong("`zookeepers://` needs TLS, which this build does not have")
                .remedy("enable the feature `zookeeper-tls` of lock-runtime"));
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
        let port = if is_encrypted { TLS_PORT } else { PORT };
        let servers = hosts.split(',').map(|host| server(host, port)).collect::<Result<_, _>>()?;
        let mut ensemble = Self {
            servers,
            root: root_path(&decoded(root)?)?,
            login: login.map(user_and_password).transpose()?,
            access: None,
            tls: None,
            connect_timeout: None,
        };
        let mut files = TlsFiles::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "acl" => ensemble.access = Some(access(value)?),
                "connect_timeout" => {
                    let given = text::duration(value).filter(|limit| !limit.is_zero());
                    ensemble.connect_timeout = Some(given.ok_or_else(|| {
                        wrong(format!("`connect_timeout={value}` is no duration"))
                            .remedy("write for example `?connect_timeout=3s`")
                    })?);
                }
                "ca" => files.ca = Some(decoded(value)?),
                "cert" => files.cert = Some(decoded(value)?),
                "key" => files.key = Some(decoded(value)?),
                "insecure" if value.is_empty() => files.trust = Trust::Any,
                _ => {
                    return Err(wrong(format!("a ZooKeeper URL has no parameter `{name}`")).remedy(
                        "known are `acl`, `connect_timeout`, and for `zookeepers` also `ca`, `cert`, `key` and `insecure`",
                    ));
                }
            }
        }
        ensemble.tls = checked(files, is_encrypted)?;
        Ok(ensemble)
    }

    /// Which clients have access to new nodes.
    pub(crate) fn access(&self, has_login: bool) -> NodeAccess {
        let default = if has_login { NodeAccess::Creator } else { NodeAccess::Open };
        self.access.unwrap_or(default)
    }
}

fn checked(files: TlsFiles, is_encrypted: bool) -> Result<Option<TlsFiles>, LockError> {
    let names_files = [&files.ca, &files.cert, &files.key].iter().any(|file| file.is_some());
    if !is_encrypted && (names_files || files.trust == Trust::Any) {
        return Err(wrong("`ca`, `cert`, `key` and `insecure` are for TLS")
            .remedy("write `zookeepers://`, with the server's `secureClientPort`"));
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

fn access(value: &str) -> Result<NodeAccess, LockError> {
    match value {
        "open" => Ok(NodeAccess::Open),
        "creator" => Ok(NodeAccess::Creator),
        _ => Err(wrong(format!("`acl={value}` is neither open nor creator")).remedy(
            "write `?acl=creator` for nodes of this login alone, or `?acl=open` for nodes of all clients",
        )),
    }
}

/// `user:password`. ZooKeeper's scheme is named digest; the password is sent as it is.
fn user_and_password(login: &str) -> Result<String, LockError> {
    let Some((user, password)) = login.split_once(':') else {
        return Err(wrong("the login in the ZooKeeper URL has no password")
            .remedy("write `zookeeper://user:password@host/locks`"));
    };
    let (user, password) = (decoded(user)?, decoded(password)?);
    if user.contains(':') {
        return Err(wrong("the user in the ZooKeeper URL contains a colon").remedy(FORM));
    }
    Ok(format!("{user}:{password}"))
}

fn server(host: &str, default: u16) -> Result<(String, u16), LockError> {
    let is_address = |host: &str| host.starts_with('[') && host.ends_with(']');
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || is_address(name) => {
            let port = port.parse().ok().filter(|port| *port != 0);
            let port: Option<u16> = port;
            (
                name,
                port.ok_or_else(|| wrong("a port in the ZooKeeper URL is no port").remedy(FORM))?,
            )
        }
        _ => (host, default),
    };
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    if name.is_empty() {
        return Err(wrong("the ZooKeeper URL names no host").remedy(FORM));
    }
    Ok((decoded(name)?, port))
}

/// The path without a slash at its end; empty for the root of the tree.
fn root_path(path: &str) -> Result<String, LockError> {
    let path = path.trim_end_matches('/');
    let is_name = |name: &str| {
        !matches!(name, "" | "." | ".." | "zookeeper") && !name.chars().any(char::is_control)
    };
    if path.is_empty() || path.split('/').skip(1).all(is_name) {
        return Ok(path.to_owned());
    }
    Err(wrong("the path in the ZooKeeper URL is no path of a node").remedy(FORM))
}

fn decoded(value: &str) -> Result<String, LockError> {
    let text = percent_decode_str(value).decode_utf8();
    text.map(Into::into).map_err(|_| wrong("a value in the ZooKeeper URL is no UTF-8"))
}

#[cold]
fn wrong(cause: impl Into<std::borrow::Cow<'static, str>>) -> LockError {
    LockError::new(ErrorKind::Config, cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_root_login_and_parameters_are_read() {
        let url =
            "zookeeper://u:p%40s:s@h1,h2:2182,[::1]:2183/apps/locks/?acl=open&connect_timeout=3s";
        let ensemble = Ensemble::parse(url).unwrap();
        let servers: Vec<_> =
            ensemble.servers.iter().map(|(host, port)| (host.as_str(), *port)).collect();
        assert_eq!(servers, [("h1", 2181), ("h2", 2182), ("::1", 2183)]);
        assert_eq!(ensemble.root, "/apps/locks");
        assert_eq!(ensemble.login.as_deref(), Some("u:p@s:s"));
        assert_eq!(ensemble.access(true), NodeAccess::Open);
        assert_eq!(ensemble.connect_timeout, Some(Duration::from_secs(3)));
        assert!(!format!("{ensemble:?}").contains("p@s"));
        let plain = Ensemble::parse("zookeeper://h").unwrap();
        assert_eq!((plain.root.as_str(), plain.login.as_deref()), ("", None));
        assert_eq!(plain.access(false), NodeAccess::Open);
        assert_eq!(plain.access(true), NodeAccess::Creator);
        assert_eq!(Ensemble::parse("zookeeper://::1").unwrap().servers, [("::1".to_owned(), 2181)]);
    }

    #[test]
    fn an_invalid_url_is_refused_without_its_password() {
        for (url, expected) in [
            ("zookeeper://", "no host"),
            ("zookeeper://h1,,h2", "no host"),
            ("zookeeper://u:secret@h:x/a", "port"),
            ("zookeeper://u:secret@h:0/a", "port"),
            ("zookeeper://secret@h", "no password"),
            ("zookeeper://u%3A:secret@h", "colon"),
            ("zookeeper://u:secret@h/a//b", "path"),
            ("zookeeper://u:secret@h/a/../b", "path"),
            ("zookeeper://u:secret@h/zookeeper", "path"),
            ("zookeeper://u:secret@h/a?acl=mine", "acl"),
            ("zookeeper://u:secret@h/a?connect_timeout=soon", "connect_timeout"),
            ("zookeeper://u:secret@h/a?chroot=/b", "chroot"),
            ("zookeeper://u:secret@h/a?ca=/a.pem", "zookeepers"),
        ] {
            let error = Ensemble::parse(url).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("secret"), "{url}: {error}");
        }
    }

    #[cfg(feature = "zookeeper-tls")]
    #[test]
    fn files_of_tls_are_read() {
        let ensemble = Ensemble::parse("zookeepers://h/a?ca=/c%20a.pem").unwrap();
        assert_eq!(ensemble.servers, [("h".to_owned(), 2281)]);
        assert_eq!(ensemble.tls.unwrap().ca.as_deref(), Some("/c a.pem"));
        for url in ["zookeepers://h?cert=/a.pem", "zookeepers://h?insecure&ca=/a.pem"] {
            Ensemble::parse(url).unwrap_err();
        }
    }
}
