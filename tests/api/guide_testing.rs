//! The test module of the guide's chapter on testing, word for word.

use std::time::Duration;

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:<id>", ttl = "10s", wait = "0s")]
async fn settle(id: u64) -> Result<&'static str, LockError> {
    tokio::time::sleep(Duration::from_secs(60)).await;
    Ok("settled")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lock_runtime::testing::{self, Fault, FaultPlan, FaultyBackend, with_pool};
    use lock_runtime::{ErrorKind, LockError, LockPool, Progress};

    use super::settle;

    /// A pool on the clock of the test, and the faults of its store.
    async fn pool() -> Result<(LockPool, FaultPlan), LockError> {
        let (store, faults) = FaultyBackend::new(testing::open_backend("memory://").await?);
        let pool = LockPool::with_backend(store).on_current_runtime().connect().await?;
        Ok((pool, faults))
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_is_settled() -> Result<(), LockError> {
        let (pool, _) = pool().await?;
        with_pool("default", pool, async {
            // Longer than the ttl: the lease is renewed.
            assert_eq!(settle(42).await?, "settled");
            Ok(())
        })
        .await
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_in_work_is_a_conflict() -> Result<(), LockError> {
        let (pool, _) = pool().await?;
        with_pool("default", pool.clone(), async {
            let _other = pool.lock("order:42").acquire().await?;
            assert!(settle(42).await.unwrap_err().is_conflict());
            // Tasks of this runtime have the pool, too.
            assert_eq!(tokio::spawn(settle(43)).await.unwrap()?, "settled");
            Ok(())
        })
        .await
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_is_cancelled_when_its_lock_is_lost() -> Result<(), LockError> {
        let (pool, faults) = pool().await?;
        with_pool("default", pool, async {
            let settling = tokio::spawn(settle(42));
            tokio::time::sleep(Duration::from_secs(1)).await;
            faults.always(Fault::LoseReply);
            let error = settling.await.unwrap().unwrap_err();
            assert_eq!((error.kind(), error.progress()), (ErrorKind::Lost, Progress::Unfinished));
            Ok(())
        })
        .await
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_store_nothing_runs() -> Result<(), LockError> {
        let (pool, faults) = pool().await?;
        with_pool("default", pool, async {
            faults.always(Fault::LoseRequest);
            let error = settle(42).await.unwrap_err();
            assert_eq!(
                (error.kind(), error.progress()),
                (ErrorKind::Backend, Progress::NotStarted)
            );
            Ok(())
        })
        .await
    }

    #[tokio::test(start_paused = true)]
    async fn the_lock_of_a_crashed_holder_expires() -> Result<(), LockError> {
        let (pool, _) = pool().await?;
        with_pool("default", pool.clone(), async {
            let crashed =
                pool.lock("order:42").ttl(Duration::from_secs(30)).renew(false).acquire().await?;
            tokio::time::sleep(Duration::from_secs(31)).await;
            assert!(!crashed.is_held());
            assert_eq!(settle(42).await?, "settled");
            Ok(())
        })
        .await
    }
}
