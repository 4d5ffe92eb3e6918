//! Tables of an older version, without the column for a text about the owner; and processes of both versions at one store.

use lock_runtime::{LockPool, OwnerInfo, Wait};
use lock_tests::SqlServer;
use lock_tests::prelude::*;
use tokio::task::JoinSet;

mod postgres {
    use super::*;

    #[tokio::test]
    async fn tables_without_the_column_keep_locks() {
        without_the_column(SqlServer::postgres()).await;
    }

    #[tokio::test]
    async fn processes_with_and_without_the_column_exclude_each_other() {
        both_versions(SqlServer::postgres()).await;
    }

    /// `ALTER TABLE` would wait for the transaction, and all statements of other processes for it.
    #[tokio::test]
    async fn a_table_in_use_keeps_its_columns() {
        table_in_use(SqlServer::postgres()).await;
    }
}

mod mysql {
    use super::*;

    #[tokio::test]
    async fn tables_without_the_column_keep_locks() {
        without_the_column(SqlServer::mysql()).await;
    }

    #[tokio::test]
    async fn processes_with_and_without_the_column_exclude_each_other() {
        both_versions(SqlServer::mysql()).await;
    }

    #[tokio::test]
    async fn a_table_in_use_keeps_its_columns() {
        table_in_use(SqlServer::mysql()).await;
    }
}

/// Makes the tables of an older version. Returns the URL for pools that leave them as they are.
async fn old_tables(server: &SqlServer) -> String {
    let pool = LockPool::connect(&server.url()).await.unwrap();
    pool.shutdown(DEADLINE).await;
    server.session().await.run("ALTER TABLE lock_lease DROP COLUMN info").await;
    server.url().replace("?create=on", "")
}

async fn info(pool: &LockPool, key: &str) -> Option<OwnerInfo> {
    pool.inspect(key).await.unwrap().holder.expect("it is held").info
}

async fn without_the_column(server: SqlServer) {
    let url = old_tables(&server).await;
    let [one, other] = [patient(&url, ms(20_000)).await, patient(&url, ms(20_000)).await];
    let guard = one.lock("order:1").acquire().await.unwrap();
    assert_eq!(info(&other, "order:1").await, None);
    let waiting = acquire_in_task(&other, "order:1");
    until_waiting(&one, "order:1").await;
    guard.release().await.unwrap();
    joined("the other", waiting).await.1.release().await.unwrap();
    let several = one.lock_all(["order:1", "order:2"]).acquire().await.unwrap();
    assert!(other.lock("order:2").try_acquire().await.unwrap().is_none());
    several.release().await.unwrap();
    // Many processes start at once with the right to change the tables.
    let mut starting = JoinSet::new();
    for _ in 0..6 {
        starting.spawn(LockPool::builder(server.url()).connect());
    }
    for pool in starting.join_all().await {
        let pool = pool.unwrap();
        let guard = pool.lock("order:3").wait(Wait::Forever).acquire().await.unwrap();
        let info = info(&pool, "order:3").await.unwrap();
        assert_eq!((info.process_id, info.call_site), (std::process::id(), None));
        guard.release().await.unwrap();
    }
    let guard = one.lock("order:3").acquire().await.unwrap();
    assert!(guard.verify().await.is_ok(), "statements of before go on");
    guard.release().await.unwrap();
}

async fn both_versions(server: SqlServer) {
    let url = old_tables(&server).await;
    let old = patient(&url, ms(20_000)).await;
    // It adds the column, of which the statements of the other pool know nothing.
    let new = patient(server.url(), ms(20_000)).await;
    let key = "order:1";
    let mut guard = old.lock(key).acquire().await.unwrap();
    for round in 0..6 {
        let (holding, next) = if round % 2 == 0 { (&old, &new) } else { (&new, &old) };
        assert!(next.lock(key).try_acquire().await.unwrap().is_none());
        let told = info(&new, key).await;
        let is_new = round % 2 == 1;
        assert_eq!(told.map(|it| it.process_id), is_new.then(std::process::id), "round {round}");
        let waiting = acquire_in_task(next, key);
        until_waiting(holding, key).await;
        let fence = guard.fence();
        guard.release().await.unwrap();
        guard = joined("the next", waiting).await.1;
        assert!(guard.fence() > fence && guard.verify().await.is_ok());
    }
    guard.release().await.unwrap();
    // A row that a process of the new version leaves, taken over without a hand-off.
    new.lock(key).acquire().await.unwrap().release().await.unwrap();
    let guard = old.lock(key).acquire().await.unwrap();
    assert_eq!(info(&new, key).await, None);
    guard.release().await.unwrap();
    let several = old.lock_all([key, "order:2"]).acquire().await.unwrap();
    assert_eq!(info(&new, key).await, None);
    several.release().await.unwrap();
    let several = new.lock_all([key, "order:2"]).acquire().await.unwrap();
    for key in [key, "order:2"] {
        assert_eq!(info(&new, key).await.map(|it| it.process_id), Some(std::process::id()));
    }
    several.release().await.unwrap();
}

async fn table_in_use(server: SqlServer) {
    let url = old_tables(&server).await;
    let old = patient(&url, ms(20_000)).await;
    let mut session = server.session().await;
    session.begin().await;
    session.rows("SELECT fence FROM lock_lease").await;
    let new = patient(server.url(), ms(20_000)).await;
    let guard = new.lock("order:1").acquire().await.unwrap();
    assert!(old.lock("order:1").try_acquire().await.unwrap().is_none());
    assert_eq!(info(&new, "order:1").await, None);
    guard.release().await.unwrap();
    session.run("COMMIT").await;
    let later = patient(server.url(), ms(20_000)).await;
    let guard = later.lock("order:1").acquire().await.unwrap();
    assert!(info(&later, "order:1").await.is_some());
    guard.release().await.unwrap();
}

async fn until_waiting(pool: &LockPool, key: &str) {
    lock_tests::eventually_async(DEADLINE, "an owner waits", async || {
        pool.inspect(key).await.unwrap().waiting == Some(1)
    })
    .await;
}
