//! Renewals: a majority confirms that the session of each node is alive.
//!
//! Nodes that are watched need one request for each session, however many there are. Notifications come before later
//! answers, so a node that is still known after the answer was there when the leader answered.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio::task::JoinSet;

use crate::backend::coordination::positions::in_positions;
use crate::backend::zookeeper::listed_nodes::ListedNodes;
use crate::backend::zookeeper::lock_node::{LockNode, Slot, Standing, WatchScope};
use crate::backend::zookeeper::lock_nodes::{KeyListing, LockNodes, confirmed};
use crate::backend::zookeeper::protocol::answer::Answered;
use crate::backend::zookeeper::server_error::{malformed, unanswered};
use crate::backend::zookeeper::session::{AwaitedGroup, LiveSession};
use crate::backend::{BackendError, LeaseRef, LeaseStatus, Owner};
use crate::base::key::Key;

/// Leases with nodes in one session, and what is asked there.
struct SessionLeases {
    session: LiveSession,
    /// With the position of each among the leases of the call.
    leases: Vec<(usize, LeaseRef)>,
    unwatched: Vec<UnwatchedNode>,
}

/// A held node without a watch.
struct UnwatchedNode {
    owner: Owner,
    key: Key,
    node: LockNode,
}

/// Requests that were sent for the leases of a session.
struct AskedNodes {
    answers: AwaitedGroup,
    /// The containers that are read.
    listed: ListedNodes,
}

/// What a renewal has read of the nodes of a session so far.
#[derive(Default)]
struct KnownNodes {
    /// Whether the session was alive.
    is_confirmed: bool,
    /// How many of the unwatched nodes were read, in their order.
    read: usize,
    /// Of nodes that could not be read.
    errors: HashMap<(Owner, Key), BackendError>,
    /// Of the whole session, without a confirmation.
    unconfirmed: Option<BackendError>,
}

impl KnownNodes {
    fn refuse(&mut self, of: &UnwatchedNode, error: BackendError) {
        self.errors.insert((of.owner, of.key.clone()), error);
    }

    /// Nodes that were not read have `error`.
    fn fail_rest(&mut self, of: &SessionLeases, error: &BackendError) {
        if !self.is_confirmed {
            self.unconfirmed = Some(error.clone());
            return;
        }
        for unread in &of.unwatched[self.read..] {
            self.errors.insert((unread.owner, unread.key.clone()), error.clone());
        }
    }

    fn error_of(&self, lease: &LeaseRef) -> Option<&BackendError> {
        let of_key = |key: &Key| self.errors.get(&(lease.owner, key.clone()));
        let of_keys = || lease.keys.iter().find_map(of_key);
        self.unconfirmed.as_ref().or_else(|| (!self.errors.is_empty()).then(of_keys)?)
    }
}

/// The most queues that are read by one group of requests.
const LISTED_AT_ONCE: usize = 1_000;

impl LockNodes {
    /// Asks all sessions, and for each lease that is unknown here, at the same time. Only what has no answer in time fails.
    pub(crate) async fn renew(
        self: &Arc<Self>,
        leases: &[LeaseRef],
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        let mut sessions = Vec::new();
        let mut unknown = Vec::new();
        for (at, lease) in leases.iter().enumerate() {
            match self.held_nodes(lease) {
                Some(nodes) => add(&mut sessions, at, lease, nodes),
                None => unknown.push((at, lease)),
            }
        }
        let mut renewing = JoinSet::new();
        for of in sessions {
            // Sent before anything is awaited.
            let asked = self.ask(&of);
            let nodes = self.clone();
            renewing.spawn(async move { nodes.renew_session(of, asked).await });
        }
        for (at, lease) in unknown {
            let (nodes, lease) = (self.clone(), lease.clone());
            renewing.spawn(async move {
                vec![(at, nodes.within_part(nodes.renew_by_name(&lease)).await)]
            });
        }
        in_positions(renewing, leases.iter().map(|_| Err(unanswered())).collect()).await
    }

    /// Sends the first group of requests for the leases of a session.
    fn ask(&self, of: &SessionLeases) -> AskedNodes {
        let unwatched = of.unwatched.iter().take(LISTED_AT_ONCE);
        let keys: Vec<_> = unwatched.map(|unwatched| unwatched.key.clone()).collect();
        let listed = self.list(&keys);
        AskedNodes { answers: of.session.send(self.confirmed_reads(&keys)), listed }
    }

    async fn renew_session(
        &self,
        mut of: SessionLeases,
        asked: AskedNodes,
    ) -> Vec<(usize, Result<LeaseStatus, BackendError>)> {
        let mut known = KnownNodes::default();
        let answered = self.within_part(async {
            let answers = asked.answers.get().await?;
            self.on_answers(&mut of, answers, asked.listed, &mut known).await
        });
        // What was read before a failure counts, so that each try has less to read.
        if let Err(error) = answered.await {
            known.fail_rest(&of, &error);
        }
        let outcome = |lease: &LeaseRef| match known.error_of(lease) {
            Some(error) => Err(error.clone()),
            None => Ok(self.extend(lease)),
        };
        of.leases.iter().map(|(at, lease)| (*at, outcome(lease))).collect()
    }

    /// The nodes of a lease, if all of them are held and in sessions that are long enough.
    fn held_nodes(&self, lease: &LeaseRef) -> Option<Vec<(Key, LockNode)>> {
        let mut nodes: Vec<(Key, LockNode)> = Vec::with_capacity(lease.keys.len());
        for key in lease.keys.iter() {
            let Some(Slot::Node(node)) = self.claims.slot(&lease.owner, key) else { return None };
            let is_held = matches!(node.standing, Standing::Granted { .. })
                && node.session.is_current()
                && node.session.timeout() >= self.classes.timeout_for(lease.kept_for())
                && nodes.iter().all(|(_, other)| other.session.is(&node.session));
            if !is_held {
                return None;
            }
            nodes.push((key.clone(), node));
        }
        Some(nodes)
    }

