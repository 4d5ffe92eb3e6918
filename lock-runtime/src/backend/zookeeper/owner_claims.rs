//! The claims of a pool as plain state.

use std::collections::HashMap;

use crate::backend::Owner;
use crate::backend::coordination::owners::{OwnedState, OwnerTable};
use crate::backend::zookeeper::lock_node::{LockNode, Slot, Standing, WatchScope};
use crate::backend::zookeeper::node_path::{owner_of, parent};
use crate::base::key::Key;

pub(crate) type Claims = OwnerTable<OwnerClaim, ClaimIndex>;

/// What an owner has.
#[derive(Default)]
pub(crate) struct OwnerClaim {
    pub(super) slots: Vec<(Key, Slot)>,
    /// Keys with a node that a request outside of the queue has made. A refusal deletes it.
    pub(super) tried: Vec<Key>,
}

impl OwnedState for OwnerClaim {
    fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }
}

/// What leads from a path to claims.
#[derive(Default)]
pub(crate) struct ClaimIndex {
    /// Queued nodes by the path of their predecessor.
    pub(super) queued: HashMap<String, Vec<(Owner, Key)>>,
    /// Held keys by the path of their container.
    held: HashMap<String, (Owner, Key)>,
    /// Containers with a list in progress, and nodes with a watch in progress, by path.
    pub(super) listed: HashMap<String, ListedContainer>,
}

/// A container with a list in progress, or a node with a watch in progress.
#[derive(Default)]
pub(super) struct ListedContainer {
    /// How many lists are in progress.
    pub(super) lists: usize,
    /// How many notifications and ends of connections there were meanwhile.
    pub(super) changes: u64,
}

impl Claims {
    pub(super) fn set(&mut self, owner: &Owner, key: &Key, slot: Slot) -> bool {
        self.forget_watches(owner, key);
        let Some((claim, index)) = self.split_mut(owner) else { return false };
        if let Slot::Node(node) = &slot {
            let of = (*owner, key.clone());
            match &node.standing {
                Standing::Queued { predecessor } => {
                    index.queued.entry(predecessor.clone()).or_default().push(of);
                }
                Standing::Granted { .. } => {
                    index.held.insert(parent(&node.path).to_owned(), of);
                    claim.tried.retain(|of| of != key);
                }
                Standing::New | Standing::Leaving { .. } => {}
            }
        }
        match claim.slots.iter_mut().find(|(of, _)| of == key) {
            Some((_, present)) => *present = slot,
            None => claim.slots.push((key.clone(), slot)),
        }
        true
    }

    /// The queued node for `key`, and its predecessor. `None` after the notification that ends the wait.
    pub(super) fn queued(&self, owner: &Owner, key: &Key) -> Option<(LockNode, String)> {
        let slots = &self.state(owner)?.slots;
        let (_, Slot::Node(node)) = slots.iter().find(|(of, _)| of == key)? else { return None };
        let Standing::Queued { predecessor } = &node.standing else { return None };
        let owners = self.index.queued.get(predecessor)?;
        let is_waiting = owners.iter().any(|(queued, of)| queued == owner && of == key);
        is_waiting.then(|| (node.clone(), predecessor.clone()))
    }

    /// Records what reports a change around a held key, for the node at `path` or for any.
    pub(super) fn watch(
        &mut self,
        owner: &Owner,
        key: &Key,
        path: Option<&str>,
        scope: WatchScope,
    ) {
        let Some(claim) = self.state_mut(owner) else { return };
        for (_, slot) in claim.slots.iter_mut().filter(|(of, _)| of == key) {
            if let Slot::Node(node) = slot
                && path.is_none_or(|path| node.path == path)
                && let Standing::Granted { watched } = &mut node.standing
            {
                *watched = scope;
            }
        }
    }

    pub(super) fn remove(&mut self, owner: &Owner, key: &Key) {
        self.forget_watches(owner, key);
        if let Some(claim) = self.state_mut(owner) {
            claim.slots.retain(|(of, _)| of != key);
            claim.tried.retain(|of| of != key);
        }
        self.forget_unused(owner);
    }

    /// Removes the node at `path`, unless it was replaced meanwhile. Returns whether it was about to be deleted.
    pub(super) fn remove_node(&mut self, owner: &Owner, key: &Key, path: &str) -> Option<bool> {
        let slots = &self.state(owner)?.slots;
        let was_leaving = slots.iter().find_map(|(of, slot)| match slot {
            Slot::Node(node) if of == key && node.path == path => Some(node.is_leaving()),
            Slot::Node(_) | Slot::Unanswered(_) => None,
        })?;
        self.remove(owner, key);
        Some(was_leaving)
    }

    fn forget_watches(&mut self, owner: &Owner, key: &Key) {
        let Some((claim, index)) = self.split_mut(owner) else { return };
        let Some((_, Slot::Node(node))) = claim.slots.iter().find(|(of, _)| of == key) else {
            return;
        };
        match &node.standing {
            Standing::Queued { predecessor } => {
                if let Some(owners) = index.queued.get_mut(predecessor) {
                    owners.retain(|(queued, of)| queued != owner || of != key);
                    if owners.is_empty() {
                        index.queued.remove(predecessor);
                    }
                }
            }
            Standing::Granted { .. } => {
                let container = parent(&node.path);
                if index.held.get(container).is_some_and(|(holder, _)| holder == owner) {
                    index.held.remove(container);
                }
            }
            Standing::New | Standing::Leaving { .. } => {}
        }
    }

    /// The held key of the container at `path`, unless its holder watches only its own node.
    pub(super) fn watched_container(&self, path: &str) -> Option<(Owner, Key)> {
        let (owner, key) = self.index.held.get(path)?;
        let slots = &self.state(owner)?.slots;
        let is_node = |slot: &Slot| matches!(slot, Slot::Node(node) if node.standing == Standing::Granted { watched: WatchScope::Node });
        let is_alone = slots.iter().any(|(of, slot)| of == key && is_node(slot));
        (!is_alone).then(|| (*owner, key.clone()))
    }

    pub(super) fn count_change(&mut self, path: &str) {
        if let Some(listed) = self.index.listed.get_mut(path) {
            listed.changes += 1;
        }
    }

    /// The key of the node at `path`, if it is one of this process.
    pub(super) fn node_at(&self, path: &str) -> Option<(Owner, Key)> {
        let owner = owner_of(path)?;
        let slots = &self.state(&owner)?.slots;
        let is_there = |slot: &Slot| matches!(slot, Slot::Node(node) if node.path == path && !node.is_leaving());
        let (key, _) = slots.iter().find(|(_, slot)| is_there(slot))?;
        Some((owner, key.clone()))
    }
}
