//! The permit to act for a key.

use std::fmt;
use std::sync::Arc;

use crate::base::key::Key;

/// Receives permits that were dropped.
pub(crate) trait PermitHandler: Send + Sync {
    /// The permits of `keys` are free: passes them to the next waiters.
    fn permits_dropped(self: Arc<Self>, keys: &[Key]);
}

/// The exclusive right, in this process, to send requests for keys, usually one, and to hold and release them. It is used
/// on behalf of all waiters in their queues. There is at most one permit per key. A request for several keys that waits at
/// the store needs none.
///
/// Dropping it passes each key to its next waiter, all keys in one step. So a queue cannot stall if the owner of its
/// permit fails.
pub(crate) struct KeyPermit {
    /// `None` while it drops.
    handler: Option<Arc<dyn PermitHandler>>,
    keys: Arc<[Key]>,
    /// Dropped with the permit.
    attached: Option<Box<dyn Attached>>,
}

/// A value that lives as long as a permit.
pub(crate) trait Attached: fmt::Debug + Send + Sync {}

impl KeyPermit {
    /// The permit of keys whose queues have just given it out.
    pub(crate) fn new(handler: Arc<dyn PermitHandler>, keys: Arc<[Key]>) -> Self {
        Self { handler: Some(handler), keys, attached: None }
    }

    /// The key of a permit for one key.
    pub(crate) fn key(&self) -> &Key {
        &self.keys[0]
    }

    pub(crate) fn keys(&self) -> &[Key] {
        &self.keys
    }

    pub(crate) fn shared_keys(&self) -> &Arc<[Key]> {
        &self.keys
    }

    /// Merges the permits of `more`.
    pub(crate) fn add(&mut self, more: Vec<Key>) {
        if !more.is_empty() {
            self.keys = self.keys.iter().cloned().chain(more).collect();
        }
    }

    /// Drops the permits of the keys that `is_kept` excludes.
    pub(crate) fn retain(&mut self, is_kept: impl Fn(&Key) -> bool) {
        if self.keys.iter().all(&is_kept) {
            return;
        }
        let (kept, dropped) = self.keys.iter().cloned().partition::<Vec<_>, _>(is_kept);
        self.keys = kept.into();
        let (keys, attached) = (dropped.into(), None);
        drop(Self { handler: self.handler.clone(), keys, attached });
    }

    /// Drops `attached` together with the permit.
    pub(crate) fn with(mut self, attached: impl Attached + 'static) -> Self {
        self.attached = Some(Box::new(attached));
        self
    }
}

impl Drop for KeyPermit {
    fn drop(&mut self) {
        if let Some(handler) = self.handler.take() {
            handler.permits_dropped(&self.keys);
        }
    }
}

impl fmt::Debug for KeyPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KeyPermit").field(&self.keys).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    const ONE: Key = Key::from_static("1");
    const TWO: Key = Key::from_static("2");
    const THREE: Key = Key::from_static("3");

    /// The keys of each call.
    #[derive(Default)]
    struct Dropped(Mutex<Vec<Vec<Key>>>);

    impl PermitHandler for Dropped {
        fn permits_dropped(self: Arc<Self>, keys: &[Key]) {
            self.0.lock().unwrap().push(keys.to_vec());
        }
    }

    impl Dropped {
        fn take(&self) -> Vec<Vec<Key>> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    #[test]
    fn a_permit_passes_all_its_keys_on_in_one_step() {
        let dropped = Arc::new(Dropped::default());
        let mut permit = KeyPermit::new(dropped.clone(), [ONE].into());
        assert_eq!(
            (permit.key(), format!("{permit:?}")),
            (&ONE, format!("KeyPermit({:?})", [ONE]))
        );
        permit.add(Vec::new());
        assert_eq!(permit.keys(), [ONE]);
        permit.add(vec![TWO, THREE]);
        assert_eq!(permit.keys(), [ONE, TWO, THREE]);
        assert!(dropped.take().is_empty());
        drop(permit);
        assert_eq!(dropped.take(), [[ONE, TWO, THREE]]);
    }

    #[test]
    fn keys_that_are_not_kept_are_passed_on_at_once() {
        let dropped = Arc::new(Dropped::default());
        let mut permit = KeyPermit::new(dropped.clone(), [ONE, TWO, THREE].into());
        permit.retain(|_| true);
        assert!(dropped.take().is_empty());
        permit.retain(|key| *key == TWO);
        assert_eq!((permit.keys(), dropped.take()), (&[TWO][..], vec![vec![ONE, THREE]]));
        drop(permit);
        assert_eq!(dropped.take(), [[TWO]]);
    }

    #[test]
    fn what_is_attached_is_dropped_with_the_permit() {
        #[derive(Debug)]
        struct Value(#[allow(dead_code)] Arc<()>);

        impl Attached for Value {}

        let value = Arc::new(());
        let permit = KeyPermit::new(Arc::new(Dropped::default()), [ONE].into());
        let permit = permit.with(Value(value.clone()));
        assert_eq!(Arc::strong_count(&value), 2);
        drop(permit);
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
