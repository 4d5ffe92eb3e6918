//! Every store passes the published suite.

use std::time::Duration;

use lock_runtime::LockPool;
use lock_runtime::testing::{conformance, open_backend};
use lock_tests::tls::{Authority, Tls};
use lock_tests::{RedisCluster, RedisServer, eventually_async};

async fn conforms(url: &str) {
    conformance(open_backend(url).await.unwrap(), open_backend(url).await.unwrap()).await;
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
async fn redis_cluster_for_a_user_with_the_permissions_that_the_errors_name() {
    let user = "user worker on >secret ~app:* ~{*}app:* resetchannels &lock_runtime:* -@all +set +get \
                +mget +del +pexpire +pttl +time +eval +evalsha +hello +ping +select +publish +subscribe +zadd +zrem \
                +zcard +zscore +zrank +zrange +zpopmin +client|tracking +client|caching +asking +cluster|slots";
    let cluster = RedisCluster::start_with(|config| config.config_line(user));
    let url = cluster.url_of("worker:secret");
    // Other commands are refused, and the permitted ones are enough for the wait queue.
    let connect = || LockPool::builder(&url).key_prefix("app:").connect();
    let [one, other] = [connect().await.unwrap(), connect().await.unwrap()];
    for n in 0..20 {
        let key = format!("order:{n}");
        let guard = one.lock(key.as_str()).acquire().await.unwrap();
        let waiting = tokio::spawn(other.lock(key.as_str()).acquire());
        let line = format!("{{*}}app:{key}:lock_runtime:line");
        eventually_async(Duration::from_secs(30), "it is queued", async || {
            cluster.masters().iter().any(|node| !node.cli(&["KEYS", &line]).is_empty())
        })
        .await;
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
    let stranger = LockPool::connect(&url).await.unwrap();
    let error = stranger.lock("order:1").acquire().await.unwrap_err().to_string();
    assert!(error.contains("NOPERM") && error.contains("+cluster|slots"), "{error}");
}

#[tokio::test]
async fn redis_cluster_over_tls() {
    let tls = Tls::new(&Authority::new());
    let cluster = RedisCluster::start_with(|config| {
        config.tls(tls.clone()).arg("tls-cluster", "yes").arg("tls-replication", "yes")
    });
    let files = cluster.nodes()[0].tls_files();
    let seed = cluster.nodes()[0].tls_port().unwrap();
    let url = format!("rediss+cluster://127.0.0.1:{seed}?ca={}", files.authority.display());
    conforms(&url).await;
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
