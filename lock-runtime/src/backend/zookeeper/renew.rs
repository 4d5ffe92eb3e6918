//! Renewals: whether the session of each node lives, asked of the leader.
//!
//! Nodes that are watched need one request for each session, however many there are: notifications come before later
//! answers, so a node that is still known behind the answer was there when the leader answered.

use crate::backend::zookeeper::claims::{LockNode, Slot, Standing, WatchScope};
use crate::backend::zookeeper::lock_nodes::{KeyListing, LockNodes};
use crate::backend::zookeeper::protocol::answer::Answered;
use crate::backend::zookeeper::server_error::failure;
use crate::backend::zookeeper::session::LiveSession;
use crate::backend::zookeeper::ttl_classes::timeout_for;
use crate::backend::{BackendError, LeaseRef, LeaseStatus};
use crate::base::key::Key;

/// Leases with nodes in one session, and what is asked there.
struct SessionLeases<'a> {
    session: LiveSession,
    /// Positions among the leases of the call.
    leases: Vec<usize>,
    /// Held nodes without a watch.
    unwatched: Vec<(&'a LeaseRef, Key, LockNode)>,
}

/// The most queues that are read by one group of requests.
const LISTED_AT_ONCE: usize = 1_000;

impl LockNodes {
    pub(crate) async fn renew(
        &self,
        leases: &[LeaseRef],
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        let mut outcomes: Vec<_> = leases.iter().map(|_| None).collect();
        let mut sessions = Vec::new();
        for (at, lease) in leases.iter().enumerate() {
            match self.held_nodes(lease) {
                Some(nodes) => add(&mut sessions, at, lease, nodes),
                None => outcomes[at] = Some(self.renew_by_name(lease).await),
            }
        }
        // All are sent before the first answer is awaited.
        let asked: Vec<_> = sessions
            .iter()
            .map(|of| {
                let reads =
                    of.unwatched.iter().take(LISTED_AT_ONCE).map(|(_, key, _)| self.children(key));
                of.session.send(std::iter::once(self.sync()).chain(reads).collect())
            })
            .collect();
        for (of, asked) in sessions.into_iter().zip(asked) {
            let answered = match asked.get().await {
                Ok(answers) => self.on_answers(&of, answers).await,
                Err(error) => Err(error),
            };
            for at in of.leases {
                outcomes[at] = Some(match &answered {
                    Ok(()) => Ok(self.extend(&leases[at])),
                    Err(error) => Err(error.clone()),
                });
            }
        }
        let missing = || Ok(LeaseStatus::NotHeld);
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(missing)).collect()
    }

    /// The nodes of a lease, if all of them are held and in sessions that are long enough.
    fn held_nodes(&self, lease: &LeaseRef) -> Option<Vec<(Key, LockNode)>> {
        let mut nodes: Vec<(Key, LockNode)> = Vec::with_capacity(lease.keys.len());
        for key in lease.keys.iter() {
            let Some(Slot::Node(node)) = self.claims.slot(&lease.owner, key) else { return None };
            let is_held = matches!(node.standing, Standing::Granted { .. })
                && node.session.is_current()
                && node.session.timeout() >= timeout_for(lease.kept_for())
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
        of: &SessionLeases<'_>,
        answers: Vec<Answered>,
    ) -> Result<(), BackendError> {
        let mut answers = answers.into_iter();
        if let Some(Err(code)) = answers.next() {
            return Err(failure(code));
        }
        let mut listings = answers.map(KeyListing::read).collect::<Result<Vec<_>, _>>()?;
        // Behind a reconnect there may be more of them than one group can have.
        for chunk in of.unwatched[listings.len()..].chunks(LISTED_AT_ONCE) {
            let keys: Vec<_> = chunk.iter().map(|(_, key, _)| key.clone()).collect();
            listings.extend(self.listings(&of.session, &keys).await?);
        }
        for ((lease, key, node), listing) in of.unwatched.iter().zip(listings) {
            if listing.nodes.find(node.name()).is_none() {
                self.claims.remove(&lease.owner, key);
                continue;
            }
            self.claims.set_watched(&lease.owner, key, &node.path, WatchScope::Container);
            if listing.nodes.has_others(&lease.owner) {
                self.claims.events.contended(key.as_str());
            }
        }
        Ok(())
    }

    /// Extends the claim of a lease whose nodes were there a moment ago.
    fn extend(&self, lease: &LeaseRef) -> LeaseStatus {
        if self.held_nodes(lease).is_none() {
            return LeaseStatus::NotHeld;
        }
        self.claims.keep_until(&lease.owner, self.claims.clock.now() + lease.kept_for());
        LeaseStatus::Held
    }

    /// Renews a lease whose nodes are unknown here, or in a session that is too short for it. They are moved.
    async fn renew_by_name(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let turn = self.claims.begin(lease.owner, lease.kept_for()).await;
        let owner = turn.owner();
        let session = self.session_for(owner, lease.kept_for()).await?;
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
            self.mark_granted(owner, key, &node);
            // A moved node has no watch from before its move that counts.
            self.claims.set_watched(owner, key, &node.path, WatchScope::None);
        }
        self.claims.keep_until(owner, self.claims.clock.now() + lease.kept_for());
        Ok(LeaseStatus::Held)
    }

    pub(crate) async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let session = self.any_session_of(&lease.owner).await?;
        let listings = self.listings_of(&session, &lease.owner, &lease.keys).await?;
        let is_held = listings.iter().all(|listing| listing.is_first(&lease.owner));
        Ok(if is_held { LeaseStatus::Held } else { LeaseStatus::NotHeld })
    }
}

fn add<'a>(
    sessions: &mut Vec<SessionLeases<'a>>,
    at: usize,
    lease: &'a LeaseRef,
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
    of.leases.push(at);
    let is_unwatched =
        |node: &LockNode| matches!(node.standing, Standing::Granted { watched: WatchScope::None });
    let unwatched = nodes.into_iter().filter(|(_, node)| is_unwatched(node));
    of.unwatched.extend(unwatched.map(|(key, node)| (lease, key, node)));
}
