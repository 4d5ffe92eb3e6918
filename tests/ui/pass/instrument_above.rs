#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};
use tracing::instrument;

struct Service;

impl Service {
    #[instrument(skip(self), err)]
    #[distributed_lock(key = "a:<id>")]
    async fn work(&self, id: u64) -> Result<u64, LockError> {
        Ok(id)
    }
}

#[instrument]
#[distributed_lock(key = "b", on_conflict = "skip", on_error = |_| ())]
async fn unit() {}

fn main() {}
