//! The opening of a connection on the runtime of callers.

use std::sync::Arc;

use tokio::runtime::{self, Handle};

use crate::backend::redis::conn::connection::{ConnectionState, LinkState};
use crate::backend::redis::conn::foreground::{ForegroundLink, OpenOutcome};
use crate::base::clock::Instant;
use crate::base::process::Process;

/// A connection for a caller's runtime that is being opened. Dropping it reports a failure.
struct OpeningForeground {
    state: Arc<ConnectionState>,
    caller: runtime::Id,
    /// When the driver's connection was opened.
    generation: Instant,
    opened: Option<ForegroundLink>,
    process: Process,
}

impl Drop for OpeningForeground {
    fn drop(&mut self) {
        let opened = OpenOutcome::new(self.opened.take());
        if !self.process.is_current() {
            // The parent process has the socket, and perhaps holds the mutex.
            Box::leak(Box::new((opened, self.state.clone())));
            return;
        }
        let now = self.state.clock.now();
        let unused = match &mut *self.state.link.lock() {
            LinkState::Up(link) if link.up_since == self.generation => {
                link.foregrounds.opened(self.caller, opened, now)
            }
            LinkState::Up(_) | LinkState::Down(_) => opened.link(),
        };
        // The mutex is released by now: the end of a connection wakes tasks.
        drop(unused);
    }
}

impl ConnectionState {
    /// Opens a connection on the runtime `caller`, beside the one that was opened at `generation`.
    pub(super) fn open_foreground(self: &Arc<Self>, caller: &Handle, generation: Instant) {
        let (state, process) = (self.clone(), Process::current());
        let mut opening =
            OpeningForeground { state, caller: caller.id(), generation, opened: None, process };
        // The caller's runtime may have no timers.
        let limit = {
            let _context = self.runtime.enter();
            Box::pin(tokio::time::sleep(self.limits.connect))
        };
        caller.spawn(async move {
            let state = opening.state.clone();
            opening.opened = tokio::select! {
                opened = state.foreground() => opened,
                () = limit => None,
            };
            drop(opening);
        });
    }
}
