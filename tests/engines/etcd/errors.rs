//! Refusals of a member, each with what to do about it.

use std::time::Duration;

use lock_runtime::{Credentials, ErrorKind, LockPool};
use lock_tests::expected_error::{CANARY, says};
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::tls::{Authority, Tls};
use lock_tests::{EtcdServer, FaultProxy, RedisServer, eventually_async};
use serde_json::json;

/// A server that hashes passwords with the lowest cost.
fn with_cheap_logins() -> EtcdServer {
    EtcdServer::builder().setting("bcrypt-cost", 4).start()
}

/// A user `root`, and `worker` with a role for `/locks/` alone.
fn enable_logins(server: &EtcdServer) {
    server.enable_logins(CANARY, &[("/locks/".to_owned(), "/locks0".to_owned())]);
}

/// Users with a password, a role for `/locks/` alone, and changes of roles.
#[tokio::test]
async fn users_and_roles_are_respected() {
    let server = with_cheap_logins();
    enable_logins(&server);
    let url = |login: &str, rest: &str| format!("etcd://{login}127.0.0.1:{}{rest}", server.port());
    let own = url(&format!("worker:{CANARY}@"), "/locks");
    let pools = [patient(&own, ms(20_000)).await, patient(&own, ms(20_000)).await];
    alternate(pools.clone(), "order:1", 10).await;
    pools[0].health().await.unwrap();
    for (case, login, texts) in [
        ("no login", "", ["asks for a login", "user:password@"]),
        ("a wrong password", "worker:wrong@", ["refuses the login", "password"]),
        ("an unknown user", "nobody:wrong@", ["refuses the login", "password"]),
    ] {
        let error = LockPool::connect(&url(login, "/locks")).await.unwrap_err();
        says(case, &error, ErrorKind::Backend, &texts);
    }
    let other = url(&format!("worker:{CANARY}@"), "/other");
    let error = LockPool::connect(&other).await.unwrap_err();
    says("no rights", &error, ErrorKind::Backend, &["permission denied", "grant-permission"]);
    let given = || async { Ok::<_, std::io::Error>(Credentials::new("worker", CANARY)) };
    let error = LockPool::builder(url("worker:wrong@", "/locks"))
        .credentials(given)
        .connect()
        .await
        .unwrap_err();
    says("two passwords", &error, ErrorKind::Config, &["the URL has a password", "leave"]);
    let pool = LockPool::builder(url("", "/locks")).credentials(given);
    let password = || async { Ok::<_, std::io::Error>(Credentials::password(CANARY)) };
    let error = LockPool::builder(url("", "/locks")).credentials(password).connect().await;
    says(
        "no user",
        &error.unwrap_err(),
        ErrorKind::Backend,
        &["named no user", "(user, password)"],
    );
    cycle(&pool.connect().await.unwrap(), "order:1").await;
    // Roles change while a lock is held.
    let guard = pools[0].lock("order:2").acquire().await.unwrap();
    for change in [
        &["role", "add", "another"][..],
        &["user", "grant-role", "worker", "another"],
        &["role", "delete", "another"],
    ] {
        server.etcdctl(&[&["--user=root:root"], change].concat());
        eventually_async(DEADLINE, "the lock is kept", async || guard.verify().await.is_ok()).await;
        cycle(&pools[0], "order:1").await;
    }
    guard.release().await.unwrap();
    cycle(&pools[1], "order:1").await;
}

/// A single try and a read are the first requests behind the end of their tokens, here with the user that has them.
#[tokio::test]
async fn a_token_that_has_ended_fails_no_request() {
    let server = with_cheap_logins();
    enable_logins(&server);
    let url = format!("etcd://worker:{CANARY}@127.0.0.1:{}/locks", server.port());
    // The server takes its time for each log-in, and all have to log in at the same time.
    let pool = || async {
        LockPool::builder(&url).request_timeout(ms(5_000)).ttl(ms(20_000)).connect().await.unwrap()
    };
    let pools = [pool().await, pool().await, pool().await];
    let ending = pool().await;
    let left = ending.lock("order:3").acquire().await.unwrap();
    cycle(&pools[0], "order:1").await;
    let guard = pools[1].lock("order:2").acquire().await.unwrap();
    server.set_password("worker", CANARY);
    let tried = pools[0].lock("order:1").try_acquire().await.unwrap();
    tried.expect("it is free").release().await.unwrap();
    guard.verify().await.unwrap();
    let listed = pools[2].list("*", 10).await.unwrap();
    assert_eq!(listed.keys.len(), 2, "{listed:?}");
    guard.release().await.unwrap();
    let report = ending.shutdown(Duration::ZERO).await;
    assert_eq!((report.released, report.abandoned), (1, 0));
    assert!(!left.is_held());
    cycle(&pools[0], "order:3").await;
}

