//! MariaDB.

use lock_tests::SqlServer;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, TxOpts};

use super::{Holder, Outcome, PAY, a_stale_holder_is_refused, the_table_is_what_runs};

/// Of the message of the pin.
const TOLD: &str = "the_lock_is_lost";

recipes_of_both!(SqlServer::mysql, TOLD, sqlx::MySqlPool, diesel_async::AsyncMysqlConnection);

async fn with_mysql_async(database: String, guard: impl Holder) -> Outcome {
    let mut connection = Conn::new(Opts::from_url(&database)?).await?;
    let mut transaction = connection.start_transaction(TxOpts::default()).await?;
    transaction.query_drop(guard.pin_sql()?).await?;
    transaction.query_drop(PAY).await?;
    Ok(transaction.commit().await?)
}

#[tokio::test]
async fn mysql_async() {
    let server = SqlServer::mysql();
    a_stale_holder_is_refused(server, TOLD, with_mysql_async, with_mysql_async).await;
}

#[test]
fn the_chapter_has_these_lines() {
    the_table_is_what_runs(include_str!("../../docs/mysql.md"), include_str!("mysql.rs"));
}
