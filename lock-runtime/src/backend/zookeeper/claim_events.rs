//! How notifications of watches, and the ends of connections and sessions, change the claims.

use std::time::Duration;

use crate::backend::BackendError;
use crate::backend::zookeeper::claims::{ChangedHold, ClaimTable};
use crate::backend::zookeeper::lock_node::{Slot, Standing, WatchScope};
use crate::backend::zookeeper::node_path::parent;
use crate::backend::zookeeper::protocol::answer::{NodeChange, NodeEvent};
use crate::backend::zookeeper::session::SessionSink;

impl SessionSink for ClaimTable {
    fn node_changed(&self, event: &NodeEvent) {
        let mut claims = self.claims();
        let queued = claims.index.queued.remove(&event.path).unwrap_or_default();
        claims.count_change(&event.path);
        if event.change != NodeChange::Children {
            claims.count_change(parent(&event.path));
        }
        let lost = match event.change {
            NodeChange::Deleted => claims.node_at(&event.path),
            NodeChange::Created | NodeChange::Data | NodeChange::Children => None,
        };
        if let Some((owner, key)) = &lost {
            claims.remove(owner, key);
        }
        let held = match event.change {
            NodeChange::Children => claims.watched_container(&event.path),
            NodeChange::Data => claims.node_at(&event.path),
            NodeChange::Created | NodeChange::Deleted => None,
        };
        // The watch is used up. A renewal that is answered before the next watch is set has to look on its own.
        if let Some((owner, key)) = &held {
            claims.watch(owner, key, None, WatchScope::None);
        }
        drop(claims);
        for (owner, key) in queued {
            self.events.head_of_queue(key.as_str(), owner, Duration::ZERO);
        }
        if let Some((_, key)) = lost {
            self.tell_of_change(&key);
        }
        if let Some((owner, key)) = held {
            self.look_again(ChangedHold { owner, key });
        }
    }

    fn disconnected(&self, session: u64, error: &BackendError) {
        let mut claims = self.claims();
        // Watches end with the connection. Waiters and holders ask again when there is another connection.
        for claim in claims.all_mut() {
            for (_, slot) in &mut claim.slots {
                if let Slot::Node(node) = slot
                    && node.session.number() == session
                    && let Standing::Granted { watched } = &mut node.standing
                {
                    *watched = WatchScope::None;
                }
            }
        }
        claims.index.listed.values_mut().for_each(|listed| listed.changes += 1);
        drop(claims);
        self.events.disconnected(error);
    }

    fn resumed(&self) {
        self.events.resync();
    }

    fn expired(&self, session: u64, incarnation: u64) {
        let mut claims = self.claims();
        let is_gone = |slot: &Slot| {
            let of = slot.session();
            of.number() == session && of.incarnation() <= incarnation
        };
        let gone: Vec<_> = claims
            .all()
            .flat_map(|(owner, claim, _)| {
                claim.slots.iter().map(move |(key, slot)| (owner, key, slot))
            })
            .filter(|(_, _, slot)| is_gone(slot))
            .map(|(owner, key, _)| (*owner, key.clone()))
            .collect();
        for (owner, key) in &gone {
            claims.remove(owner, key);
        }
        drop(claims);
        for (_, key) in &gone {
            self.tell_of_change(key);
        }
    }
}
