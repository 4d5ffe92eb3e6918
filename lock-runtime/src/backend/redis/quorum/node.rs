//! One node of a quorum: a server, or a cluster.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use redis::Value;
use tokio::sync::mpsc;

use crate::backend::redis::BackendConfig;
use crate::backend::redis::cluster::Cluster;
use crate::backend::redis::cluster::router::Commands;
use crate::backend::redis::conn::connection::{Ahead, Node};
use crate::backend::redis::conn::push::{Ears, Home};
use crate::backend::redis::discovery::sentinel::Sentinels;
use crate::backend::redis::discovery::target::Resolver;
use crate::backend::redis::keyspace::Book;
use crate::backend::redis::net::handshake::Hearing;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::protocol::scripted_server::RouteHint;
use crate::backend::redis::quorum::message::{Request, What};
use crate::backend::redis::quorum::pacing::Pace;
use crate::backend::redis::quorum::push::{Changes, MemberEar};
use crate::backend::redis::quorum::url::Place;
use crate::backend::redis::routing::slots::Address;
use crate::backend::{Backend, BackendError, Notifier, Warning};
use crate::base::error::LockError;
use crate::base::key::Key;

pub(crate) struct Member {
    pub(crate) name: String,
    /// Of the server, or of the cluster as a whole.
    pub(crate) pace: Arc<Pace>,
    /// Of each server of a cluster.
    paces: Mutex<HashMap<Address, Arc<Pace>>>,
    pub(crate) body: Body,
}

/// What it consists of.
pub(crate) enum Body {
    Server(Node),
    /// Each lock is in one of its servers. As one node it fails for the locks of a server that fails.
    Cluster(Cluster),
}

impl Member {
    /// Connects to the node at `number`, and goes on trying if that fails. The second is how the first try went.
    pub(crate) async fn begin(
        place: Place,
        number: usize,
        changes: &Arc<Changes>,
        mut config: BackendConfig<'_>,
    ) -> Result<(Self, Result<(), BackendError>), LockError> {
        let BackendConfig { clock, .. } = config;
        let name = place.to_string();
        let notifier = Notifier::new(MemberEar::new(number, changes, clock));
        let resolver: Resolver = match place {
            Place::Server(endpoint) => {
                config = config.with_connect_timeout(endpoint.connect_timeout);
                Dialer::new(endpoint.of_pool(config)?).await?.into()
            }
            Place::Service(service) => {
                config = config.with_connect_timeout(service.master.connect_timeout);
                Sentinels::new(service, config).await?.into()
            }
            // As a store of its own is opened: it listens for calls, too, though here nobody is ever called.
            Place::Cluster(seeds) => {
                let (cluster, opened) = Cluster::begin(seeds, config).await?;
                cluster.subscribe(notifier);
                return Ok((Self::new(name, Body::Cluster(cluster)), opened));
            }
        };
        // Nobody stands in a line here, so nobody can be called in vain.
        let (strays, _) = mpsc::unbounded_channel();
        let ears = Arc::new(Ears::new(strays, Arc::default(), clock));
        ears.subscribe(notifier);
        let hearing = Hearing { ears, home: Home::Server, calls: None };
        let (node, opened) = Node::begin(resolver, clock, config.limits(), Some(hearing)).await;
        Ok((Self::new(name, Body::Server(node)), opened))
    }

    fn new(name: String, body: Body) -> Self {
        Self { name, pace: Arc::default(), paces: Mutex::default(), body }
    }

    /// Asks in one write. `is_tracked`: the node then tells of changes of the locks that it reads.
    pub(crate) async fn ask(
        &self,
        requests: &[Request],
        is_tracked: bool,
    ) -> Vec<Result<Value, BackendError>> {
        match &self.body {
            Body::Server(node) => {
                let command = |at: usize, by| requests[at].command(by, Some(&Book::OF_SERVER));
                let ahead = if is_tracked { Ahead::Caching } else { Ahead::Nothing };
                node.run(requests.len(), ahead, command).await
            }
            Body::Cluster(cluster) => {
                let routed = cluster.router().route(
                    requests,
                    // Without its book.
                    Commands::Shared,
                    |request| &request.keys,
                    |server, hint, requests| {
                        let command = move |at: usize, by| {
                            let request: &Request = &requests[at];
                            let has_book = request.block.is_some()
                                && (hint == RouteHint::Direct || request.what == What::Propose);
                            let book = has_book.then(|| Book::of_slot(&request.keys));
                            request.command(by, book.as_ref())
                        };
                        Box::pin(server.run(hint, is_tracked, requests.len(), command))
                    },
                );
                routed.await
            }
        }
    }

    /// Which of requests about these locks are to be asked together: those that one server answers. One that is
    /// silent must not keep back the others' answers.
    pub(crate) fn shares<'a>(&self, locks: impl Iterator<Item = &'a [Key]>) -> Vec<Share> {
        let cluster = match &self.body {
            Body::Server(_) => return vec![Share { places: None, pace: self.pace.clone() }],
            Body::Cluster(cluster) => cluster,
        };
        let mut shares: BTreeMap<Option<Address>, Vec<usize>> = BTreeMap::new();
        for (at, keys) in locks.enumerate() {
            shares.entry(cluster.server_of(keys)).or_default().push(at);
        }
        let share = |(server, places)| Share { places: Some(places), pace: self.pace_of(server) };
        shares.into_iter().map(share).collect()
    }

    fn pace_of(&self, server: Option<Address>) -> Arc<Pace> {
        let Some(server) = server else { return self.pace.clone() };
        let mut paces = self.paces.lock().unwrap_or_else(PoisonError::into_inner);
        paces.entry(server).or_default().clone()
    }

    /// What is wrong with connections that work.
    pub(crate) fn warning(&self) -> Option<Warning> {
        match &self.body {
            Body::Server(node) => node.warning(),
            Body::Cluster(cluster) => cluster.warning(),
        }
    }

    /// Whether it tells of changes.
    pub(crate) fn tells(&self) -> bool {
        match &self.body {
            Body::Server(node) => node.hears().changes,
            Body::Cluster(cluster) => cluster.tells(),
        }
    }

    pub(crate) fn close(&self) {
        match &self.body {
            Body::Server(node) => node.close(),
            Body::Cluster(cluster) => cluster.end(),
        }
    }
}

/// The requests of a call that one server answers.
pub(crate) struct Share {
    /// At these places of the call, in order; `None` for all.
    places: Option<Vec<usize>>,
    pub(crate) pace: Arc<Pace>,
}

impl Share {
    pub(crate) fn of<'a, T: Clone>(&self, all: &'a [T]) -> Cow<'a, [T]> {
        match &self.places {
            None => all.into(),
            Some(places) => places.iter().map(|at| all[*at].clone()).collect(),
        }
    }

    /// The places of its requests in a call of `count`.
    pub(crate) fn places(&self, count: usize) -> Vec<usize> {
        self.places.clone().unwrap_or_else(|| (0..count).collect())
    }

    /// Each of `answers` with the place of its request.
    pub(crate) fn placed<T>(&self, answers: Vec<T>) -> Vec<(usize, T)> {
        match &self.places {
            None => answers.into_iter().enumerate().collect(),
            Some(places) => places.iter().copied().zip(answers).collect(),
        }
    }
}