#[tokio::test]
async fn a_new_connection_uses_the_token_of_the_former_one() {
    let server = with_cheap_logins();
    enable_logins(&server);
    let proxy = FaultProxy::to_port(server.port());
    let url = format!("etcd://worker:{CANARY}@127.0.0.1:{}/locks", proxy.port());
    let pool = patient(url, ms(20_000)).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let (logins, connections) = (server.logins(), proxy.connections());
    proxy.cut();
    eventually_async(DEADLINE, "another connection", async || proxy.connections() > connections)
        .await;
    eventually_async(DEADLINE, "it serves", async || guard.verify().await.is_ok()).await;
    assert_eq!(server.logins(), logins);
    // The token is no longer valid.
    server.restart();
    eventually_async(DEADLINE, "it logs in", async || guard.verify().await.is_ok()).await;
    guard.release().await.unwrap();
}

/// After a restart of the cluster all pools log in, and each waits for the logins of all.
#[tokio::test]
async fn a_login_may_take_longer_than_the_first_requests_to_a_member() {
    let server = with_cheap_logins();
    enable_logins(&server);
    let proxy = FaultProxy::to_port(server.port());
    let addresses = vec![format!("127.0.0.1:{}", proxy.port()); 3].join(",");
    let pool = patient(format!("etcd://worker:{CANARY}@{addresses}/locks"), ms(600_000)).await;
    // With this ttl it is not renewed meanwhile.
    let guard = pool.lock("order:1").acquire().await.unwrap();
    // From now on a login takes a processor two seconds, as long as dozens of cheaper ones.
    server.restart_with("bcrypt-cost", 14);
    let serves = async || guard.verify().await.is_ok();
    eventually_async(DEADLINE, "it serves after the restart", serves).await;
    let connections = proxy.connections();
    proxy.cut();
    let is_another = async || proxy.connections() > connections;
    eventually_async(DEADLINE, "another connection, which takes no time", is_another).await;
    eventually_async(DEADLINE, "it serves", serves).await;
    // On a busy machine, the member gives up its answer and changes the password nevertheless.
    server.try_set_password("worker", CANARY);
    let logins = server.logins();
    eventually_async(2 * DEADLINE, "it logs in", serves).await;
    // The pool may have logged in before the administrator's command has ended.
    assert!(server.logins() <= logins + 1, "{} after {logins}", server.logins());
    guard.release().await.unwrap();
}

/// The member freezes after it has received the login.
#[tokio::test]
async fn a_login_is_given_up_when_the_member_answers_nothing_else() {
    let server = with_cheap_logins();
    enable_logins(&server);
    let proxies = [FaultProxy::to_port(server.port()), FaultProxy::to_port(server.port())];
    let [one, other] = [0, 1].map(|at| format!("127.0.0.1:{}", proxies[at].port()));
    let pool = patient(format!("etcd://worker:{CANARY}@{one},{other}/locks"), ms(600_000)).await;
    // With this ttl it is not renewed meanwhile.
    let guard = pool.lock("order:1").acquire().await.unwrap();
    for proxy in &proxies {
        proxy.refuse(true);
        proxy.cut();
    }
    // From now on, a login takes a second.
    server.restart_with("bcrypt-cost", 14);
    server.try_set_password("worker", CANARY);
    eventually_async(DEADLINE, "the password is set", async || server.serves()).await;
    let logins = server.logins();
    proxies.iter().for_each(|proxy| proxy.refuse(false));
    eventually_async(DEADLINE, "the login", async || server.logins() > logins).await;
    let asked = proxies.iter().find(|proxy| proxy.open_connections() > 0).expect("a connection");
    asked.hold(Direction::ToServer);
    asked.hold(Direction::ToClient);
    let serves = async || guard.verify().await.is_ok();
    eventually_async(DEADLINE, "it logs in at the other member", serves).await;
    guard.release().await.unwrap();
}

