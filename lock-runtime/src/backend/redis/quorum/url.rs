//! Parses `redlock://` URLs.

use std::fmt;

use crate::backend::redis::cluster::seeds::seeds;
use crate::backend::redis::discovery::sentinel_url::Service;
use crate::backend::redis::url::{Endpoint, scheme_of_redis};
use crate::base::error::{ErrorKind, LockError};

/// How to reach a node.
#[derive(Clone, Debug)]
pub(crate) enum NodeAddress {
    Server(Endpoint),
    /// The current master of a service, as its sentinels report it.
    Service(Service),
    /// The seed servers of the cluster.
    Cluster(Vec<Endpoint>),
}

impl NodeAddress {
    fn parse(url: &str) -> Result<Self, LockError> {
        if Service::is_named_by(url) {
            return Service::parse(url).map(Self::Service);
        }
        match &*scheme_of_redis(url.split_once("://").map_or("", |(scheme, _)| scheme)) {
            // The remedy of a single server's URL does not fit a list.
            "redis" | "rediss" | "redis+unix" => {
                Endpoint::parse(url).map(Self::Server).map_err(|error| error.remedy(REMEDY))
            }
            "redis+cluster" | "rediss+cluster" => seeds(url).map(Self::Cluster),
            // The text before `://` may contain a password.
            scheme => Err(wrong(format!("`{}://` cannot be a node of a quorum", after_login(scheme)))
                .remedy("a node is an independent server, `redis://host` or `rediss://host`, a master behind Sentinel, `redis+sentinel://host/service`, or an independent cluster, `redis+cluster://host`")),
        }
    }

    fn login(&self) -> &Endpoint {
        match self {
            Self::Server(endpoint) => endpoint,
            Self::Service(service) => &service.master,
            Self::Cluster(seeds) => &seeds[0],
        }
    }
}

impl fmt::Display for NodeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(endpoint) => endpoint.fmt(f),
            Self::Service(Service { name, sentinels, .. }) => {
                write!(f, "{name} of")?;
                sentinels.iter().try_for_each(|sentinel| write!(f, " {sentinel}"))
            }
            Self::Cluster(seeds) => {
                f.write_str("the cluster of")?;
                seeds.iter().try_for_each(|seed| write!(f, " {seed}"))
            }
        }
    }
}

/// Parses the nodes of `url`. In the short form, `redlock://a,b:7000,c`, all nodes share user, password, database and
/// parameters. In the long form each node has a full URL: `redlock://redis://:pw@a,rediss://b,redis://c/2`.
///
/// # Errors
///
/// `Config` for an invalid URL, an even number of nodes, fewer than 3, more than 63, or a node that is named twice.
pub(crate) fn parse(url: &str) -> Result<Vec<NodeAddress>, LockError> {
    let list = url.split_once("://").map_or(url, |(_, list)| list);
    let parsed: Result<Vec<_>, _> = if list.contains("://") {
        urls(list).into_iter().map(NodeAddress::parse).collect()
    } else {
        let (login, rest) = match list.rsplit_once('@') {
            Some((login, rest)) => (format!("{login}@"), rest),
            None => (String::new(), list),
        };
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (hosts, tail) = rest.split_at(end);
        let scheme = if ["ca=", "cert=", "insecure"].iter().any(|name| tail.contains(name)) {
            "rediss"
        } else {
            "redis"
        };
        let whole = |host: &str| format!("{scheme}://{login}{}{tail}", host.trim());
        hosts.split(',').map(|host| NodeAddress::parse(&whole(host))).collect()
    };
    let addresses = parsed?;
    for address in &addresses {
        let login = address.login();
        login.reject_replicas("a node of a quorum, which is independent of the others")?;
        login.reject_scripts_off("a quorum")?;
    }
    match addresses.len() {
        0..=2 => Err(wrong(format!("a quorum of {} nodes tolerates no failure", addresses.len()))
            .remedy("name three or five independent servers; for a single one write `redis://host:6379`")),
        count if count % 2 == 0 => Err(wrong(format!(
            "{count} nodes tolerate no more failures than {}, and one more that can fail",
            count - 1
        ))
        .remedy("name an odd number of nodes: three or five")),
        65.. => Err(wrong("a quorum of more than 63 nodes").remedy("name three or five nodes")),
        _ => {
            let names: Vec<_> = addresses.iter().map(ToString::to_string).collect();
            for (at, name) in names.iter().enumerate() {
                if names[..at].contains(name) {
                    return Err(Dependent::Same(name.clone(), name.clone()).into_error());
                }
            }
            Ok(addresses)
        }
    }
}

fn after_login(text: &str) -> &str {
    text.rsplit_once('@').map_or(text, |(_, rest)| rest)
}

/// The URLs of a list. A comma separates two URLs only if a scheme follows it.
fn urls(list: &str) -> Vec<&str> {
    let is_scheme = |text: &str| {
        let of_a_scheme = |byte: u8| byte.is_ascii_lowercase() || byte == b'+';
        !text.is_empty() && text.bytes().all(of_a_scheme)
    };
    let begins_url = |text: &str| {
        text.trim_start().split_once("://").is_some_and(|(scheme, _)| is_scheme(scheme))
    };
    let mut urls = Vec::new();
    let mut begin = 0;
    for (at, _) in list.match_indices(',') {
        if begins_url(&list[at + 1..]) {
            urls.push(list[begin..at].trim());
            begin = at + 1;
        }
    }
    urls.push(list[begin..].trim());
    urls
}

