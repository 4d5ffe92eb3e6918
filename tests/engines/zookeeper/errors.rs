//! Refusals of a server, each with what to do about it.

use lock_runtime::{Credentials, ErrorKind, LockPool};
use lock_tests::expected_error::{CANARY, says};
use lock_tests::prelude::*;
use lock_tests::tls::{Authority, Tls};
use lock_tests::{RedisServer, ZooKeeperServer};

/// Nodes that a login has made are those of that login alone.
#[tokio::test]
async fn nodes_of_a_login_are_refused_to_others() {
    let (server, root) = ZooKeeperServer::shared();
    let url = |login: &str, rest: &str| {
        format!("zookeeper://{login}127.0.0.1:{}{root}{rest}", server.port())
    };
    let own = format!("worker:{CANARY}@");
    let pools =
        [patient(url(&own, ""), ms(20_000)).await, patient(url(&own, ""), ms(20_000)).await];
    alternate(pools.clone(), "order:1", 10).await;
    assert_eq!(pools[0].health().await.unwrap().warnings, []);
    for (case, login) in [("no login", ""), ("a wrong password", "worker:wrong@")] {
        let pool = LockPool::connect(&url(login, "")).await.unwrap();
        let error = pool.lock("order:1").wait(ms(500)).acquire().await.unwrap_err();
        says(case, &error, ErrorKind::Backend, &["refuses access", "code -102", "user:password@"]);
    }
    let given = || async { Ok::<_, std::io::Error>(Credentials::new("worker", CANARY)) };
    let error =
        LockPool::builder(url("worker:wrong@", "")).credentials(given).connect().await.unwrap_err();
    says("two passwords", &error, ErrorKind::Config, &["the URL has a password", "leave"]);
    let pool = LockPool::builder(url("", "")).credentials(given);
    cycle(&pool.connect().await.unwrap(), "order:1").await;
    let error = LockPool::connect(&url("", "/below")).await.unwrap_err();
    says("no rights on the path", &error, ErrorKind::Backend, &["refuses access"]);
    let pool = LockPool::connect(&url("", "-other?acl=creator")).await.unwrap_err();
    says("no login for the nodes", &pool, ErrorKind::Backend, &["no login", "acl=open"]);
    let open = LockPool::connect(&url(&own, "-open?acl=open")).await.unwrap();
    let warnings = format!("{:?}", open.health().await.unwrap().warnings);
    assert!(warnings.contains("every client"), "{warnings}");
    cycle(&LockPool::connect(&url("", "-open")).await.unwrap(), "order:1").await;
}

#[tokio::test]
async fn an_address_without_an_ensemble_is_an_error_that_names_it() {
    let port = lock_tests::server::another_port();
    let url = format!("zookeeper://worker:{CANARY}@127.0.0.1:{port}/locks");
    let error = LockPool::connect(&url).await.unwrap_err();
    says("unreachable", &error, ErrorKind::Backend, &["127.0.0.1", "unreachable", "leader"]);
    let redis = RedisServer::start();
    let url = format!("zookeeper://worker:{CANARY}@127.0.0.1:{}/locks", redis.port());
    let error = LockPool::builder(url).connect_timeout(ms(1_500)).connect().await.unwrap_err();
    says("another server", &error, ErrorKind::Backend, &["127.0.0.1", "ZooKeeper"]);
}

/// A peer that says of a session that was never open that it has expired.
#[tokio::test]
async fn an_answer_of_another_protocol_is_an_error() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut offer = 36_u32.to_be_bytes().to_vec();
            offer.extend([0; 36]);
            let _ = std::io::Write::write_all(&mut stream, &offer);
            // Until the client has ended the connection.
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        }
    });
    let pool = LockPool::builder(format!("zookeeper://127.0.0.1:{port}/locks"));
    let error = within(DEADLINE, "the error", pool.connect()).await.unwrap_err();
    says("another protocol", &error, ErrorKind::Backend, &["unexpected form", "clientPort"]);
}

/// A member of an ensemble that has lost the others.
#[tokio::test]
async fn a_server_without_a_quorum_is_refused() {
    let server = |number: u16| format!("server.{number}");
    let ports: Vec<_> = (0..6).map(|_| lock_tests::server::another_port()).collect();
    let mut config = ZooKeeperServer::builder().property("readonlymode.enabled", true);
    for (number, ports) in (1..).zip(ports.chunks(2)) {
        config = config.setting(&server(number), format!("127.0.0.1:{}:{}", ports[0], ports[1]));
    }
    let alone = config.start_alone(1);
    let url = alone.url();
    lock_tests::eventually_async(DEADLINE, "it listens", async || {
        std::net::TcpStream::connect(("127.0.0.1", alone.port())).is_ok()
    })
    .await;
    let error = LockPool::builder(url).connect_timeout(ms(1_500)).connect().await.unwrap_err();
    says("no quorum", &error, ErrorKind::Backend, &["unreachable", "leader"]);
}

#[tokio::test]
async fn a_ttl_beyond_the_longest_session_is_refused() {
    let server = ZooKeeperServer::builder()
        .setting("minSessionTimeout", 5_000)
        .setting("maxSessionTimeout", 20_000)
        .start();
    // Its session is longer than what the server allows a moment later.
    let before = patient(server.url(), ms(12_000)).await;
    let guard = before.lock("order:0").acquire().await.unwrap();
    server.restart_with("maxSessionTimeout", 9_000);
    let error = within(DEADLINE, "the loss", guard.lost()).await;
    says("a shorter session", &error, ErrorKind::Lost, &[]);
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let warnings = format!("{:?}", pool.health().await.unwrap().warnings);
    for setting in ["maxSessionTimeout", "tickTime"] {
        assert!(warnings.contains(setting), "{setting}: {warnings}");
    }
    let refused = [
        pool.lock("order:1").acquire().await,
        pool.lock("order:1").ttl(ms(6_001)).acquire().await,
        pool.lock("order:1").ttl(ms(2_000)).min_hold(ms(8_000)).acquire().await,
    ];
    for refused in refused {
        let texts = ["9s", "maxSessionTimeout", "min_hold"];
        says("a long ttl", &refused.unwrap_err(), ErrorKind::Backend, &texts);
    }
    let guard = pool.lock("order:1").ttl(ms(6_000)).acquire().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_path_that_holds_no_nodes_is_refused() {
    let (server, root) = ZooKeeperServer::shared();
    let mut client = server.client();
    client.create(&root, false).unwrap();
    let error = LockPool::connect(&server.url_of(&format!("{root}/locks"))).await.unwrap_err();
    says("an ephemeral parent", &error, ErrorKind::Backend, &["ephemeral", "another path"]);
}

#[tokio::test]
async fn connections_may_be_encrypted() {
    let server = ZooKeeperServer::builder().tls(Tls::new(&Authority::new())).start();
    let ca = server.tls_files().authority.display().to_string();
    let url = format!("{}?ca={ca}", server.tls_url());
    let pools = [patient(&url, ms(20_000)).await, patient(&url, ms(20_000)).await];
    alternate(pools, "order:1", 10).await;
    let unknown = LockPool::connect(&server.tls_url()).await.unwrap_err();
    says("an unknown authority", &unknown, ErrorKind::Backend, &["certificate"]);
    let plain = server.tls_url().replace("zookeepers", "zookeeper");
    let error = LockPool::builder(plain).connect_timeout(ms(1_500)).connect().await.unwrap_err();
    says("TLS where it is not asked for", &error, ErrorKind::Backend, &["127.0.0.1"]);
}
