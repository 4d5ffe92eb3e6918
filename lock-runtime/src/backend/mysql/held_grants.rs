//! The grants of this process, by key.

use std::collections::HashMap;

use crate::backend::Owner;
use crate::base::clock::Instant;
use crate::base::key::Key;

/// The keys that this process holds. A grant is forgotten after its end.
#[derive(Debug, Default)]
pub(crate) struct HeldGrants {
    by_key: HashMap<Key, Vec<HeldGrant>>,
    /// How many of the grants are not known to be contended.
    quiet: usize,
}

#[derive(Debug)]
struct HeldGrant {
    owner: Owner,
    until: Instant,
    /// Whether its pool knows that other owners are queued.
    is_contended: bool,
}

impl HeldGrants {
    /// The owner holds the key until this time.
    pub(crate) fn add(&mut self, key: &Key, owner: Owner, until: Instant, is_contended: bool) {
        let grants = self.by_key.entry(key.clone()).or_default();
        let Some(held) = grants.iter_mut().find(|held| held.owner == owner) else {
            grants.push(HeldGrant { owner, until, is_contended });
            self.quiet += usize::from(!is_contended);
            return;
        };
        held.until = until;
        if is_contended && !held.is_contended {
            held.is_contended = true;
            self.quiet -= 1;
        }
    }

    pub(crate) fn remove(&mut self, key: &Key, owner: Owner) {
        let Some(grants) = self.by_key.get_mut(key) else { return };
        let quiet = |grants: &[HeldGrant]| grants.iter().filter(|it| !it.is_contended).count();
        let before = quiet(grants);
        grants.retain(|held| held.owner != owner);
        self.quiet -= before - quiet(grants);
        if grants.is_empty() {
            self.by_key.remove(key);
        }
    }

    /// The lease was renewed.
    pub(crate) fn renewed(&mut self, key: &Key, owner: Owner, until: Instant) {
        let grants = self.by_key.get_mut(key).into_iter().flatten();
        for held in grants.filter(|held| held.owner == owner) {
            held.until = until;
        }
    }

    /// Whether the pool did not know yet that other owners are queued for this key.
    pub(crate) fn contended(&mut self, key: &Key) -> bool {
        let before = self.quiet;
        let grants = self.by_key.get_mut(key).into_iter().flatten();
        for held in grants.filter(|held| !held.is_contended) {
            held.is_contended = true;
            self.quiet -= 1;
        }
        self.quiet < before
    }

    /// Forgets the grants that are over.
    pub(crate) fn prune(&mut self, now: Instant) {
        let quiet = &mut self.quiet;
        self.by_key.retain(|_, grants| {
            grants.retain(|held| {
                let is_over = held.until <= now;
                *quiet -= usize::from(is_over && !held.is_contended);
                !is_over
            });
            !grants.is_empty()
        });
    }

    /// Whether there is a grant that is not known to be contended.
    pub(crate) fn has_quiet(&self) -> bool {
        self.quiet > 0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const T: Instant = Instant::from_nanos(1_000_000_000_000);

    fn after(millis: u64) -> Instant {
        T + Duration::from_millis(millis)
    }

    #[test]
    fn a_key_is_news_once_for_all_its_owners() {
        let mut held = HeldGrants::default();
        let [one, other] = [Owner::random().unwrap(), Owner::random().unwrap()];
        let [key, quiet] = [Key::from("k"), Key::from("quiet")];
        held.add(&key, one, after(10), false);
        held.add(&key, other, after(20), false);
        held.add(&quiet, one, after(10), false);
        assert!(held.contended(&key) && !held.contended(&key));
        assert!(!held.contended(&Key::from("another")));
        assert!(held.has_quiet());
        held.remove(&quiet, other);
        assert!(held.has_quiet());
        held.remove(&quiet, one);
        assert!(!held.has_quiet());
        // A repeated grant is still known to be contended.
        held.add(&key, one, after(30), false);
        assert!(!held.has_quiet() && !held.contended(&key));
        held.add(&quiet, one, after(30), false);
        held.add(&quiet, one, after(30), true);
        assert!(!held.has_quiet() && !held.contended(&quiet));
    }

    #[test]
    fn grants_are_forgotten_behind_their_end() {
        let mut held = HeldGrants::default();
        let (key, owner) = (Key::from("k"), Owner::random().unwrap());
        held.add(&key, owner, after(10), false);
        held.prune(after(9));
        assert!(held.has_quiet());
        held.renewed(&key, owner, after(20));
        held.prune(after(19));
        assert!(held.has_quiet());
        held.prune(after(20));
        assert!(!held.has_quiet() && held.by_key.is_empty());
    }
}
