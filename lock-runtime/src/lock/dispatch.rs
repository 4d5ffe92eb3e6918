//! Sends first requests and releases, in batches: from the driver, or from the runtime of their callers.

use std::future::Future;
use std::sync::{Arc, Weak};

use tokio::runtime::Handle;

use crate::exec::batcher::{Batcher, Flusher, InFlight};
use crate::exec::inline_task::poll_then_spawn;
use crate::lock::acquire::attempt::first_time_limit;
use crate::lock::acquire::first_request;
use crate::lock::core::PoolCore;
use crate::lock::outgoing::{FirstRequest, Outgoing};
use crate::lock::release;

/// The requests of one runtime that has a connection of its own.
pub(crate) struct CallerRequests {
    core: Weak<PoolCore>,
    runtime: Handle,
    outgoing: Batcher<Outgoing>,
}

impl PoolCore {
    /// Sends `item` from this thread, or with the next batch.
    pub(crate) fn send(self: &Arc<Self>, item: Outgoing) {
        Batcher::push(self, item, self.capabilities.local);
    }

    /// As [`send`](Self::send). The caller awaits the answer on its own runtime, over a connection there if it has one.
    pub(crate) fn send_from_caller(self: &Arc<Self>, item: Outgoing) {
        match self.of_caller() {
            Some(of_caller) => Batcher::push(&of_caller, item, false),
            None => self.send(item),
        }
    }

    fn of_caller(self: &Arc<Self>) -> Option<Arc<CallerRequests>> {
        let caller = Handle::try_current().ok()?;
        let make = |runtime: &Handle| CallerRequests {
            core: Arc::downgrade(self),
            runtime: runtime.clone(),
            outgoing: Batcher::default(),
        };
        self.backend().foreground(&caller)?.attached(make)
    }

    /// Sends `batch`, whose items are of one kind. `caller`: from its runtime.
    fn send_batch<F: Flusher<Item = Outgoing>>(
        self: &Arc<Self>,
        caller: Option<&Handle>,
        in_flight: InFlight<F>,
        batch: Vec<Outgoing>,
    ) {
        let (driver, caller) = (self.driver().runtime(), caller.map(Handle::id));
        if let Some(Outgoing::Release(_)) = batch.first() {
            let releases = batch.into_iter().filter_map(Outgoing::release).collect();
            let work = release::send_batch(self.clone(), in_flight, releases);
            return poll_then_spawn(driver, caller, work);
        }
        let mut acquires: Vec<_> = batch.into_iter().filter_map(Outgoing::acquire).collect();
        let limits = self.time_limits();
        let limit_of = |first: &FirstRequest| first_time_limit(limits, &first.waiter.spec.policy);
        let mut in_flight = Some(in_flight);
        while let Some(first) = acquires.first() {
            // Usually all have one limit. A shorter one must not cut the others off.
            let limit = limit_of(first);
            let others = acquires.extract_if(.., |first| limit_of(first) != limit).collect();
            let call = std::mem::replace(&mut acquires, others);
            let work = first_request::send_batch(self.clone(), in_flight.take(), limit, call);
            poll_then_spawn(driver, caller, work);
        }
    }
}

impl Flusher for PoolCore {
    type Item = Outgoing;

    fn batcher(&self) -> &Batcher<Outgoing> {
        &self.outgoing
    }

    fn spawn(&self, flush: impl Future<Output = ()> + Send + 'static) {
        self.driver().spawn(flush);
    }

    fn send(self: &Arc<Self>, in_flight: InFlight<Self>, batch: Vec<Outgoing>) {
        self.send_batch(None, in_flight, batch);
    }

    /// Nothing runs any more.
    fn abandon(&self, items: Vec<Outgoing>) {
        drop(items);
    }

    fn kind(item: &Outgoing) -> usize {
        item.kind()
    }
}

impl Flusher for CallerRequests {
    type Item = Outgoing;

    fn batcher(&self) -> &Batcher<Outgoing> {
        &self.outgoing
    }

    fn spawn(&self, flush: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(flush);
    }

    fn send(self: &Arc<Self>, in_flight: InFlight<Self>, batch: Vec<Outgoing>) {
        if let Some(core) = self.core.upgrade() {
            core.send_batch(Some(&self.runtime), in_flight, batch);
        }
    }

    /// The driver sends them.
    fn abandon(&self, items: Vec<Outgoing>) {
        if let Some(core) = self.core.upgrade() {
            items.into_iter().for_each(|item| core.send(item));
        }
    }

    fn kind(item: &Outgoing) -> usize {
        item.kind()
    }
}
