//! Newer versions than the distribution's, as a cluster of three.

use lock_runtime::testing::{conformance, open_backend};
use lock_tests::{EtcdServer, EtcdTrio, versions};

use crate::dead_leaders;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_3_5_conforms_and_grants_nothing_twice_when_the_leader_dies() {
    conforms_and_survives("etcd-3.5").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_3_6_conforms_and_grants_nothing_twice_when_the_leader_dies() {
    conforms_and_survives("etcd-3.6").await;
}

/// The whole of `etcd::` runs on its program with `LOCK_TEST_ETCD_PROGRAM`. Version 3.5.1 fails two tests of a full database: it
/// refuses to delete keys, too.
async fn conforms_and_survives(version: &str) {
    let Some(folder) = versions::of_store(version) else { return };
    let cluster = EtcdTrio::start_with(&EtcdServer::builder().program(folder.join("etcd")));
    let url = cluster.url_of("/locks");
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
    dead_leaders::of_etcd(&cluster, 1).await;
}
