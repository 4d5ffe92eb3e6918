#![deny(warnings, clippy::pedantic)]

use lock_runtime::{LockError, LockPool, distributed_lock};

fn locks() -> LockPool {
    unimplemented!("the calls here need no lock")
}

/// The pool is there before the body runs.
#[distributed_lock(key = "main", when = false, pool = locks())]
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), LockError> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[distributed_lock(key = "test", when = false, pool = locks())]
    #[tokio::test]
    async fn locked() -> Result<(), LockError> {
        Ok(())
    }
}
