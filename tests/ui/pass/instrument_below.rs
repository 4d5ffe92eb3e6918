#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};
use tracing::instrument;

struct Service;

impl Service {
    #[distributed_lock(key = "a:<id>")]
    #[instrument(skip(self), err)]
    async fn work(&self, id: u64) -> Result<u64, LockError> {
        Ok(id)
    }
}

#[distributed_lock(key = "b", on_conflict = "skip", on_error = |_| ())]
#[instrument]
async fn unit() {}

fn main() {}