/// Another member refuses the same password, and each login takes a member time.
#[tokio::test]
async fn a_login_that_is_refused_is_seldom_repeated() {
    let server = with_cheap_logins();
    enable_logins(&server);
    let addresses = vec![format!("127.0.0.1:{}", server.port()); 3].join(",");
    let pool = patient(format!("etcd://worker:{CANARY}@{addresses}/locks"), ms(20_000)).await;
    cycle(&pool, "order:1").await;
    server.set_password("worker", "other");
    let logins = server.logins();
    eventually_async(DEADLINE, "it is refused", async || {
        let error = pool.lock("order:1").try_acquire().await.unwrap_err();
        error.to_string().contains("refuses the login")
    })
    .await;
    tokio::time::sleep(ms(3_000)).await;
    // Pauses of at least an eighth of a second, then twice as long each time.
    let repeated = server.logins() - logins;
    assert!(repeated <= 8, "{repeated}");
    server.set_password("worker", CANARY);
    eventually_async(DEADLINE, "it serves again", async || {
        pool.lock("order:1").try_acquire().await.is_ok()
    })
    .await;
}

/// Nothing is left to be deleted behind a request that was refused.
#[tokio::test]
async fn refused_requests_are_followed_by_no_others() {
    const REFUSED: usize = 50;
    let server = with_cheap_logins();
    enable_logins(&server);
    let url = format!("etcd://worker:{CANARY}@127.0.0.1:{}/locks", server.port());
    let pool = LockPool::builder(&url).ttl(ms(1_000)).connect().await.unwrap();
    cycle(&pool, "order:1").await;
    server.etcdctl(&[
        "--user=root:root",
        "role",
        "revoke-permission",
        "locks",
        "/locks/",
        "/locks0",
    ]);
    for n in 0..REFUSED {
        let error = pool.lock(format!("order:{n}")).try_acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    }
    // What is to be deleted is so behind the ttl, and once a second if that is refused.
    tokio::time::sleep(ms(1_500)).await;
    let before = server.messages();
    tokio::time::sleep(ms(2_500)).await;
    let sent = server.messages() - before;
    // One batch a second, and what keeps the connection.
    assert!(sent <= 20, "{sent}");
}

/// The next member answers nothing, while the lease of a lock runs out.
#[tokio::test]
async fn a_short_lock_outlives_a_member_that_accepts_connections_and_answers_nothing() {
    let server = with_cheap_logins();
    enable_logins(&server);
    let proxy = FaultProxy::to_port(server.port());
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let ports = [proxy.port(), mute.local_addr().unwrap().port(), server.port()];
    let [one, two, three] = ports.map(|port| format!("127.0.0.1:{port}"));
    let url = format!("etcd://worker:{CANARY}@{one},{two},{three}/locks");
    // The first member is chosen at random.
    let pool = loop {
        let pool = patient(url.clone(), ms(20_000)).await;
        if proxy.connections() > 0 {
            break pool;
        }
    };
    // A busy server needs seconds for a log-in.
    let guard = pool.lock("order:1").ttl(ms(12_000)).acquire().await.unwrap();
    proxy.refuse(true);
    proxy.cut();
    let lost = tokio::time::timeout(ms(14_000), guard.lost()).await;
    assert!(lost.is_err(), "{lost:?}");
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
}

