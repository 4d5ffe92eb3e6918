//! PostgreSQL.

use lock_tests::SqlServer;
use tokio_postgres::NoTls;

use super::{Holder, Outcome, PAY, a_stale_holder_is_refused, the_table_is_what_runs};

/// Of the message of the pin.
const TOLD: &str = "the lock of this transaction is lost";

recipes_of_both!(SqlServer::postgres, TOLD, sqlx::PgPool, diesel_async::AsyncPgConnection);

async fn with_tokio_postgres(database: String, guard: impl Holder) -> Outcome {
    let (mut client, connection) = tokio_postgres::connect(&database, NoTls).await?;
    tokio::spawn(connection);
    let transaction = client.transaction().await?;
    transaction.batch_execute(&guard.pin_sql()?).await?;
    transaction.batch_execute(PAY).await?;
    Ok(transaction.commit().await?)
}

#[tokio::test]
async fn tokio_postgres() {
    let server = SqlServer::postgres();
    a_stale_holder_is_refused(server, TOLD, with_tokio_postgres, with_tokio_postgres).await;
}

#[test]
fn the_chapter_has_these_lines() {
    the_table_is_what_runs(include_str!("../../docs/postgres.md"), include_str!("postgres.rs"));
}
