//! Sends first requests and releases: from the runtime of the caller if it has a connection of its own, else from the driver.

use std::future::Future;
use std::sync::Arc;

use tokio::runtime::{self, Handle};

use crate::base::sync::spawn;
use crate::exec::batcher::{Batcher, Flusher, InFlight};
use crate::exec::driver::Driver;
use crate::exec::foreground::ForegroundPlace;
use crate::exec::inline_task::poll_then_spawn;
use crate::lock::acquire::first_request;
use crate::lock::acquire::time_limits::first_time_limit;
use crate::lock::core::PoolCore;
use crate::lock::outgoing::{FirstRequest, Outgoing, OutgoingBatch};
use crate::lock::release;

impl PoolCore {
    /// Sends `item` from this thread, or with the next batch.
    pub(crate) fn send(self: &Arc<Self>, item: Outgoing) {
        Batcher::push(self, item, self.capabilities.local);
    }

    /// Like [`send`](Self::send). The caller awaits the answer on its own runtime, over a connection there if it has one.
    ///
    /// Under load it joins the next batch of its runtime.
    pub(crate) fn send_from_caller(self: &Arc<Self>, item: Outgoing) {
        let Some(caller) = self.caller() else { return self.send(item) };
        let foreground = || self.backend().foreground(&caller);
        if !self.outgoing.prefers_batch() {
            match foreground() {
                Some(ForegroundPlace::Alone(in_flight)) => {
                    return self.send_now(Some(caller.id()), in_flight, item);
                }
                Some(ForegroundPlace::InBatch) => {}
                None => return self.send(item),
            }
        }
        if let Err(item) = Batcher::push_on(self, &caller, item, true, || foreground().is_some()) {
            self.send(item);
        }
    }

    /// Like [`send`](Self::send), where no caller awaits the answer: its runtime may stay unpolled for long. Under load the
    /// item joins the next batch of the runtime, which the driver sends if the runtime does not.
    pub(crate) fn send_unawaited(self: &Arc<Self>, item: Outgoing) {
        let caller = if self.outgoing.prefers_batch() { self.caller() } else { None };
        let left = match caller {
            Some(caller) => {
                let has_connection = || self.backend().foreground(&caller).is_some();
                Batcher::push_on(self, &caller, item, false, has_connection).err()
            }
            None => Some(item),
        };
        if let Some(item) = left {
            self.send(item);
        }
    }

    /// The runtime of this thread, if its requests may have a connection of their own.
    fn caller(&self) -> Option<Handle> {
        if !self.config.connection_per_runtime {
            return None;
        }
        Handle::try_current().ok()
    }

    /// Starts `work` from a thread of the runtime `caller`, or of the driver.
    fn start_work(
        &self,
        caller: Option<runtime::Id>,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        match caller {
            Some(_) => poll_then_spawn(self.driver().runtime(), caller, work),
            None => spawn(work),
        }
    }

    /// Sends `item` from this thread, of the runtime `caller`. `in_flight` is dropped when it is answered.
    fn send_now(
        self: &Arc<Self>,
        caller: Option<runtime::Id>,
        in_flight: impl Send + 'static,
        item: Outgoing,
    ) {
        let (driver, core) = (self.driver().runtime(), self.clone());
        match item {
            Outgoing::Acquire(first) => {
                let limit = first_time_limit(self.time_limits(), &first.waiter.spec.policy);
                let work = first_request::send_batch(core, in_flight, limit, vec![first]);
                poll_then_spawn(driver, caller, work);
            }
            Outgoing::Release(pending) => {
                poll_then_spawn(
                    driver,
                    caller,
                    release::send_batch(core, in_flight, vec![pending]),
                );
            }
        }
    }
}

impl Flusher for PoolCore {
    type Batch = OutgoingBatch;

    fn batcher(&self) -> &Batcher<OutgoingBatch> {
        &self.outgoing
    }

    fn driver(&self) -> &Driver {
        &self.config.driver
    }

    fn send_one(self: &Arc<Self>, in_flight: InFlight<Self>, item: Outgoing) {
        self.send_now(None, in_flight, item);
    }

    fn send_batch(self: &Arc<Self>, caller: Option<runtime::Id>, batch: OutgoingBatch) {
        let OutgoingBatch { mut acquires, releases } = batch;
        let limits = self.time_limits();
        let limit_of = |first: &FirstRequest| first_time_limit(limits, &first.waiter.spec.policy);
        while let Some(first) = acquires.first() {
            // Usually all have the same limit. A shorter one must not cut the others off.
            let limit = limit_of(first);
            let others = acquires.extract_if(.., |first| limit_of(first) != limit).collect();
            let call = std::mem::replace(&mut acquires, others);
            let in_flight = InFlight::begin(self, call.len());
            let work = first_request::send_batch(self.clone(), in_flight, limit, call);
            self.start_work(caller, work);
        }
        if !releases.is_empty() {
            let in_flight = InFlight::begin(self, releases.len());
            let work = release::send_batch(self.clone(), in_flight, releases);
            self.start_work(caller, work);
        }
    }
}
