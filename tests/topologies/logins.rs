//! Logins: changing passwords, Unix sockets, Valkey's schemes, certificates without a known authority.

#![allow(clippy::disallowed_methods)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{Credentials, ErrorKind, LockPool, PoolBuilder, Wait};
use lock_tests::logs::Logs;
use lock_tests::prelude::*;
use lock_tests::sentinel::Passwords;
use lock_tests::server::Config;
use lock_tests::tls::{Authority, Tls};
use lock_tests::{Quorum, RedisCluster, RedisServer, Watched, eventually_async};

const SOON: Duration = ms(30_000);
const LONG: Duration = ms(120_000);
const OLD: &str = "c4n4ry-one";
const NEW: &str = "c4n4ry-two";

/// The credentials of a provider, and the number of its calls.
#[derive(Clone)]
struct Vault {
    password: Arc<Mutex<String>>,
    asked: Arc<AtomicUsize>,
}

impl Vault {
    fn new() -> Self {
        Self { password: Arc::new(Mutex::new(OLD.to_owned())), asked: Arc::default() }
    }

    fn builder(&self, url: &str) -> PoolBuilder {
        let vault = self.clone();
        LockPool::builder(url).ttl(LONG).wait(Wait::Forever).credentials(move || {
            vault.asked.fetch_add(1, Ordering::SeqCst);
            let password = vault.password.lock().unwrap().clone();
            async move { Ok::<_, std::io::Error>(Credentials::new("worker", password)) }
        })
    }

    fn turns(&self) {
        NEW.clone_into(&mut self.password.lock().unwrap());
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

fn with_worker(config: Config) -> Config {
    config.config_line(&format!("user worker on >{OLD} ~* &* +@all"))
}

/// The server rejects the old password, also on connections that are logged in.
fn rotate(servers: &[&RedisServer]) {
    for server in servers {
        assert_eq!(
            server.cli(&["ACL", "SETUSER", "worker", "resetpass", &format!(">{NEW}")]),
            "OK"
        );
        server.kill_clients();
    }
}

fn is_redacted(text: &str) {
    assert!(!text.contains("c4n4ry"), "{text}");
}

/// A held lock outlives the change, and the pool need not be built again.
async fn outlives_a_rotation(url: &str, servers: &[&RedisServer]) {
    let vault = Vault::new();
    let builder = vault.builder(url);
    is_redacted(&format!("{builder:?}"));
    let pool = builder.connect().await.unwrap();
    let held = pool.lock("held").fencing(false).acquire().await.unwrap();
    let asked = vault.asked();
    assert!(asked > 0);

    rotate(servers);
    eventually_async(SOON, "the provider is called again", async || vault.asked() > asked).await;
    eventually_async(SOON, "the old password is refused", async || {
        let refused = pool.lock("other").fencing(false).wait(Duration::ZERO).acquire().await;
        let Err(error) = refused else { return false };
        is_redacted(&format!("{error} {error:?}"));
        assert_eq!(error.kind(), ErrorKind::Backend);
        let text = error.to_string();
        text.contains("the provider gives") && text.contains("`.credentials(..)`")
    })
    .await;
    let waiting = tokio::spawn(pool.lock("other").fencing(false).acquire());
    vault.turns();
    joined("the waiter", waiting).await.unwrap().release().await.unwrap();
    eventually_async(SOON, "the lock is still held", async || held.verify().await.is_ok()).await;
    held.release().await.unwrap();
}

mod rotated {
    use super::*;

    #[tokio::test]
    async fn at_one_server() {
        let server = with_worker(RedisServer::builder()).start();
        let url = format!("redis://127.0.0.1:{}", server.port());
        outlives_a_rotation(&url, &[&server]).await;
        outlives_a_rotation_without_scripts(&server).await;
    }

    /// The connection beside the one that all requests share logs in by itself.
    async fn outlives_a_rotation_without_scripts(server: &RedisServer) {
        let back = format!(">{OLD}");
        assert_eq!(server.cli(&["ACL", "SETUSER", "worker", "resetpass", &back]), "OK");
        let url = format!("redis://127.0.0.1:{}?scripts=off", server.port());
        outlives_a_rotation(&url, &[server]).await;
    }

    #[tokio::test]
    async fn in_a_cluster() {
        let cluster = RedisCluster::start_with(with_worker);
        let servers: Vec<_> = cluster.nodes().iter().collect();
        outlives_a_rotation(&cluster.url(), &servers).await;
    }

    #[tokio::test]
    async fn at_the_nodes_of_a_quorum() {
        let quorum = Quorum::of(3, &with_worker(RedisServer::builder()));
        let servers: Vec<_> = quorum.nodes().iter().collect();
        outlives_a_rotation(&quorum.url(), &servers).await;
    }

    #[tokio::test]
    async fn at_a_master_that_sentinels_know() {
        let set = Watched::start();
        let worker = format!("ACL SETUSER worker on >{OLD} ~* &* +@all");
        let worker: Vec<_> = worker.split(' ').collect();
        let servers: Vec<_> = set.servers.iter().collect();
        for server in &servers {
            assert_eq!(server.cli(&worker), "OK");
        }
        outlives_a_rotation(&set.url(), &servers).await;
    }

    #[tokio::test]
    async fn sentinels_have_a_provider_of_their_own() {
        let set = Watched::start_with(Passwords { server: None, sentinel: Some(OLD) });
        let url = set.url_with(Passwords::default());
        let give = || async { Ok::<_, std::io::Error>(Credentials::password(OLD)) };
        let builder = LockPool::builder(&url).sentinel_credentials(give);
        is_redacted(&format!("{builder:?}"));
        let pool = builder.connect().await.unwrap();
        pool.lock("k").acquire().await.unwrap().release().await.unwrap();
        let error = LockPool::connect(&url).await.unwrap_err();
        assert!(error.to_string().contains("sentinel"), "{error}");
        let error = LockPool::builder(set.url()).sentinel_credentials(give).connect().await;
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Config);
        for url in ["redis://127.0.0.1:1", "redis+cluster://127.0.0.1:1"] {
            let error = LockPool::builder(url).sentinel_credentials(give).connect().await;
            let error = error.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains("has no sentinels"), "{error}");
        }
    }
}

