//! Fence gates in databases: no write with a lower fence behind one with a higher fence.

use lock_runtime::{SqlDialect, SqlFenceGate};
use lock_tests::prelude::*;
use lock_tests::{SqlServer, SqlSession};
use tokio::task::JoinSet;

const WRITERS: i64 = 64;
const EACH: i64 = 12;

mod postgres {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn no_lower_fence_is_admitted_behind_a_higher_one_from_64_writers() {
        writers(SqlServer::postgres(), SqlDialect::Postgres).await;
    }

    #[tokio::test]
    async fn a_stale_fence_is_refused_and_an_equal_one_is_not() {
        one_writer(SqlServer::postgres(), SqlDialect::Postgres).await;
    }
}

mod mysql {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn no_lower_fence_is_admitted_behind_a_higher_one_from_64_writers() {
        writers(SqlServer::mysql(), SqlDialect::MySql).await;
    }

    #[tokio::test]
    async fn a_stale_fence_is_refused_and_an_equal_one_is_not() {
        one_writer(SqlServer::mysql(), SqlDialect::MySql).await;
    }

    /// The snapshot of the transaction has the writer's own fence as the highest one.
    #[tokio::test]
    async fn a_snapshot_of_before_the_higher_fence_admits_nothing() {
        let server = SqlServer::mysql();
        let gate = SqlFenceGate::new(SqlDialect::MySql);
        let (mut stale, mut later) = (server.session().await, server.session().await);
        later.run(gate.create_table()).await;
        assert!(admits(&mut later, gate, "order:1", 33).await.unwrap());
        stale.run("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ").await;
        stale.begin().await;
        assert_eq!(stale.rows("SELECT fence FROM fence_gate").await, ["33"]);
        assert!(admits(&mut later, gate, "order:1", 34).await.unwrap());
        assert_eq!(stale.rows("SELECT fence FROM fence_gate").await, ["33"]);
        assert!(!admits(&mut stale, gate, "order:1", 33).await.unwrap());
    }
}

async fn one_writer(server: SqlServer, dialect: SqlDialect) {
    let gate = SqlFenceGate::new(dialect);
    let mut session = server.session().await;
    session.run(gate.create_table()).await;
    session.run(gate.create_table()).await;
    for (resource, fence, expected) in [
        ("order:1", 33, true),
        ("order:1", 33, true),
        ("order:1", 32, false),
        ("ORDER:1", 1, true),
        ("order:1 ", 1, true),
        ("order:1", i64::MAX, true),
        ("order:1", 34, false),
    ] {
        let admitted = admits(&mut session, gate, resource, fence).await.unwrap();
        assert_eq!(admitted, expected, "{resource} {fence}");
    }
    // A write that is rolled back leaves no fence.
    session.begin().await;
    assert!(admits(&mut session, gate, "order:2", 40).await.unwrap());
    session.run("ROLLBACK").await;
    assert!(admits(&mut session, gate, "order:2", 39).await.unwrap());
}

async fn writers(server: SqlServer, dialect: SqlDialect) {
    let gate = SqlFenceGate::new(dialect);
    let mut session = server.session().await;
    session.run(gate.create_table()).await;
    let numbered = match dialect {
        SqlDialect::Postgres => "bigserial",
        _ => "bigint NOT NULL AUTO_INCREMENT",
    };
    session.run(&format!("CREATE TABLE written (n {numbered} PRIMARY KEY, fence bigint)")).await;
    let mut tasks = JoinSet::new();
    for writer in 0..WRITERS {
        let mut session = server.session().await;
        tasks.spawn(async move {
            let mut refused = 0;
            for round in 0..EACH {
                let fence = round * WRITERS + (writer * 37) % WRITERS;
                session.begin().await;
                let admitted = loop {
                    match admits(&mut session, gate, "order:1", fence).await {
                        // The first row was rolled back while others waited for it.
                        Err(error) if error.contains("1213") => session.begin().await,
                        admitted => break admitted.unwrap(),
                    }
                };
                if !admitted {
                    refused += 1;
                    session.run("ROLLBACK").await;
                    continue;
                }
                // The row of the gate is locked, so the numbers are in the order of the commits.
                session.run(&format!("INSERT INTO written (fence) VALUES ({fence})")).await;
                let end = if fence % 5 == 0 { "ROLLBACK" } else { "COMMIT" };
                session.run(end).await;
            }
            refused
        });
    }
    let refused: i64 = within(4 * DEADLINE, "all writers", tasks.join_all()).await.iter().sum();
    let written = session.rows("SELECT fence FROM written ORDER BY n").await;
    let fences: Vec<i64> = written.iter().map(|fence| fence.parse().unwrap()).collect();
    println!("{} written, {refused} refused", fences.len());
    assert!(fences.is_sorted(), "{fences:?}");
    assert!(fences.len() > 10 && refused > 0, "{} written, {refused} refused", fences.len());
}

/// Runs the statements of the gate with literal values.
async fn admits(
    session: &mut SqlSession,
    gate: SqlFenceGate,
    resource: &str,
    fence: i64,
) -> Result<bool, String> {
    let mut rows = Vec::new();
    for statement in gate.admit() {
        let resource = format!("'{resource}'");
        let text = statement.replace("$1", &resource).replace("$2", &fence.to_string());
        let text = text.replacen('?', &resource, 1).replacen('?', &fence.to_string(), 1);
        rows = session.try_rows(&text).await?;
    }
    Ok(!rows.is_empty())
}
