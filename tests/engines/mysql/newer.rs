//! A newer MariaDB than the distribution's, and MySQL.

use std::path::PathBuf;

use lock_runtime::testing::{conformance, open_backend};
use lock_tests::{MysqlServer, versions};

use super::conformance::{fences_grow, outlives_a_kill};

#[tokio::test]
async fn mariadb_11_conforms_and_keeps_locks_over_a_kill() {
    let Some(folder) = versions::of_store("mariadb-11") else { return };
    conforms_and_keeps_locks(folder.join("bin/mariadbd")).await;
}

#[tokio::test]
async fn mysql_9_conforms_and_keeps_locks_over_a_kill() {
    let Some(folder) = versions::of_store("mysql-9") else { return };
    conforms_and_keeps_locks(folder.join("bin/mysqld")).await;
}

/// The whole of `mysql::` runs on this program with `LOCK_TEST_MYSQLD`.
async fn conforms_and_keeps_locks(program: PathBuf) {
    let config = MysqlServer::builder().program(program);
    let server = config.clone().start();
    let url = server.url();
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
    let durable = config.durable().start();
    fences_grow(&durable).await;
    outlives_a_kill(&durable).await;
}
