//! Sends batches of first requests and releases.

use std::sync::Arc;

use crate::base::sync::spawn;
use crate::exec::batcher::{Batcher, Flusher, InFlight};
use crate::exec::driver::Driver;
use crate::lock::acquire::attempt::first_time_limit;
use crate::lock::acquire::first_request;
use crate::lock::core::PoolCore;
use crate::lock::outgoing::{FirstRequest, Outgoing, PendingRelease};
use crate::lock::release;

/// The most requests of one call to the store, which answers it as a whole.
const CALL: usize = 128;

impl Flusher for PoolCore {
    type Item = Outgoing;

    fn batcher(&self) -> &Batcher<Outgoing> {
        &self.outgoing
    }

    fn driver(&self) -> &Driver {
        &self.config.driver
    }

    fn send_one(self: &Arc<Self>, in_flight: InFlight<Self>, item: Outgoing) {
        let driver = &self.config.driver;
        match item {
            Outgoing::Acquire(first) => {
                let limit = first_time_limit(self.time_limits(), &first.waiter.spec.policy);
                driver.poll_then_spawn(first_request::send_batch(in_flight, limit, vec![first]));
            }
            Outgoing::Release(pending) => {
                driver.poll_then_spawn(release::send_batch(in_flight, vec![pending]));
            }
        }
    }

    fn send_batch(self: &Arc<Self>, batch: Vec<Outgoing>) {
        let mut acquires = Vec::with_capacity(batch.len());
        let mut releases = Vec::with_capacity(batch.len());
        for item in batch {
            match item {
                Outgoing::Acquire(first) => acquires.push(first),
                Outgoing::Release(pending) => releases.push(pending),
            }
        }
        while !releases.is_empty() {
            let call: Vec<PendingRelease> = take(&mut releases);
            spawn(release::send_batch(InFlight::begin(self), call));
        }
        let limits = self.time_limits();
        let limit_of = |first: &FirstRequest| first_time_limit(limits, &first.waiter.spec.policy);
        while let Some(first) = acquires.first() {
            // Usually all have one limit. A shorter one must not cut the others off.
            let limit = limit_of(first);
            let mut others: Vec<_> =
                acquires.extract_if(.., |first| limit_of(first) != limit).collect();
            let call = take(&mut acquires);
            others.splice(0..0, acquires.drain(..));
            spawn(first_request::send_batch(InFlight::begin(self), limit, call));
            acquires = others;
        }
    }
}

/// The first [`CALL`] items of `all`.
fn take<T>(all: &mut Vec<T>) -> Vec<T> {
    if all.len() <= CALL {
        return std::mem::take(all);
    }
    let rest = all.split_off(CALL);
    std::mem::replace(all, rest)
}
