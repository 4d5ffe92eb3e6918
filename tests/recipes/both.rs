//! The libraries that serve both databases.

/// A recipe with sqlx, diesel, diesel-async and sea-orm, and its test. `$pool` is of sqlx, `$connection` of diesel-async.
macro_rules! recipes_of_both {
    ($server:path, $told:expr, $pool:ty, $connection:ty) => {
        async fn with_sqlx(database: String, guard: impl Holder) -> Outcome {
            let pool = <$pool>::connect(&database).await?;
            let mut transaction = pool.begin().await?;
            sqlx::raw_sql(&guard.pin_sql()?).execute(&mut *transaction).await?;
            sqlx::query(PAY).execute(&mut *transaction).await?;
            Ok(transaction.commit().await?)
        }

        async fn with_sea_orm(database: String, guard: impl Holder) -> Outcome {
            use sea_orm::{ConnectionTrait, TransactionTrait};

            let connection = sea_orm::Database::connect(&database).await?;
            let transaction = connection.begin().await?;
            transaction.execute_unprepared(&guard.pin_sql()?).await?;
            transaction.execute_unprepared(PAY).await?;
            Ok(transaction.commit().await?)
        }

        async fn with_diesel_async(database: String, guard: impl Holder) -> Outcome {
            use diesel_async::{AsyncConnection, SimpleAsyncConnection};

            let mut connection = <$connection as AsyncConnection>::establish(&database).await?;
            connection
                .transaction(async |connection| {
                    connection.batch_execute(&guard.pin_sql()?).await?;
                    Ok(connection.batch_execute(PAY).await?)
                })
                .await
        }

        async fn with_diesel(database: String, guard: impl Holder) -> Outcome {
            use diesel::Connection;
            use diesel::connection::SimpleConnection;
            use diesel_async::async_connection_wrapper::AsyncConnectionWrapper;

            // As a connection of diesel itself, without the C library.
            type Blocking = AsyncConnectionWrapper<$connection>;

            let transaction = move || {
                let mut connection = <Blocking as Connection>::establish(&database)?;
                connection.transaction(|connection| {
                    connection.batch_execute(&guard.pin_sql()?)?;
                    Ok(connection.batch_execute(PAY)?)
                })
            };
            tokio::task::spawn_blocking(transaction).await?
        }

        #[tokio::test]
        async fn sqlx() {
            a_stale_holder_is_refused($server(), $told, with_sqlx, with_sqlx).await;
        }

        #[tokio::test]
        async fn diesel() {
            a_stale_holder_is_refused($server(), $told, with_diesel, with_diesel).await;
        }

        #[tokio::test]
        async fn diesel_async() {
            a_stale_holder_is_refused($server(), $told, with_diesel_async, with_diesel_async).await;
        }

        #[tokio::test]
        async fn sea_orm() {
            a_stale_holder_is_refused($server(), $told, with_sea_orm, with_sea_orm).await;
        }
    };
}
