//! Every store passes the published suite.

use lock_runtime::testing::{conformance, open};
use lock_tests::tls::{Authority, Tls};
use lock_tests::{RedisCluster, RedisServer};

async fn conforms(url: &str) {
    conformance(open(url).await.unwrap(), open(url).await.unwrap()).await;
}

#[tokio::test]
async fn memory() {
    conforms("memory://conformance").await;
}

#[tokio::test]
async fn redis() {
    let server = RedisServer::start();
    conforms(&server.url()).await;
}

#[tokio::test]
async fn redis_cluster() {
    let cluster = RedisCluster::start();
    conforms(&cluster.url()).await;
}

#[tokio::test]
async fn redis_with_a_password_and_a_database() {
    let server = RedisServer::builder().password("p@ss/w:rd").start();
    conforms(&format!("{}/3", server.url())).await;
    let keyspace = server.cli(&["INFO", "keyspace"]);
    assert!(keyspace.contains("db3:") && !keyspace.contains("db0:"), "{keyspace}");
}

#[tokio::test]
async fn redis_for_a_user_with_the_permissions_that_the_errors_name() {
    let user = "user worker on >secret ~* resetchannels -@all +set +get +mget +del +pexpire +pttl \
                +time +eval +evalsha +hello +ping +select";
    let server = RedisServer::builder().config_line(user).start();
    conforms(&format!("redis://worker:secret@127.0.0.1:{}", server.port())).await;
}

#[tokio::test]
async fn redis_over_tls_with_a_private_authority_and_client_certificates() {
    let tls = Tls::new(&Authority::new()).require_client_certificate();
    let server = RedisServer::builder().tls(tls).start();
    let files = server.tls_files();
    let url = format!(
        "rediss://localhost:{}?ca={}&cert={}&key={}",
        server.tls_port().unwrap(),
        files.authority.display(),
        files.client_certificate.display(),
        files.client_key.display()
    );
    conforms(&url).await;
}
