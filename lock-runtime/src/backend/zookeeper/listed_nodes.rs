//! Watches that are being set.

use std::sync::Arc;

use crate::backend::Owner;
use crate::backend::zookeeper::claims::{ChangedHold, ClaimTable};
use crate::backend::zookeeper::lock_node::{LockNode, Slot, Standing, WatchScope};
use crate::backend::zookeeper::node_path::parent;
use crate::backend::zookeeper::owner_claims::Claims;
use crate::base::key::Key;

/// Watches that are being set, from before their requests are sent until they are recorded: the notification may come first. A
/// list watches its container.
pub(crate) struct ListedNodes {
    table: Arc<ClaimTable>,
    /// Watched paths, and the number of changes when the watch was requested.
    watched: Vec<(String, u64)>,
}

impl ListedNodes {
    /// Whether the watch of `path` is still set.
    fn is_current(&self, claims: &Claims, path: &str) -> bool {
        let watched = self.watched.iter().find(|(of, _)| of == path);
        watched.is_some_and(|(path, changes)| {
            claims.index.listed.get(path).is_some_and(|listed| listed.changes == *changes)
        })
    }
}

impl Drop for ListedNodes {
    fn drop(&mut self) {
        let mut claims = self.table.claims();
        for (path, _) in &self.watched {
            if let Some(listed) = claims.index.listed.get_mut(path) {
                listed.lists -= 1;
                if listed.lists == 0 {
                    claims.index.listed.remove(path);
                }
            }
        }
    }
}

impl ClaimTable {
    /// Records watches of `paths`, before they are requested.
    pub(crate) fn list(self: &Arc<Self>, paths: impl IntoIterator<Item = String>) -> ListedNodes {
        let mut claims = self.claims();
        let register = |path: String| {
            let listed = claims.index.listed.entry(path.clone()).or_default();
            listed.lists += 1;
            (path, listed.changes)
        };
        let watched = paths.into_iter().map(register).collect();
        drop(claims);
        ListedNodes { table: self.clone(), watched }
    }

    /// Records that `node` is the first of its key, by this list. `false` if its session has expired.
    pub(crate) fn mark_granted(
        &self,
        owner: &Owner,
        key: &Key,
        node: &LockNode,
        listed: &ListedNodes,
    ) -> bool {
        let mut claims = self.claims();
        if !node.session.is_current() {
            return false;
        }
        let is_watched = listed.is_current(&claims, parent(&node.path));
        let watched = if is_watched { WatchScope::Container } else { WatchScope::None };
        let standing = Standing::Granted { watched };
        if !claims.set(owner, key, Slot::Node(LockNode { standing, ..node.clone() })) {
            return false;
        }
        drop(claims);
        if !is_watched {
            self.look_again(ChangedHold { owner: *owner, key: key.clone() });
        }
        true
    }

    /// Records what tells of a change around the held node at `path`, if it is still held. `false` if it has changed since the
    /// watch was requested.
    pub(crate) fn set_watched(
        &self,
        owner: &Owner,
        key: &Key,
        path: &str,
        scope: WatchScope,
        listed: &ListedNodes,
    ) -> bool {
        let watched = match scope {
            WatchScope::Node => path,
            WatchScope::Container | WatchScope::None => parent(path),
        };
        let mut claims = self.claims();
        if !listed.is_current(&claims, watched) {
            return false;
        }
        claims.watch(owner, key, Some(path), scope);
        true
    }
}
