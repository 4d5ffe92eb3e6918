//! An older version than that of the other tests, as an ensemble of three.

use lock_runtime::testing::{conformance, open_backend};
use lock_tests::{ZooKeeperEnsemble, ZooKeeperServer, versions};

use crate::dead_leaders;

/// The whole of `zookeeper::` runs on it with `LOCK_TEST_ZOOKEEPER_LIBRARIES`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zookeeper_3_8_conforms_and_grants_nothing_twice_when_the_leader_dies() {
    let Some(libraries) = versions::of_store("zookeeper-3.8") else { return };
    let config = ZooKeeperServer::builder().libraries(libraries);
    let ensemble = ZooKeeperEnsemble::start_with(&config);
    let url = ensemble.url_of("/locks");
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
    dead_leaders::of_zookeeper(&ensemble, 1).await;
}
