//! `zookeeper://` URLs.

use std::fmt;
use std::time::Duration;

use crate::backend::coordination::cluster_url::{ClusterUrl, UrlForm, wrong};
use crate::backend::tls_files::TlsFiles;
use crate::backend::zookeeper::protocol::operation::NodeAccess;
use crate::base::error::LockError;

const FORM: UrlForm = UrlForm {
    store: "ZooKeeper",
    scheme: "zookeeper",
    port: 2181,
    tls_port: 2281,
    has_tls: cfg!(feature = "zookeeper-tls"),
    tls_servers: "with the server's `secureClientPort`",
    parameters: "`acl`, ",
};

/// The servers of one ensemble, and how its nodes are used. `Debug` does not show the password.
#[derive(Clone)]
pub(crate) struct Ensemble {
    /// Host and port of each server.
    pub(crate) servers: Vec<(String, u16)>,
    /// The node below which the locks are: a path without a trailing slash.
    pub(crate) root: String,
    /// `user:password`, as the server takes it.
    pub(crate) login: Option<String>,
    /// `?acl=`. By default only the creator has access, where there is a login.
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
        let mut given = None;
        let ClusterUrl { servers, path, login, tls, connect_timeout } =
            FORM.parse(url, |name, value| {
                let is_known = name == "acl";
                if is_known {
                    given = Some(access(value)?);
                }
                Ok(is_known)
            })?;
        let login = login.map(digest).transpose()?;
        check_root(&path)?;
        Ok(Self { servers, root: path, login, access: given, tls, connect_timeout })
    }

    /// Which clients have access to new nodes.
    pub(crate) fn access(&self, has_login: bool) -> NodeAccess {
        let default = if has_login { NodeAccess::Creator } else { NodeAccess::Open };
        self.access.unwrap_or(default)
    }
}

fn access(value: &str) -> Result<NodeAccess, LockError> {
    match value {
        "open" => Ok(NodeAccess::Open),
        "creator" => Ok(NodeAccess::Creator),
        _ => Err(wrong(format!("`acl={value}` is neither open nor creator")).remedy(
            "write `?acl=creator` for nodes of this login only, or `?acl=open` for nodes of all clients",
        )),
    }
}

/// `user:password`. ZooKeeper's scheme is named digest; the password is sent as it is.
fn digest((user, password): (String, String)) -> Result<String, LockError> {
    if user.contains(':') {
        return Err(wrong("the user in the ZooKeeper URL contains a colon").remedy(FORM.example()));
    }
    Ok(format!("{user}:{password}"))
}

/// An empty path is the root of the tree.
fn check_root(path: &str) -> Result<(), LockError> {
    let is_name = |name: &str| {
        !matches!(name, "" | "." | ".." | "zookeeper") && !name.chars().any(char::is_control)
    };
    if path.is_empty() || path.split('/').skip(1).all(is_name) {
        return Ok(());
    }
    Err(wrong("the path in the ZooKeeper URL is not the path of a node").remedy(FORM.example()))
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
