#![deny(warnings, clippy::pedantic)]

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "main", when = false)]
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), LockError> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[distributed_lock(key = "test", when = false)]
    #[tokio::test]
    async fn locked() -> Result<(), LockError> {
        Ok(())
    }
}