    async fn on_answers(
        &self,
        of: &mut SessionLeases,
        answers: Vec<Answered>,
        mut listed: ListedNodes,
        known: &mut KnownNodes,
    ) -> Result<(), BackendError> {
        let mut answers = answers.into_iter();
        confirmed(&answers.next().ok_or_else(malformed)?)?;
        known.is_confirmed = true;
        let mut listings: Vec<_> = answers.map(KeyListing::read).collect();
        // After a reconnect there may be more unwatched nodes than one group can have.
        loop {
            let unread = &of.unwatched[known.read..];
            for (unwatched, listing) in unread.iter().zip(listings) {
                known.read += 1;
                match listing {
                    Ok(listing) => self.on_listing(unwatched, &listing, &listed),
                    Err(error) => known.refuse(unwatched, error),
                }
            }
            if known.read == of.unwatched.len() {
                self.add_notified(of);
            }
            let next = of.unwatched[known.read..].iter().take(LISTED_AT_ONCE);
            let keys: Vec<_> = next.map(|unwatched| unwatched.key.clone()).collect();
            if keys.is_empty() {
                return Ok(());
            }
            listed = self.list(&keys);
            listings = self.each_listing(&of.session, &keys).await?;
            if listings.is_empty() {
                return Err(malformed());
            }
        }
    }

    /// Adds the nodes with a watch that was used up since the renewal began: later changes are unknown.
    fn add_notified(&self, of: &mut SessionLeases) {
        let known: HashSet<_> = of.unwatched.iter().map(|it| it.node.path.clone()).collect();
        for (_, lease) in &of.leases {
            let nodes = self.held_nodes(lease).into_iter().flatten();
            let notified = nodes
                .filter(|(_, node)| node.is_unwatched() && !known.contains(&node.path))
                .map(|(key, node)| UnwatchedNode { owner: lease.owner, key, node });
            of.unwatched.extend(notified);
        }
    }

    fn on_listing(&self, of: &UnwatchedNode, listing: &KeyListing, listed: &ListedNodes) {
        let UnwatchedNode { owner, key, node } = of;
        if listing.nodes.find(node.name()).is_none() {
            self.claims.lose(owner, key, &node.path);
            return;
        }
        self.claims.set_watched(owner, key, &node.path, WatchScope::Container, listed);
        if listing.nodes.has_others(owner) {
            self.claims.events.contended(key.as_str());
        }
    }

    /// Extends the claim of a lease whose nodes were there a moment ago.
    fn extend(&self, lease: &LeaseRef) -> LeaseStatus {
        if self.held_nodes(lease).is_none() {
            return LeaseStatus::NotHeld;
        }
        self.claims.owners.keep_until(&lease.owner, self.claims.now() + lease.kept_for());
        LeaseStatus::Held
    }

    /// Renews a lease with nodes that are unknown here, or in a session that is too short for it. The nodes are moved.
    async fn renew_by_name(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let turn = self.claims.owners.begin(lease.owner, lease.kept_for()).await;
        let owner = turn.owner();
        let session = self.session_for(owner, lease.kept_for()).await?;
        let listed = self.list(&lease.keys);
        let listings = self.listings_of(&session, owner, &lease.keys).await?;
        if !listings.iter().all(|listing| listing.is_first(owner)) {
            return Ok(LeaseStatus::NotHeld);
        }
        for (key, listing) in lease.keys.iter().zip(&listings) {
            let Some(contender) = listing.nodes.first_of(owner) else {
                return Ok(LeaseStatus::NotHeld);
            };
            let known = match self.claims.slot(owner, key) {
                Some(Slot::Node(node)) if node.name() == contender.name => {
                    if node.session.is(&session) {
                        Some(node)
                    } else {
                        self.move_node(&session, owner, key, &node.path, node.fence).await?
                    }
                }
                _ => self.adopt(&session, owner, key, contender).await?,
            };
            let Some(node) = known else { return Ok(LeaseStatus::NotHeld) };
            if !self.claims.mark_granted(owner, key, &node, &listed) {
                return Ok(LeaseStatus::NotHeld);
            }
        }
        self.claims.owners.keep_until(owner, self.claims.now() + lease.kept_for());
        Ok(LeaseStatus::Held)
    }

    pub(crate) async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let session = self.any_session_of(&lease.owner).await?;
        let listings = self.listings_of(&session, &lease.owner, &lease.keys).await?;
        let is_held = listings.iter().all(|listing| listing.is_first(&lease.owner));
        Ok(LeaseStatus::of(is_held))
    }
}

fn add(
    sessions: &mut Vec<SessionLeases>,
    at: usize,
    lease: &LeaseRef,
    nodes: Vec<(Key, LockNode)>,
) {
    let Some((_, first)) = nodes.first() else { return };
    let number = first.session.number();
    let known = sessions.iter().position(|of| of.session.number() == number);
    let position = known.unwrap_or_else(|| {
        let session = first.session.clone();
        sessions.push(SessionLeases { session, leases: Vec::new(), unwatched: Vec::new() });
        sessions.len() - 1
    });
    let Some(of) = sessions.get_mut(position) else { return };
    of.leases.push((at, lease.clone()));
    let unwatched = nodes.into_iter().filter(|(_, node)| node.is_unwatched());
    let owner = lease.owner;
    of.unwatched.extend(unwatched.map(|(key, node)| UnwatchedNode { owner, key, node }));
}
