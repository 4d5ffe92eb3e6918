//! The servers in the URL of a cluster, and the first slot map.

use std::time::Duration;

use redis::{Cmd, Value};
use tokio::task::JoinSet;

use crate::backend::redis::cluster::errors::{closed, no_server};
use crate::backend::redis::net::handshake::request_once;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::slot_map::{Address, SlotRanges};
use crate::backend::redis::url::Endpoint;
use crate::backend::{BackendError, FailureKind};
use crate::base::error::{ErrorKind, LockError};

/// The servers of `redis+cluster://[user:password@]host[:port],host...[?ca=...]`.
pub(crate) fn seeds(url: &str) -> Result<Vec<Endpoint>, LockError> {
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    let scheme = scheme.strip_suffix("+cluster").unwrap_or(scheme);
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (login, hosts) = match authority.rfind('@') {
        Some(at) => authority.split_at(at + 1),
        None => ("", authority),
    };
    let mut seeds = Vec::new();
    for host in hosts.split(',') {
        let seed = Endpoint::parse(&format!("{scheme}://{login}{host}{tail}"))
            .map_err(|error| error.remedy("write `redis+cluster://user:password@host1:6379,host2,host3`, or `rediss+cluster://` for TLS; user, password and ports may be left out, special characters in them are percent-encoded"))?;
        seed.reject_replicas("a Redis Cluster")?;
        seed.reject_scripts_off("a Redis Cluster")?;
        if seed.login.db() != 0 {
            return Err(LockError::new(ErrorKind::Config, "a Redis Cluster has no databases")
                .remedy("leave the database number out of the URL; a prefix on the pool keeps keys apart"));
        }
        seeds.push(seed);
    }
    Ok(seeds)
}

/// The first slot map that one of the servers sends.
pub(super) async fn first_map(
    dialers: Vec<Dialer>,
    limit: Duration,
) -> Result<SlotRanges, BackendError> {
    let mut requests = JoinSet::new();
    for dialer in dialers {
        requests.spawn(async move {
            let Endpoint { host, port, .. } = dialer.endpoint();
            let address = Address::new(host, *port);
            let answer = request_once(&dialer, limit, &cluster_slots()).await?;
            usable_map(&answer, &address).ok_or_else(|| {
                no_server(format!("Redis at {address} reports no server with slots"))
            })
        });
    }
    let mut failure: Option<BackendError> = None;
    while let Some(answer) = requests.join_next().await {
        match answer {
            Ok(Ok(map)) => return Ok(map),
            // A rejection needs a change from outside, so it is the most useful error.
            Ok(Err(error)) if error.kind() == FailureKind::Rejected => failure = Some(error),
            Ok(Err(error)) => {
                failure.get_or_insert(error);
            }
            Err(_) => {}
        }
    }
    Err(failure.unwrap_or_else(closed))
}

/// The map in an answer of `server` to [`cluster_slots`], if it has any master.
pub(super) fn usable_map(answer: &Value, server: &Address) -> Option<SlotRanges> {
    SlotRanges::parse(answer, server).filter(|map| !map.masters().is_empty())
}

pub(super) fn cluster_slots() -> Cmd {
    let mut slots = redis::cmd("CLUSTER");
    slots.arg("SLOTS");
    slots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_several_servers_with_one_login() {
        let seeds = seeds("redis+cluster://worker:p%40s,s@a,b:7000,[::1]:7001").unwrap();
        let texts: Vec<_> = seeds.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["a:6379", "b:7000", "[::1]:7001"]);
        for seed in &seeds {
            assert_eq!(seed.login.username(), Some("worker"));
            assert_eq!(seed.login.password(), Some("p@s,s"));
            assert!(seed.tls.is_none());
        }
        assert!(super::seeds("rediss+cluster://a,b?ca=/x.pem").unwrap()[1].tls.is_some());
    }

    #[test]
    fn a_wrong_url_is_a_config_error_without_the_password() {
        for url in [
            "redis+cluster://",
            "redis+cluster://:c4n4ry@a,",
            "redis+cluster://:c4n4ry@a,b:port",
            "redis+cluster://:c4n4ry@a,b/3",
            "redis+cluster://:c4n4ry@a,b?scripts=off",
            "redis+cluster://:c4n4ry@a,b?ca=/x.pem",
            "redis+cluster://worker:1/c4n4ry@a,b",
            "redis+cluster://worker:1?c4n4ry@a,b",
            "redis+cluster://worker:1#c4n4ry@a,b",
        ] {
            let error = seeds(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
            assert!(!format!("{error} {error:?}").contains("c4n4ry"), "{error}");
            assert!(!error.to_string().contains("`redis://"), "{error}");
        }
    }
}