mod provider {
    use super::*;

    async fn refused(url: &str, builder: impl FnOnce(PoolBuilder) -> PoolBuilder) -> String {
        let builder = builder(LockPool::builder(url).connect_timeout(SOON));
        let error = builder.connect().await.unwrap_err();
        is_redacted(&format!("{error:?}"));
        format!("{:?} {error}", error.kind())
    }

    #[tokio::test]
    async fn that_fails_panics_or_hangs_is_named() {
        let server = RedisServer::start();
        let url = server.url();
        let text =
            refused(&url, |builder| builder.credentials(|| async { Err("the vault is sealed") }))
                .await;
        assert!(text.starts_with("Backend ") && text.contains("the vault is sealed"), "{text}");
        let text = refused(&url, |builder| {
            builder.credentials(|| async { panic!("oops") as Result<Credentials, std::io::Error> })
        })
        .await;
        assert!(text.starts_with("Backend ") && text.contains("panicked"), "{text}");
        let text = refused(&url, |builder| {
            let builder = builder.connect_timeout(ms(1_000));
            builder.credentials(std::future::pending::<Result<Credentials, std::io::Error>>)
        })
        .await;
        let says = ["Backend ", "the provider of credentials has not answered", "connect_timeout"];
        assert!(says.iter().all(|says| text.contains(says)), "{text}");
    }

    /// A provider that blocks its thread delays no renewal of the process.
    #[tokio::test]
    async fn that_blocks_holds_up_no_renewal() {
        let server = RedisServer::start();
        let other = LockPool::builder(server.url()).ttl(ms(2_000)).connect().await.unwrap();
        let held = other.lock("k").acquire().await.unwrap();
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let builder = LockPool::builder(server.url()).connect_timeout(LONG);
        let connecting = tokio::spawn(
            builder
                .credentials(move || {
                    let _ = gate.lock().unwrap().recv();
                    async { Ok::<_, std::io::Error>(Credentials::password("x")) }
                })
                .connect(),
        );
        let renewals = || server.calls("pexpire");
        let before = renewals();
        eventually_async(SOON, "it is renewed", async || renewals() >= before + 4).await;
        assert!(held.is_held() && !connecting.is_finished());
        drop(go);
        // The default user takes any password.
        assert!(connecting.await.unwrap().is_ok());
    }

    #[tokio::test]
    async fn beside_a_password_or_without_a_log_in_is_refused() {
        let give = || async { Ok::<_, std::io::Error>(Credentials::password(NEW)) };
        for url in [
            "redis://:c4n4ry@127.0.0.1:1",
            "redis+cluster://:c4n4ry@127.0.0.1:1",
            "redis+sentinel://:c4n4ry@127.0.0.1:1/m",
            "redlock://:c4n4ry@127.0.0.1:1,127.0.0.1:2,127.0.0.1:3",
            "memory://",
        ] {
            let text = refused(url, |builder| builder.credentials(give)).await;
            assert!(text.starts_with("Config "), "{text}");
        }
    }
}

