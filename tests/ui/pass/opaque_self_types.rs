#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

trait Job {
    type Output;

    fn id(&self) -> u64;

    #[distributed_lock(key = "job:<self.id()>")]
    async fn run(&self, with: impl Fn(u64) -> Self::Output) -> Result<Self::Output, LockError>
    where
        Self: Sized,
    {
        Ok(with(self.id()))
    }
}

struct Nightly;

impl Job for Nightly {
    type Output = Self;

    fn id(&self) -> u64 {
        1
    }
}

fn main() {}