/// Logins become necessary while the pool is connected, which has one.
#[tokio::test]
async fn a_login_that_is_wanted_later_is_given() {
    let server = with_cheap_logins();
    let url = format!("etcd://worker:{CANARY}@127.0.0.1:{}/locks", server.port());
    let pool = patient(url, ms(20_000)).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    enable_logins(&server);
    eventually_async(DEADLINE, "it has logged in", async || guard.verify().await.is_ok()).await;
    eventually_async(DEADLINE, "it grants", async || {
        match pool.lock("order:2").wait(ms(1_000)).acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(error) => {
                says("a login is wanted", &error, ErrorKind::Backend, &["etcd"]);
                false
            }
        }
    })
    .await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn an_address_without_a_cluster_is_an_error_that_names_it() {
    let port = lock_tests::server::another_port();
    let url = format!("etcd://worker:{CANARY}@127.0.0.1:{port}/locks");
    let error = LockPool::connect(&url).await.unwrap_err();
    says("unreachable", &error, ErrorKind::Backend, &["127.0.0.1", "unreachable", "leader"]);
    let redis = RedisServer::start();
    let url = format!("etcd://worker:{CANARY}@127.0.0.1:{}/locks", redis.port());
    let error = LockPool::builder(url).connect_timeout(ms(1_500)).connect().await.unwrap_err();
    says("another server", &error, ErrorKind::Backend, &["127.0.0.1", "etcd"]);
}

/// A member of a cluster that has lost the others.
#[tokio::test]
async fn a_member_without_a_majority_is_refused() {
    let alone = EtcdServer::builder().start_alone();
    let builder = LockPool::builder(alone.url()).connect_timeout(ms(1_500));
    eventually_async(DEADLINE, "it listens", async || {
        std::net::TcpStream::connect(("127.0.0.1", alone.port())).is_ok()
    })
    .await;
    let error = builder.connect().await.unwrap_err();
    says("no majority", &error, ErrorKind::Backend, &["etcd", "leader"]);
}

/// A full database takes no writes, and says so. Held locks are renewed and released all the same.
#[tokio::test]
async fn a_full_database_is_an_error_with_a_remedy() {
    let server = EtcdServer::builder().setting("quota-backend-bytes", 1 << 20).start();
    let pool = patient(server.url(), ms(20_000)).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let full = json!({ "key": "Zg==", "value": "A".repeat(400_000) });
    eventually_async(DEADLINE, "the alarm is raised", async || {
        server.try_post("kv/put", &full, DEADLINE).is_err()
    })
    .await;
    let error = pool.lock("order:2").wait(ms(300)).acquire().await.unwrap_err();
    says("no space", &error, ErrorKind::Backend, &["space", "alarm disarm"]);
    let warnings = format!("{:?}", pool.health().await.unwrap().warnings);
    assert!(warnings.contains("no space") && warnings.contains("single member"), "{warnings}");
    guard.verify().await.unwrap();
    // Also behind a reconnect: its number cannot be written.
    server.restart();
    eventually_async(DEADLINE, "it is connected", async || guard.verify().await.is_ok()).await;
    let error = pool.lock("order:2").wait(ms(300)).acquire().await.unwrap_err();
    says("no space behind a reconnect", &error, ErrorKind::Backend, &["space", "alarm disarm"]);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_request_for_too_many_keys_is_refused_with_a_remedy() {
    let (server, root) = EtcdServer::shared();
    let pool = patient(server.url_of(&root), ms(20_000)).await;
    let keys = |count: usize| (0..count).map(|n| format!("account:{n}")).collect::<Vec<_>>();
    let guard = pool.lock_all(keys(127)).acquire().await.unwrap();
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
    let error = pool.lock_all(keys(128)).wait(ms(300)).acquire().await.unwrap_err();
    says("128 keys", &error, ErrorKind::Backend, &["max-txn-ops"]);
    cycle(&pool, "account:0").await;
}

#[tokio::test]
async fn connections_may_be_encrypted() {
    let server = EtcdServer::builder().tls(Tls::new(&Authority::new())).start();
    let ca = server.tls_files().authority.display().to_string();
    let url = format!("{}?ca={ca}", server.tls_url());
    let pools = [patient(&url, ms(20_000)).await, patient(&url, ms(20_000)).await];
    alternate(pools, "order:1", 10).await;
    let unknown = LockPool::connect(&server.tls_url()).await.unwrap_err();
    says("an unknown authority", &unknown, ErrorKind::Backend, &["certificate"]);
    let plain = server.tls_url().replace("etcds", "etcd");
    let error = LockPool::builder(plain).connect_timeout(ms(1_500)).connect().await.unwrap_err();
    says("TLS where it is not asked for", &error, ErrorKind::Backend, &["127.0.0.1"]);
}