#[tokio::test]
async fn a_unix_socket() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("redis.sock");
    let path = path.to_str().unwrap();
    let config = RedisServer::builder().arg("unixsocket", path);
    let server = config.config_line("user worker on >p@ss ~* &* +@all").start();
    let url = format!("redis+unix://{path}");
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
    // The same locks as by TCP.
    let by_tcp = LockPool::connect(&format!("{}/3", server.url())).await.unwrap();
    for url in [
        format!("unix://worker:p%40ss@{path}?db=3"),
        format!("unix://{path}?user=worker&pass=p%40ss&db=3"),
        format!("valkey+unix://{path}?db=3&scripts=off"),
    ] {
        let pool = LockPool::connect(&url).await.unwrap();
        let guard = pool.lock("k").fencing(false).acquire().await.unwrap();
        assert!(by_tcp.lock("k").try_acquire().await.unwrap().is_none(), "{url}");
        guard.release().await.unwrap();
    }
    drop(server);
    let error = LockPool::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(error.to_string().contains(path), "{error}");
}

#[tokio::test]
async fn the_schemes_of_valkey() {
    let server = RedisServer::start();
    let host = server.url().replace("redis://", "");
    let cluster = RedisCluster::start();
    for url in [
        format!("valkey://{host}"),
        format!("valkey://{host}?db=2"),
        cluster.url().replace("redis+", "valkey+"),
    ] {
        let pool = LockPool::connect(&url).await.unwrap();
        pool.lock("k").acquire().await.unwrap().release().await.unwrap();
    }
    let nodes: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let urls: Vec<_> = nodes.iter().map(|node| node.url().replace("redis:", "valkey:")).collect();
    let pool = LockPool::connect(&format!("redlock://{}", urls.join(","))).await.unwrap();
    pool.lock("k").acquire().await.unwrap().release().await.unwrap();
}

/// A certificate that is expired, for another name, and of an unknown authority.
fn untrusted() -> RedisServer {
    let authority = Authority::new();
    let tls = Tls::new(&authority).server(authority.issue_expired(&["elsewhere"]));
    RedisServer::builder().tls(tls).start()
}

/// As `openssl req -x509` makes it: marked as an authority.
#[tokio::test]
async fn a_self_signed_certificate_is_trusted_for_its_names() {
    let start = |names: &[&str]| RedisServer::builder().tls(Tls::self_signed(names)).start();
    let (server, other) = (start(&["127.0.0.1"]), start(&["127.0.0.1"]));
    let by = |server: &RedisServer, trusted: &RedisServer| {
        format!("{}?ca={}", server.url(), trusted.tls_files().authority.display())
    };
    let pool = LockPool::connect(&by(&server, &server)).await.unwrap();
    pool.lock("k").acquire().await.unwrap().release().await.unwrap();
    let unknown = LockPool::connect(&by(&server, &other)).await.unwrap_err().to_string();
    assert!(unknown.contains("CaUsedAsEndEntity") && unknown.contains("`?ca="), "{unknown}");
    let elsewhere = start(&["elsewhere"]);
    let wrong = LockPool::connect(&by(&elsewhere, &elsewhere)).await.unwrap_err().to_string();
    assert!(wrong.contains("not valid for name"), "{wrong}");
}

#[tokio::test]
async fn any_certificate_with_a_warning() {
    let servers = [untrusted(), untrusted(), untrusted()];
    let url = servers[0].url();
    let error = LockPool::connect(&url).await.unwrap_err();
    assert!(error.to_string().contains("?ca="), "{error}");
    let logs = Logs::global();
    let hosts: Vec<_> =
        servers.iter().map(|server| server.url().replace("rediss://", "")).collect();
    for (url, warnings) in [
        (format!("{url}?insecure"), 1),
        (format!("{url}?insecure=true&scripts=off"), 1),
        (format!("{}?insecure", url.replace("rediss", "valkeys")), 1),
        (format!("redlock://{}?insecure", hosts.join(",")), 3),
    ] {
        let before = logs.lines_with("is not verified").len();
        let pool = LockPool::connect(&url).await.unwrap();
        pool.lock("k").fencing(false).acquire().await.unwrap().release().await.unwrap();
        let said: Vec<_> = pool.health().await.unwrap().warnings;
        let said = said.iter().map(ToString::to_string);
        let said: Vec<_> = said.filter(|it| it.contains("is not verified")).collect();
        assert_eq!(said.len(), warnings, "{said:?}");
        assert!(
            said.iter().all(|it| it.contains("`?insecure`") && it.contains("`?ca=")),
            "{said:?}"
        );
        eventually_async(SOON, "the warnings are logged", async || {
            logs.lines_with("is not verified").len() >= before + warnings
        })
        .await;
    }
}
