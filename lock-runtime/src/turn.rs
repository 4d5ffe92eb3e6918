//! The right to act for the line of a key.

use std::fmt;
use std::sync::Arc;

use crate::driver::Driver;
use crate::engine::Engine;
use crate::key::Key;
use crate::pursuit;
use crate::queue::Next;

/// The right to ask the store for a key, to hold it and to let it go, on behalf of everybody in the line
/// of this process. There is one per line. Dropped, it goes to the next: so a line is never stuck,
/// whatever becomes of the one that acted for it.
pub(crate) struct Turn {
    engine: Arc<Engine>,
    key: Key,
}

impl Turn {
    /// The turn of a line in which nobody has it.
    pub(crate) fn new(engine: &Arc<Engine>, key: &Key) -> Self {
        Self { engine: engine.clone(), key: key.clone() }
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (engine, key) = (&self.engine, &self.key);
        if engine.driver.is_gone() {
            return engine.queue.dissolve(key, &Driver::gone());
        }
        match engine.queue.pass(key) {
            Next::Nobody => {}
            // If nobody receives it, it comes back and calls the one behind.
            Next::Turn(reply) => drop(reply.send(Ok(Self::new(engine, key)))),
            Next::Lease => pursuit::start(engine, Self::new(engine, key)),
        }
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Turn").field(&self.key).finish()
    }
}
