//! Sends batches of first requests and releases.

use std::sync::Arc;

use crate::base::sync::spawn;
use crate::exec::batcher::{Batcher, Flusher, InFlight};
use crate::exec::driver::Driver;
use crate::lock::acquire::attempt::first_time_limit;
use crate::lock::acquire::first_request;
use crate::lock::core::PoolCore;
use crate::lock::outgoing::{FirstRequest, Outgoing};
use crate::lock::release;

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

    fn send_batch(self: &Arc<Self>, in_flight: InFlight<Self>, batch: Vec<Outgoing>) {
        if let Some(Outgoing::Release(_)) = batch.first() {
            let releases = batch.into_iter().filter_map(Outgoing::release).collect();
            return spawn(release::send_batch(in_flight, releases));
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
            let in_flight = in_flight.take().unwrap_or_else(|| InFlight::begin(self));
            spawn(first_request::send_batch(in_flight, limit, call));
        }
    }

    fn kind(item: &Outgoing) -> usize {
        match item {
            Outgoing::Acquire(_) => 0,
            Outgoing::Release(_) => 1,
        }
    }
}
