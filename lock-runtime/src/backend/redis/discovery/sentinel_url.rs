//! `redis+sentinel://` URLs.

use crate::backend::redis::url::{self, Endpoint, decoded, wrong};
use crate::base::error::LockError;

const SENTINEL_PORT: u16 = 26_379;

const FORM: &str = "write `redis+sentinel://user:password@host1:26379,host2,host3/service/0`; user, password, ports and database may be left out, and the service is the name after `sentinel monitor`";

/// A master, identified by the name of its service at the sentinels.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) name: String,
    /// Each with the login for sentinels.
    pub(crate) sentinels: Vec<Endpoint>,
    /// The login and TLS settings of the master. Its host and port are those of a sentinel and have no meaning.
    pub(crate) master: Endpoint,
}

impl Service {
    pub(crate) fn is_named_by(url: &str) -> bool {
        scheme(url).is_some()
    }

    pub(crate) fn parse(url: &str) -> Result<Self, LockError> {
        let (scheme, rest) =
            scheme(url).ok_or_else(|| wrong("the URL is not valid").remedy(FORM))?;
        if rest.contains('#') {
            return Err(wrong("the URL has a `#fragment`, which has no meaning here")
                .remedy("percent-encode a `#` in a password as `%23`"));
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        if query.contains('@') {
            return Err(url::broken_password("?", "%3F")
                .remedy("percent-encode a `?` in a password as `%3F`, and an `@` as `%40`"));
        }
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        if path.contains('@') {
            return Err(url::broken_password("/", "%2F"));
        }
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (format!("{login}@"), hosts),
            None => (String::new(), authority),
        };
        let (name, database) = path.split_once('/').unwrap_or((path, ""));
        let name = decoded(name)?;
        if name.is_empty() {
            return Err(wrong("the URL names no service").remedy(FORM));
        }
        let SentinelQuery { user, password, rest: query } = SentinelQuery::parse(query)?;

        let mut all = Vec::new();
        for host in hosts.split(',') {
            // A port follows the `]` of an IPv6 address.
            let has_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
            let port = if has_port { String::new() } else { format!(":{SENTINEL_PORT}") };
            let plain = format!("{scheme}://{login}{host}{port}/{database}{query}");
            all.push(Endpoint::parse(&plain)?);
        }
        let Some(master) = all.first().cloned() else {
            return Err(wrong("the URL names no host").remedy(FORM));
        };
        master.reject_scripts_off("masters of Sentinel")?;
        let login = url::login_of(user, password);
        let sentinels =
            all.into_iter().map(|endpoint| Endpoint { login: login.clone(), ..endpoint });
        Ok(Self { name, sentinels: sentinels.collect(), master })
    }
}

/// The scheme for connections to the servers, and the rest of the URL.
fn scheme(url: &str) -> Option<(&'static str, &str)> {
    let (scheme, rest) = url.split_once("://")?;
    match &*url::scheme_of_redis(scheme) {
        "redis+sentinel" => Some(("redis", rest)),
        "rediss+sentinel" => Some(("rediss", rest)),
        _ => None,
    }
}

/// The login for sentinels, and the other parameters with the leading `?`.
#[derive(Default)]
struct SentinelQuery {
    user: Option<String>,
    password: Option<String>,
    rest: String,
}

impl SentinelQuery {
    fn parse(query: &str) -> Result<Self, LockError> {
        let mut parsed = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                // A `+` stands for itself, not for a space: passwords are rarely form-encoded.
                Some(("sentinel_user", user)) => parsed.user = Some(decoded(user)?),
                Some(("sentinel_password", password)) => parsed.password = Some(decoded(password)?),
                _ => {
                    parsed.rest.push(if parsed.rest.is_empty() { '?' } else { '&' });
                    parsed.rest.push_str(pair);
                }
            }
        }
        if parsed.user.is_some() && parsed.password.is_none() {
            return Err(wrong("a user of the sentinels needs a password")
                .remedy("write `?sentinel_user=name&sentinel_password=password`"));
        }
        Ok(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::error::ErrorKind;

    #[test]
    fn the_parts_of_the_url_are_parsed() {
        let service = Service::parse(
            "redis+sentinel://worker:p%40,ss@a,b:7000,[::1],[::1]:7001/my%20master/3?sentinel_user=watch&sentinel_password=s+%26x",
        )
        .unwrap();
        assert_eq!(service.name, "my master");
        let sentinels: Vec<_> = service.sentinels.iter().map(ToString::to_string).collect();
        assert_eq!(sentinels, ["a:26379", "b:7000", "[::1]:26379", "[::1]:7001"]);
        for sentinel in &service.sentinels {
            assert_eq!(sentinel.login.username(), Some("watch"));
            assert_eq!(sentinel.login.password(), Some("s+&x"));
            assert_eq!(sentinel.login.db(), 0);
        }
        assert_eq!(service.master.login.username(), Some("worker"));
        assert_eq!(service.master.login.password(), Some("p@,ss"));
        assert_eq!(service.master.login.db(), 3);

        let bare = Service::parse("redis+sentinel://a/m").unwrap();
        assert_eq!(bare.sentinels[0].login.password(), None);
        assert!(bare.master.tls.is_none());
        let tls = Service::parse("rediss+sentinel://a,b/m?ca=/x.pem").unwrap();
        assert_eq!(tls.master.tls.unwrap().ca.as_deref(), Some("/x.pem"));
        assert!(tls.sentinels.iter().all(|sentinel| sentinel.tls.is_some()));
    }

    #[test]
    fn a_wrong_url_is_a_config_error_without_the_password() {
        for url in [
            "redis+sentinel://",
            "redis+sentinel:///m",
            "redis+sentinel://:c4n4ry@a",
            "redis+sentinel://:c4n4ry@a/",
            "redis+sentinel://:c4n4ry@a,/m",
            "redis+sentinel://:c4n4ry@a:port/m",
            "redis+sentinel://:c4n4ry@a/m/orders",
            "redis+sentinel://:c4n4ry@a/m?ttl=5s",
            "redis+sentinel://:c4n4ry@a/m?scripts=off",
            "redis+sentinel://:c4n4ry@a/m?ca=/x.pem",
            "redis+sentinel://:c4n4ry@a/m#insecure",
            "redis+sentinel://:c4n4ry%ff@a/m",
            "redis+sentinel://a/m?sentinel_password=c4n4ry%ff",
            "redis+sentinel://a/m?sentinel_password=c4n@4ry",
            "redis+sentinel://a/m?sentinel_user=c4n4ry",
            "redis+sentinel://worker:1/c4n4ry@a/m",
            "redis+sentinel://worker:1?c4n4ry@a/m",
            "redis+sentinel://worker:1#c4n4ry@a/m",
        ] {
            let error = Service::parse(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
            assert!(!format!("{error} {error:?}").contains("c4n4ry"), "{error}");
        }
    }
}
