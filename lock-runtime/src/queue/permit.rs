//! The right to act for the lines of keys.

use std::fmt;
use std::sync::Arc;

use crate::base::key::Key;
use crate::exec::driver::Driver;
use crate::exec::panic_boundary;
use crate::lock::acquire::run;
use crate::lock::core::Engine;
use crate::queue::wait_queue::{Next, Queue};

/// The right to ask the store for keys, usually one, to hold them and to let them go, on behalf of all that
/// wait in their lines of this process. There is one for each line. Dropped, it goes to the next, that of several keys in
/// one step: so a line is never stuck, whatever becomes of the one that acted for it.
pub(crate) struct Turn {
    engine: Arc<Engine>,
    keys: Arc<[Key]>,
    /// How the store's calls find a request for several keys.
    stance: Option<Box<Stance>>,
}

impl Turn {
    /// The turn of lines in which it is free.
    pub(crate) fn new(engine: &Arc<Engine>, keys: Arc<[Key]>) -> Self {
        Self { engine: engine.clone(), keys, stance: None }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// The key, of a turn of one.
    pub(crate) fn key(&self) -> &Key {
        &self.keys[0]
    }

    pub(crate) fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// Takes in the turn of `more`.
    pub(crate) fn add(&mut self, more: Vec<Key>) {
        if !more.is_empty() {
            self.keys = self.keys.iter().cloned().chain(more).collect();
        }
    }

    /// Passes on the turns of the keys that are not to be kept.
    pub(crate) fn keep(&mut self, is_kept: impl Fn(&Key) -> bool) {
        if self.keys.iter().all(&is_kept) {
            return;
        }
        let (kept, passed) = self.keys.iter().cloned().partition::<Vec<_>, _>(is_kept);
        self.keys = kept.into();
        drop(Self::new(&self.engine, passed.into()));
    }

    /// Has `stance` end with the turn.
    pub(crate) fn with(mut self, stance: Stance) -> Self {
        self.stance = Some(Box::new(stance));
        self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (engine, keys) = (&self.engine, &self.keys);
        if engine.is_inherited() {
            return;
        }
        let nexts = if engine.driver.is_gone() {
            engine.queue.dissolve(keys, &Driver::gone())
        } else {
            engine.queue.pass(keys)
        };
        call(engine, nexts);
    }
}

/// Gives `nexts` their turns.
pub(crate) fn call(engine: &Arc<Engine>, nexts: Vec<Next>) {
    for next in nexts {
        match next {
            Next::Line(keys) => run::start(engine, Turn::new(engine, keys)),
            // If it is not received, it comes back and calls the one behind.
            Next::Several(keys, reply) => {
                panic_boundary::answer(reply, Ok(Turn::new(engine, keys)))
            }
        }
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Turn").field(&self.keys).finish()
    }
}

/// The entries by which a request for several keys is known in the lines of all of them, while it asks the store
/// and while it holds. Dropped, they are gone.
#[derive(Debug)]
pub(crate) struct Stance {
    pub(crate) queue: Arc<Queue>,
    pub(crate) keys: Arc<[Key]>,
    pub(crate) id: u64,
}

impl Drop for Stance {
    fn drop(&mut self) {
        self.queue.stand_down(&self.keys, self.id);
    }
}
