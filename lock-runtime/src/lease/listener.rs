//! A listener of the end of a lease.

use std::sync::Arc;
use std::task::{Context, Poll};

use crate::base::process::Process;
use crate::lease::lease::Lease;
use crate::lease::lease_state::Ending;

/// One listener of a lease. Dropping it removes its waker, except in a process that was forked from the creator's.
#[derive(Debug)]
pub(crate) struct Listener {
    lease: Arc<Lease>,
    /// `None` before the first poll.
    id: Option<u64>,
    process: Process,
}

impl Listener {
    pub(crate) fn new(lease: &Arc<Lease>) -> Self {
        Self { lease: lease.clone(), id: None, process: Process::current() }
    }

    /// Resolves when the lease has ended, and then every time.
    pub(crate) fn poll(&mut self, cx: &Context<'_>) -> Poll<Ending> {
        self.lease.poll_ended(&mut self.id, cx)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.process.is_current() {
            self.lease.forget_listener(self.id);
        }
    }
}
