//! `etcd://` URLs.

use std::fmt;
use std::time::Duration;

use crate::backend::coordination::cluster_url::{ClusterUrl, UrlForm};
use crate::backend::tls_files::TlsFiles;
use crate::base::error::LockError;

const FORM: UrlForm = UrlForm {
    store: "etcd",
    scheme: "etcd",
    port: 2379,
    tls_port: 2379,
    has_tls: cfg!(feature = "etcd-tls"),
    tls_servers: "for a cluster with `https` in `--advertise-client-urls`",
    parameters: "",
};

/// The members of one cluster, and where its locks are. `Debug` does not show the password.
#[derive(Clone)]
pub(crate) struct EtcdCluster {
    /// Host and port of each member.
    pub(crate) members: Vec<(String, u16)>,
    /// What the name of each key begins with: a path without a trailing slash, or nothing.
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
        let ClusterUrl { servers, path, login, tls, connect_timeout } =
            FORM.parse(url, |_, _| Ok(false))?;
        let login = login.map(|(user, password)| EtcdLogin { user, password });
        Ok(Self { members: servers, root: path, login, tls, connect_timeout })
    }
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
            ("etcd://u:80?secret@h/a", "`@` after the first `?`"),
            ("etcd://u:p@w?secret@h/a", "`@` after the first `?`"),
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
