//! PostgreSQL.

use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use lock_tests::SqlServer;
use sea_orm::{ConnectionTrait, TransactionTrait};
use tokio_postgres::NoTls;

use super::{Holder, Outcome, a_stale_holder_is_refused, the_table_is_what_runs};

const PAY: &str = "UPDATE orders SET state = 'paid' WHERE id = 42";

/// Of the message of the pin.
const TOLD: &str = "the lock of this transaction is lost";

async fn with_tokio_postgres(database: String, guard: impl Holder) -> Outcome {
    let (mut client, connection) = tokio_postgres::connect(&database, NoTls).await?;
    tokio::spawn(connection);
    let transaction = client.transaction().await?;
    transaction.batch_execute(&guard.pin_sql()?).await?;
    transaction.batch_execute(PAY).await?;
    Ok(transaction.commit().await?)
}

async fn with_sqlx(database: String, guard: impl Holder) -> Outcome {
    let pool = sqlx::PgPool::connect(&database).await?;
    let mut transaction = pool.begin().await?;
    sqlx::raw_sql(&guard.pin_sql()?).execute(&mut *transaction).await?;
    sqlx::query(PAY).execute(&mut *transaction).await?;
    Ok(transaction.commit().await?)
}

async fn with_diesel_async(database: String, guard: impl Holder) -> Outcome {
    let mut connection = <AsyncPgConnection as AsyncConnection>::establish(&database).await?;
    connection
        .transaction(async |connection| {
            connection.batch_execute(&guard.pin_sql()?).await?;
            Ok(connection.batch_execute(PAY).await?)
        })
        .await
}

async fn with_sea_orm(database: String, guard: impl Holder) -> Outcome {
    let connection = sea_orm::Database::connect(&database).await?;
    let transaction = connection.begin().await?;
    transaction.execute_unprepared(&guard.pin_sql()?).await?;
    transaction.execute_unprepared(PAY).await?;
    Ok(transaction.commit().await?)
}

/// Apart from the traits of diesel-async, which have the same names.
mod blocking {
    use diesel::Connection;
    use diesel::connection::SimpleConnection;
    use diesel_async::AsyncPgConnection;
    use diesel_async::async_connection_wrapper::AsyncConnectionWrapper;

    use super::{Holder, Outcome, PAY};

    /// As `PgConnection`, without the C library.
    type Blocking = AsyncConnectionWrapper<AsyncPgConnection>;

    pub(super) async fn with_diesel(database: String, guard: impl Holder) -> Outcome {
        let transaction = move || {
            let mut connection = <Blocking as Connection>::establish(&database)?;
            connection.transaction(|connection| {
                connection.batch_execute(&guard.pin_sql()?)?;
                Ok(connection.batch_execute(PAY)?)
            })
        };
        tokio::task::spawn_blocking(transaction).await?
    }
}

#[tokio::test]
async fn tokio_postgres() {
    let server = SqlServer::postgres();
    a_stale_holder_is_refused(server, TOLD, with_tokio_postgres, with_tokio_postgres).await;
}

#[tokio::test]
async fn sqlx() {
    a_stale_holder_is_refused(SqlServer::postgres(), TOLD, with_sqlx, with_sqlx).await;
}

#[tokio::test]
async fn diesel() {
    a_stale_holder_is_refused(
        SqlServer::postgres(),
        TOLD,
        blocking::with_diesel,
        blocking::with_diesel,
    )
    .await;
}

#[tokio::test]
async fn diesel_async() {
    let server = SqlServer::postgres();
    a_stale_holder_is_refused(server, TOLD, with_diesel_async, with_diesel_async).await;
}

#[tokio::test]
async fn sea_orm() {
    a_stale_holder_is_refused(SqlServer::postgres(), TOLD, with_sea_orm, with_sea_orm).await;
}

#[test]
fn the_chapter_has_these_lines() {
    the_table_is_what_runs(include_str!("../../docs/postgres.md"), include_str!("postgres.rs"));
}