/// Why a node does not fail independently of the others.
pub(crate) enum Dependent {
    /// One server of a cluster, without the rest of the cluster.
    Part(String),
    /// A replica: its master keeps the locks.
    Replica(String),
    /// Two nodes that share a server.
    Same(String, String),
}

impl Dependent {
    #[cold]
    pub(crate) fn into_error(self) -> LockError {
        wrong(self.cause()).remedy(self.remedy())
    }

    pub(crate) fn cause(&self) -> String {
        match self {
            Self::Part(name) => format!(
                "Redis at {name} is a part of a Redis Cluster, and refuses the keys of all other parts"
            ),
            Self::Replica(name) => {
                format!("Redis at {name} is a replica, accepts no locks, and fails with its master")
            }
            Self::Same(one, other) if one == other => {
                format!("{one} is named twice: its failure would count as two")
            }
            Self::Same(one, other) => format!(
                "{one} and {other} are the same server, or have one in common: its failure would count as two"
            ),
        }
    }

    pub(crate) const fn remedy(&self) -> &'static str {
        match self {
            Self::Part(_) => {
                "name the whole cluster as one node: `redis+cluster://host` instead of `redis://host`"
            }
            Self::Replica(_) => {
                "name its master instead, or the sentinels that know the master: `redis+sentinel://host:26379/service`"
            }
            Self::Same(..) => {
                "name servers that fail independently of each other, each once; several databases of one server are one node"
            }
        }
    }
}

const REMEDY: &str = "write `redlock://host1:6379,host2:6379,host3:6379`, or one full URL for each node: `redlock://redis://:password@host1:6379,rediss://host2:6380,redis://host3:6379`";

#[cold]
fn wrong(cause: impl Into<String>) -> LockError {
    LockError::new(ErrorKind::Config, cause.into()).remedy(REMEDY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_share_login_database_and_parameters_or_have_their_own() {
        let names = |url: &str| -> Vec<String> {
            parse(url).unwrap().iter().map(ToString::to_string).collect()
        };
        assert_eq!(names("redlock://a,b:7000,[::1]:1"), ["a:6379", "b:7000", "[::1]:1"]);
        let all = parse("redlock://worker:p%40w@a,b,c/3").unwrap();
        for endpoint in all.iter().map(NodeAddress::login) {
            assert_eq!(endpoint.login.password(), Some("p@w"));
            assert_eq!(endpoint.login.db(), 3);
        }
        let own = parse("redlock://redis://:one@a, redis://:two@b/2,redis://c:1").unwrap();
        let passwords: Vec<_> =
            own.iter().map(|address| address.login().login.password()).collect();
        assert_eq!(passwords, [Some("one"), Some("two"), None]);
        let url = "redlock://redis://a,redis+sentinel://:pw@s1,s2:7/orders,rediss://c";
        assert_eq!(names(url), ["a:6379", "orders of s1:26379 s2:7", "c:6379"]);
        let url = "redlock://redis://a,redis+cluster://:pw@b,c:7000,rediss+cluster://d";
        let clusters = ["the cluster of b:6379 c:7000", "the cluster of d:6379"];
        assert_eq!(names(url), ["a:6379", clusters[0], clusters[1]]);
    }

    #[test]
    fn an_invalid_list_is_rejected_without_naming_the_password() {
        for (url, text) in [
            ("redlock://:c4n4ry@a", "a quorum of 1 nodes"),
            ("redlock://:c4n4ry@a,b", "a quorum of 2 nodes"),
            ("redlock://:c4n4ry@a,b,c,d", "4 nodes tolerate no more"),
            ("redlock://:c4n4ry@a,b,a:6379", "a:6379 is named twice"),
            ("redlock://redis://:c4n4ry@a/1,redis://a/2,redis://b", "is named twice"),
            ("redlock://:c4n4ry@a,b,", "names no host"),
            ("redlock://:c4n4ry@a,b,c?replicas=1", "has no meaning"),
            ("redlock://:c4n4ry@a,b,c?scripts=off", "has no meaning"),
            ("redlock://:c4n4ry@a,b,c:x", "not valid"),
            ("redlock://redis://:c4n4ry@a,redis+cluster://:c4n4ry@b,c/2,redis://d", "no databases"),
            (
                "redlock://redis://:c4n4ry@a,mysql://:c4n4ry@b,redis://d",
                "`mysql://` cannot be a node",
            ),
            ("redlock://:c4n4ry@redis://a,redis://b,redis://c", "`redis://` cannot be a node"),
            ("redlock://u:c4n4ry@redis+cluster://a,redis://b,redis://c", "cannot be a node"),
        ] {
            let error = parse(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
            assert!(error.to_string().contains(text), "{url}: {error}");
            assert!(!format!("{error} {error:?}").contains("c4n4ry"), "{error}");
        }
    }
}
