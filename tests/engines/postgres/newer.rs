//! A newer version than the distribution's.

use lock_runtime::testing::{conformance, open_backend};
use lock_tests::{PostgresServer, versions};

use super::conformance::{fences_grow, outlives_a_kill};

/// The whole of `postgres::` runs on it with `LOCK_TEST_POSTGRES_BIN`, but for TLS, which this build does not have.
#[tokio::test]
async fn postgres_18_conforms_and_keeps_locks_over_a_kill() {
    let Some(folder) = versions::of_store("postgres-18") else { return };
    let config = PostgresServer::builder().programs(folder.join("bin"));
    let server = config.clone().start();
    let url = server.url();
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
    let durable = config.setting("fsync", "on").start();
    fences_grow(&durable).await;
    outlives_a_kill(&durable).await;
}
