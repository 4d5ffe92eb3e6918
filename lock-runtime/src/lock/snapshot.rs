//! What a pool holds and waits for, at one moment.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use crate::base::call_location::CallLocation;
use crate::base::call_site::LockLabel;
use crate::base::clock::Instant;
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::owner::Owner;
use crate::base::owner_tag::OwnerTag;
use crate::lease::lease::Lease;
use crate::lock::core::PoolCore;
use crate::queue::waiting_keys::KeyWaits;

/// The locks that a process holds in one pool, and the keys that its tasks wait for. The store is not queried.
///
/// With the feature `serde` it can be serialized, with times in milliseconds (`held_ms`).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Snapshot {
    /// The name of the pool.
    pub pool: Arc<str>,
    /// The held locks, the longest hold first.
    pub held: Vec<HeldLock>,
    /// The keys with waiting tasks, the longest wait first. This process may also hold such a key.
    pub waiting: Vec<WaitedKey>,
}

/// A lock that this process holds.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HeldLock {
    /// Its keys, sorted, without the pool's prefix.
    pub keys: Arc<[Key]>,
    /// The template of the annotated function, the route or the request. `None` for a request without one.
    pub template: Option<&'static str>,
    /// The annotated function or the route, as events name it. `None` for the programmatic API.
    pub name: Option<String>,
    /// File and line of the annotated function, the route or the request, such as `src/orders.rs:42`.
    pub call_site: String,
    /// The first digits of the owner token, as [`LockPool::inspect`](crate::LockPool::inspect) shows them.
    pub owner: OwnerTag,
    /// How long the task has held it.
    pub held_for: Duration,
    /// How long it remains valid if no further renewal succeeds.
    pub valid_for: Duration,
    /// The fencing token, if one was requested.
    pub fence: Option<Fence>,
    /// How many waits of this process are queued for its keys.
    pub waiting: usize,
    /// Whether it [lingers](crate::LockRequest::linger): no task holds it now.
    pub lingers: bool,
}

/// A key that tasks of this process wait for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WaitedKey {
    /// The key, without the pool's prefix.
    pub key: Key,
    /// How many tasks wait. A task whose first request has no answer yet is not counted. A request for several keys counts
    /// at the key that it waits for now, or at all that it asks the store for.
    pub waiting: usize,
    /// How long the first of them has waited.
    pub waited_for: Duration,
}

/// The state of `core` now.
///
/// Neither of its two mutexes is locked for more than one pass over the entries, and no mutex of a lease is locked.
pub(crate) fn snapshot(core: &PoolCore) -> Snapshot {
    if core.is_inherited() {
        return Snapshot { pool: core.name().clone(), held: Vec::new(), waiting: Vec::new() };
    }
    // In this order: a wait that ends in between is held, and counts as held.
    let (waits, leases) = (core.queue.waits(), core.tracker.leases());
    let now = core.clock().now();
    let queued: HashMap<&Key, usize> = waits.iter().map(|it| (&it.key, it.queued)).collect();
    // The validity of a lease that was released, handed off or lost is over.
    let held: Vec<_> = leases.iter().filter(|lease| lease.is_held()).collect();
    let owners: HashSet<Owner> = held.iter().map(|lease| lease.owner).collect();
    let prefix = &*core.config.key_prefix;
    let mut waiting: Vec<_> =
        waits.iter().filter_map(|waits| waited_key(waits, prefix, &owners, now)).collect();
    waiting.sort_by_key(|it| std::cmp::Reverse(it.waited_for));
    let mut held: Vec<_> = held.iter().map(|lease| held_lock(lease, &queued, now)).collect();
    held.sort_by_key(|it| std::cmp::Reverse(it.held_for));
    Snapshot { pool: core.name().clone(), held, waiting }
}

fn held_lock(lease: &Lease, queued: &HashMap<&Key, usize>, now: Instant) -> HeldLock {
    let spec = &lease.spec;
    let (template, name) = match &spec.label {
        LockLabel::Site(site) => (Some(site.template()), Some(site.to_string())),
        LockLabel::Template(template, _) => (Some(*template), None),
        LockLabel::Key(..) => (None, None),
    };
    HeldLock {
        keys: spec.keys.clone(),
        template,
        name,
        call_site: CallLocation::of(&spec.label).to_string(),
        owner: lease.owner.tag(),
        held_for: now.since(lease.hold_began_at),
        valid_for: lease.valid_for(),
        fence: lease.fence,
        waiting: spec.store_keys.iter().filter_map(|key| queued.get(key)).sum(),
        lingers: !lease.has_holder(),
    }
}

/// `None` if all of these requests have what they requested.
fn waited_key(
    waits: &KeyWaits,
    prefix: &str,
    owners: &HashSet<Owner>,
    now: Instant,
) -> Option<WaitedKey> {
    let asking = || waits.requests.iter().filter(|(_, owner)| !owners.contains(owner));
    let waiting = waits.queued + asking().count();
    let since = waits.since.into_iter().chain(asking().map(|(since, _)| *since)).min()?;
    let key = match waits.key.as_str().strip_prefix(prefix) {
        Some(key) if !prefix.is_empty() => Key::from(key),
        _ => waits.key.clone(),
    };
    Some(WaitedKey { key, waiting, waited_for: now.since(since) })
}

#[cfg(feature = "serde")]
mod serialized {
    use super::{HeldLock, Snapshot, WaitedKey};
    use crate::base::key::Key;
    use crate::base::serialized_fields::serialized_fields;
    use crate::base::text::millis;

    serialized_fields!(Snapshot, it => {
        pool: &*it.pool,
        held: it.held,
        waiting: it.waiting,
    });

    serialized_fields!(HeldLock, it => {
        keys: it.keys.iter().map(Key::as_str).collect::<Vec<_>>(),
        template: it.template,
        name: it.name,
        call_site: it.call_site,
        owner: it.owner,
        held_ms: millis(it.held_for),
        valid_ms: millis(it.valid_for),
        fence: it.fence,
        waiting: it.waiting,
        lingers: it.lingers,
    });

    serialized_fields!(WaitedKey, it => {
        key: it.key.as_str(),
        waiting: it.waiting,
        waited_ms: millis(it.waited_for),
    });
}
