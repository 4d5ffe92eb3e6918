//! What a `redlock://` URL says.

use std::fmt;
use std::time::Duration;

use crate::backend::redis::cluster::seeds::seeds;
use crate::backend::redis::discovery::sentinel_url::Service;
use crate::backend::redis::quorum::diagnostics::Dependent;
use crate::backend::redis::url::{Endpoint, scheme_of_redis};
use crate::base::error::{ErrorKind, LockError};

/// Where a node is.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Server(Endpoint),
    /// The master of a service, wherever its sentinels say that it is.
    Service(Service),
    /// Known by these servers of it.
    Cluster(Vec<Endpoint>),
}

impl Place {
    fn parse(url: &str) -> Result<Self, LockError> {
        if Service::is_named_by(url) {
            return Service::parse(url).map(Self::Service);
        }
        match &*scheme_of_redis(url.split_once("://").map_or("", |(scheme, _)| scheme)) {
            // What is wrong with one server says little about how to name several.
            "redis" | "rediss" | "redis+unix" => {
                Endpoint::parse(url).map(Self::Server).map_err(|error| error.remedy(REMEDY))
            }
            "redis+cluster" | "rediss+cluster" => seeds(url).map(Self::Cluster),
            // A password may have come to stand in front of it.
            scheme => Err(wrong(format!("`{}://` is no node of a quorum", after_login(scheme)))
                .remedy("a node is a server of its own, `redis://host` or `rediss://host`, a master that sentinels know, `redis+sentinel://host/service`, or a cluster of its own, `redis+cluster://host`")),
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

impl fmt::Display for Place {
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

/// The nodes that `url` names: `redlock://a,b:7000,c`, with one user and password, one database and the same
/// parameters for all; or full URLs one after the other, `redlock://redis://:pw@a,rediss://b,redis://c/2`.
pub(crate) fn places(url: &str) -> Result<Vec<Place>, LockError> {
    let list = url.split_once("://").map_or(url, |(_, list)| list);
    let parsed: Result<Vec<_>, _> = if list.contains("://") {
        urls(list).into_iter().map(Place::parse).collect()
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
        hosts.split(',').map(|host| Place::parse(&whole(host))).collect()
    };
    let places = parsed?;
    for place in &places {
        place
            .login()
            .wants_no_replicas("a node of a quorum, which is independent of the others")?;
    }
    match places.len() {
        0..=2 => Err(wrong(format!("a quorum of {} nodes outlives no failure", places.len()))
            .remedy("name three or five independent servers; for a single one write `redis://host:6379`")),
        count if count % 2 == 0 => Err(wrong(format!(
            "{count} nodes tolerate no more failures than {}, and one more that can fail",
            count - 1
        ))
        .remedy("name an odd number of nodes: three or five")),
        65.. => Err(wrong("a quorum of more than 63 nodes").remedy("name three or five nodes")),
        _ => {
            let names: Vec<_> = places.iter().map(ToString::to_string).collect();
            for (at, name) in names.iter().enumerate() {
                if names[..at].contains(name) {
                    return Err(refused(&Dependent::Same(name.clone(), name.clone())));
                }
            }
            Ok(places)
        }
    }
}

fn after_login(text: &str) -> &str {
    text.rsplit_once('@').map_or(text, |(_, rest)| rest)
}

/// Those of a list. A comma inside a URL is not followed by a scheme.
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

/// A node that answers nothing for a shorter time is never silent: short against the ttl, so that a silent one costs
/// little of it.
pub(crate) fn least_patience(ttl: Duration) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(5);
    const LONGEST: Duration = Duration::from_millis(50);
    (ttl / 20).clamp(SHORTEST, LONGEST)
}

/// How long a round takes at the most, also where nodes go on to answer others. A node that answers nothing is given
/// up after the `request_timeout` of the pool.
pub(crate) fn longest_patience(
    ttl: Duration,
    request_timeout: Duration,
    set: Option<Duration>,
) -> Duration {
    (ttl / 2).min(request_timeout.saturating_mul(3)).max(set.unwrap_or_default())
}

#[cold]
pub(crate) fn refused(dependent: &Dependent) -> LockError {
    wrong(dependent.cause()).remedy(dependent.remedy())
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
            places(url).unwrap().iter().map(ToString::to_string).collect()
        };
        assert_eq!(names("redlock://a,b:7000,[::1]:1"), ["a:6379", "b:7000", "[::1]:1"]);
        let all = places("redlock://worker:p%40w@a,b,c/3").unwrap();
        for endpoint in all.iter().map(Place::login) {
            assert_eq!(endpoint.login.password(), Some("p@w"));
            assert_eq!(endpoint.login.db(), 3);
        }
        let own = places("redlock://redis://:one@a, redis://:two@b/2,redis://c:1").unwrap();
        let passwords: Vec<_> = own.iter().map(|place| place.login().login.password()).collect();
        assert_eq!(passwords, [Some("one"), Some("two"), None]);
        let url = "redlock://redis://a,redis+sentinel://:pw@s1,s2:7/orders,rediss://c";
        assert_eq!(names(url), ["a:6379", "orders of s1:26379 s2:7", "c:6379"]);
        let url = "redlock://redis://a,redis+cluster://:pw@b,c:7000,rediss+cluster://d";
        let clusters = ["the cluster of b:6379 c:7000", "the cluster of d:6379"];
        assert_eq!(names(url), ["a:6379", clusters[0], clusters[1]]);
    }

    #[test]
    fn a_list_that_is_no_quorum_is_refused_without_the_password() {
        for (url, text) in [
            ("redlock://:c4n4ry@a", "a quorum of 1 nodes"),
            ("redlock://:c4n4ry@a,b", "a quorum of 2 nodes"),
            ("redlock://:c4n4ry@a,b,c,d", "4 nodes tolerate no more"),
            ("redlock://:c4n4ry@a,b,a:6379", "a:6379 is named twice"),
            ("redlock://redis://:c4n4ry@a/1,redis://a/2,redis://b", "is named twice"),
            ("redlock://:c4n4ry@a,b,", "names no host"),
            ("redlock://:c4n4ry@a,b,c?replicas=1", "has no meaning"),
            ("redlock://:c4n4ry@a,b,c:x", "not valid"),
            ("redlock://redis://:c4n4ry@a,redis+cluster://:c4n4ry@b,c/2,redis://d", "no databases"),
            ("redlock://redis://:c4n4ry@a,mysql://:c4n4ry@b,redis://d", "`mysql://` is no node"),
            ("redlock://:c4n4ry@redis://a,redis://b,redis://c", "`redis://` is no node"),
            ("redlock://u:c4n4ry@redis+cluster://a,redis://b,redis://c", "is no node"),
        ] {
            let error = places(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
            assert!(error.to_string().contains(text), "{url}: {error}");
            assert!(!format!("{error} {error:?}").contains("c4n4ry"), "{error}");
        }
    }
}
