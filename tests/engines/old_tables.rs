//! Tables that are dropped under pools that serve. The column for a text about the owner: missing, as in tables of an older version;
//! dropped or altered under such pools; and pools that name it beside pools that do not.

use lock_runtime::{LockPool, OwnerInfo};
use lock_tests::prelude::*;
use lock_tests::{SqlServer, eventually_async};

mod postgres {
    use super::*;

    #[tokio::test]
    async fn tables_without_the_column_keep_locks() {
        without_the_column(SqlServer::postgres()).await;
    }

    #[tokio::test]
    async fn pools_with_and_without_the_column_exclude_each_other() {
        both_versions(SqlServer::postgres()).await;
    }

    #[tokio::test]
    async fn a_column_that_changes_under_a_pool_fails_no_lock() {
        changed_column(SqlServer::postgres(), ["ADD COLUMN info integer", "ADD COLUMN info text"])
            .await;
    }

    #[tokio::test]
    async fn tables_that_are_dropped_are_made_again() {
        dropped_tables(SqlServer::postgres()).await;
    }
}

mod mysql {
    use super::*;

    #[tokio::test]
    async fn tables_without_the_column_keep_locks() {
        without_the_column(SqlServer::mysql()).await;
    }

    #[tokio::test]
    async fn pools_with_and_without_the_column_exclude_each_other() {
        both_versions(SqlServer::mysql()).await;
    }

    #[tokio::test]
    async fn a_column_that_changes_under_a_pool_fails_no_lock() {
        let too_short = "ADD COLUMN info varbinary(10)";
        changed_column(SqlServer::mysql(), ["ADD COLUMN info integer", too_short]).await;
    }

    #[tokio::test]
    async fn tables_that_are_dropped_are_made_again() {
        dropped_tables(SqlServer::mysql()).await;
    }
}

/// Makes the tables of an older version. Returns the URL for pools that leave them as they are.
async fn old_tables(server: &SqlServer) -> String {
    let pool = LockPool::connect(&server.url()).await.unwrap();
    pool.shutdown(DEADLINE).await;
    server.session().await.run("ALTER TABLE lock_lease DROP COLUMN info").await;
    server.url().replace("?create=on", "")
}

/// The migration that the documents name.
async fn add_column(server: &SqlServer) {
    let add = match server {
        SqlServer::Postgres(_) => "ALTER TABLE lock_lease ADD COLUMN IF NOT EXISTS info bytea",
        SqlServer::Mysql(_) => "ALTER TABLE lock_lease ADD COLUMN info varbinary(255)",
    };
    server.session().await.run(add).await;
}

async fn info(pool: &LockPool, key: &str) -> Option<OwnerInfo> {
    pool.inspect(key).await.unwrap().holder.expect("it is held").info
}

async fn without_the_column(server: SqlServer) {
    let url = old_tables(&server).await;
    let [one, other] = [patient(&url, ms(20_000)).await, patient(server.url(), ms(20_000)).await];
    keep_locks(&one, &other).await;
    let guard = one.lock("order:1").acquire().await.unwrap();
    assert_eq!(info(&other, "order:1").await, None);
    guard.release().await.unwrap();
    add_column(&server).await;
    keep_locks(&one, &other).await;
    let later = patient(&url, ms(20_000)).await;
    let guard = later.lock("order:1").acquire().await.unwrap();
    let call_site = format!("{}:{}", file!(), line!() - 1);
    let told = info(&later, "order:1").await.unwrap();
    assert_eq!((told.process_id, told.call_site), (std::process::id(), Some(call_site)));
    guard.release().await.unwrap();
}

/// Each request for one key and for several, with and without a wait.
async fn keep_locks(one: &LockPool, other: &LockPool) {
    let guard = one.lock("order:1").acquire().await.unwrap();
    assert!(other.lock("order:1").try_acquire().await.unwrap().is_none());
    let waiting = acquire_in_task(other, "order:1");
    until_waiting(one, "order:1").await;
    guard.release().await.unwrap();
    joined("the other", waiting).await.1.release().await.unwrap();
    let several = one.lock_all(["order:1", "order:2"]).acquire().await.unwrap();
    assert!(other.lock("order:2").try_acquire().await.unwrap().is_none());
    several.release().await.unwrap();
}

/// The column is dropped under pools that serve, and comes back in another form.
async fn changed_column(server: SqlServer, others: [&str; 2]) {
    let url = server.url();
    LockPool::connect(&url).await.unwrap().shutdown(DEADLINE).await;
    let mut session = server.session().await;
    for other_column in others {
        let connect = || patient(&url, ms(20_000));
        let [one, other] = [connect().await, connect().await];
        // The first pool holds a key meanwhile, the second one is in its first use behind the change.
        let held = one.lock("order:0").acquire().await.unwrap();
        assert!(info(&one, "order:0").await.is_some());
        session.run("ALTER TABLE lock_lease DROP COLUMN info").await;
        keep_locks(&one, &other).await;
        assert_eq!(info(&other, "order:0").await, None);
        held.verify().await.unwrap();
        session.run(&format!("ALTER TABLE lock_lease {other_column}")).await;
        let [third, fourth] = [connect().await, connect().await];
        keep_locks(&third, &fourth).await;
        keep_locks(&one, &fourth).await;
        assert_eq!(info(&third, "order:0").await, None);
        held.release().await.unwrap();
        session.run("ALTER TABLE lock_lease DROP COLUMN info").await;
        add_column(&server).await;
    }
    let pool = patient(&url, ms(20_000)).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    assert!(info(&pool, "order:1").await.is_some());
    guard.release().await.unwrap();
}

async fn dropped_tables(server: SqlServer) {
    let pool = LockPool::connect(&server.url()).await.unwrap();
    cycle(&pool, "order:1").await;
    server.session().await.run("DROP TABLE lock_lease, lock_queue").await;
    eventually_async(DEADLINE, "the tables are there again", async || {
        pool.lock("order:1").wait(ms(0)).acquire().await.is_ok()
    })
    .await;
}

async fn both_versions(server: SqlServer) {
    let url = old_tables(&server).await;
    let old = patient(&url, ms(20_000)).await;
    let key = "order:1";
    // From here on its statements leave the column out.
    cycle(&old, key).await;
    add_column(&server).await;
    let new = patient(server.url(), ms(20_000)).await;
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

async fn until_waiting(pool: &LockPool, key: &str) {
    eventually_async(DEADLINE, "an owner waits", async || {
        pool.inspect(key).await.unwrap().waiting == Some(1)
    })
    .await;
}
