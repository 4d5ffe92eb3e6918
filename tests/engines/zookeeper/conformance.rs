//! The published suite, and what stands in the tree.

use lock_runtime::testing::{conformance, open_backend};
use lock_tests::ZooKeeperServer;

#[tokio::test]
async fn it_conforms() {
    let (server, root) = ZooKeeperServer::shared();
    let url = server.url_of(&root);
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
}
