//! Refusals of a server, each with what to do about it, and sessions with unusual settings.

use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{Credentials, ErrorKind, LockPool};
use lock_tests::expected_error::{CANARY, says};
use lock_tests::postgres::programs;
use lock_tests::prelude::*;
use lock_tests::process::Process;
use lock_tests::tls::{Authority, Tls};
use lock_tests::{PostgresServer, eventually_async};

#[tokio::test]
async fn a_refusal_names_its_remedy() {
    let server = PostgresServer::start();
    let at =
        |user: &str, rest: &str| format!("postgres://{user}@127.0.0.1:{}/{rest}", server.port());
    let refused = async |url: String| LockPool::connect(&url).await.unwrap_err();
    let backend = ErrorKind::Backend;
    let without_tables = refused(at("locks", "locks")).await;
    says("no tables", &without_tables, backend, &["lock_lease", "docs/postgres.md", "?create=on"]);
    says("no database", &refused(at("locks", "other")).await, backend, &["other", "3D000"]);
    says("no user", &refused(at("stranger", "locks")).await, backend, &["stranger", "user"]);
    LockPool::connect(&server.url()).await.unwrap();
    server.query("CREATE ROLE worker LOGIN");
    let unprivileged = refused(at("worker", "locks")).await;
    says("no rights", &unprivileged, backend, &["42501", "GRANT SELECT, INSERT, UPDATE, DELETE"]);
    server.query("GRANT SELECT, INSERT, UPDATE, DELETE ON lock_lease, lock_queue TO worker");
    let [one, other] = [
        patient(at("worker", "locks"), ms(20_000)).await,
        patient(at("worker", "locks"), ms(20_000)).await,
    ];
    alternate([one.clone(), other], "order:1", 10).await;
    server.query("REVOKE UPDATE ON lock_lease FROM worker");
    let error = one.lock("order:1").wait(ms(500)).acquire().await.unwrap_err();
    says("a right taken away", &error, backend, &["42501", "GRANT"]);
    server.query("GRANT UPDATE ON lock_lease TO worker");
    cycle(&one, "order:1").await;
    server.query("ALTER DATABASE locks SET default_transaction_read_only = on");
    server.kill_clients();
    let read_only =
        LockPool::builder(at("locks", "locks")).connect_timeout(ms(3_000)).connect().await;
    says("read-only", &read_only.unwrap_err(), backend, &["read-only", "primary"]);
}

#[tokio::test]
async fn a_password_is_checked_and_never_shown() {
    let server = PostgresServer::start();
    server.query(&format!(
        "CREATE ROLE worker LOGIN PASSWORD '{CANARY}'; GRANT ALL ON SCHEMA public TO worker"
    ));
    server.require_passwords_of("worker");
    let url = |password: &str| {
        let port = server.port();
        format!("postgres://worker:{password}@127.0.0.1:{port}/locks?create=on")
    };
    let pool = LockPool::connect(&url(CANARY)).await.unwrap();
    cycle(&pool, "order:1").await;
    let error = LockPool::connect(&url("wrong")).await.unwrap_err();
    says("a wrong password", &error, ErrorKind::Backend, &["28P01", "user and password"]);
    let given = || async { Ok::<_, std::io::Error>(Credentials::new("worker", CANARY)) };
    for two in [url("wrong"), url("") + "&password=wrong"] {
        let error = LockPool::builder(two).credentials(given).connect().await.unwrap_err();
        says("two passwords", &error, ErrorKind::Config, &["the URL has a password", "leave"]);
    }
    let pool = LockPool::builder(url("")).credentials(given).connect().await.unwrap();
    cycle(&pool, "order:1").await;
}

#[tokio::test]
async fn an_address_without_a_server_is_an_error_that_names_it() {
    let port = lock_tests::server::another_port();
    let url = format!("postgres://worker:{CANARY}@127.0.0.1:{port}/locks");
    let error = LockPool::connect(&url).await.unwrap_err();
    says("unreachable", &error, ErrorKind::Backend, &["127.0.0.1", "unreachable"]);
}

#[tokio::test]
async fn a_standby_is_refused() {
    let server = PostgresServer::builder().standby().start();
    let url = format!("postgres://locks@127.0.0.1:{}/locks", server.port());
    let error = LockPool::builder(url).connect_timeout(ms(3_000)).connect().await.unwrap_err();
    says("a standby", &error, ErrorKind::Backend, &["read-only", "primary"]);
}

#[tokio::test]
async fn sessions_with_unusual_settings_conform() {
    let server = PostgresServer::start();
    for setting in [
        "timezone = 'Asia/Kathmandu'",
        "datestyle = 'SQL, DMY'",
        "default_transaction_isolation = 'serializable'",
        "bytea_output = 'escape'",
        "standard_conforming_strings = off",
        "search_path = 'app'",
    ] {
        server.query(&format!("ALTER DATABASE locks SET {setting}"));
    }
    server.query("CREATE SCHEMA app");
    let url = server.url();
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
}

#[tokio::test]
async fn tables_may_have_another_name_and_schema() {
    let server = PostgresServer::builder().setting("fsync", "on").start();
    server.query("CREATE SCHEMA app");
    let url = format!("{}&table=app.mutex", server.url());
    let pools = [patient(&url, ms(20_000)).await, patient(&url, ms(20_000)).await];
    alternate(pools.clone(), "order:1", 10).await;
    assert_eq!(server.query("SELECT count(*) FROM app.mutex_lease"), [["1"]]);
    assert_eq!(pools[0].health().await.unwrap().warnings, []);
}

#[tokio::test]
async fn settings_by_which_locks_could_be_lost_are_warned_of() {
    let server = PostgresServer::builder()
        .setting("fsync", "off")
        .setting("synchronous_commit", "off")
        .start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    server.query("ALTER TABLE lock_lease SET UNLOGGED");
    let warnings = pool.health().await.unwrap().warnings;
    let text = format!("{warnings:?}");
    for expected in ["fsync = off", "synchronous_commit", "unlogged"] {
        assert!(text.contains(expected), "`{expected}` is missing in {text}");
    }
}

/// A program that receives the log of the server counts as a standby.
#[tokio::test]
async fn a_standby_that_commits_do_not_wait_for_is_warned_of() {
    let server = PostgresServer::builder()
        .setting("fsync", "on")
        .setting("wal_level", "replica")
        .setting("max_wal_senders", "10")
        .setting("synchronous_standby_names", "*")
        .start();
    let (dir, port) = (tempfile::tempdir().unwrap(), server.port().to_string());
    let mut receiver = Process::command(programs().join("pg_receivewal"));
    receiver.args(["--synchronous", "--username=locks", "--host=127.0.0.1", "--port", &port]);
    receiver.arg("--directory").arg(dir.path());
    let _receiver = Process::spawn(receiver).unwrap();
    let connected = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
    eventually_async(DEADLINE, "the standby is there", async || server.query(connected) == [["1"]])
        .await;
    let warnings = async || {
        let pool = LockPool::connect(&server.url()).await.unwrap();
        format!("{:?}", pool.health().await.unwrap().warnings)
    };
    assert_eq!(warnings().await, "[]");
    server.query("ALTER ROLE locks SET synchronous_commit = 'local'");
    let text = warnings().await;
    assert!(text.contains("a failover can free"), "{text}");
}

/// Another process makes its tables, for longer than a statement of this pool may wait for a lock.
#[tokio::test]
async fn tables_are_made_behind_those_of_another_process() {
    let server = PostgresServer::start();
    let making = server.transaction("SELECT pg_advisory_xact_lock(7813247910623541111)");
    let longer_than_a_lock = tokio::time::sleep(ms(400));
    let connecting = LockPool::builder(server.url()).request_timeout(ms(1_000)).connect();
    let connecting = tokio::spawn(connecting);
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory'";
    eventually_async(DEADLINE, "the pool waits for the lock", async || {
        connecting.is_finished() || server.query(waits) != [["0"]]
    })
    .await;
    longer_than_a_lock.await;
    drop(making);
    let pool = joined("the pool", connecting).await.unwrap();
    cycle(&pool, "order:1").await;
}

#[tokio::test]
async fn rows_that_are_not_needed_are_deleted() {
    let server = PostgresServer::start();
    let pool = LockPool::connect(&format!("{}&forget=1s", server.url())).await.unwrap();
    for n in 0..20 {
        cycle(&pool, &format!("order:{n}")).await;
    }
    let kept = pool.lock("order:held").acquire().await.unwrap();
    let rows = "SELECT count(*) FROM lock_lease";
    eventually_async(DEADLINE, "only the held lock has a row", async || {
        server.query(rows) == [["1"]]
    })
    .await;
    kept.verify().await.unwrap();
}

#[tokio::test]
async fn connections_may_be_encrypted() {
    let tls = Tls::new(&Authority::new());
    let server = PostgresServer::builder().tls(tls).start();
    let ca = server.tls_files().authority.display().to_string();
    let url = format!("{}&sslmode=require&ca={ca}", server.url());
    let pools = [patient(&url, ms(20_000)).await, patient(&url, ms(20_000)).await];
    alternate(pools.clone(), "order:1", 10).await;
    let encrypted = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
                     WHERE ssl AND application_name = 'lock_runtime'";
    assert_eq!(server.query(encrypted), [["4"]]);
    let unknown =
        LockPool::connect(&format!("{}&sslmode=require", server.url())).await.unwrap_err();
    says("an unknown authority", &unknown, ErrorKind::Backend, &["certificate"]);
    let plain = PostgresServer::start();
    let error = LockPool::connect(&format!("{}&sslmode=require", plain.url())).await.unwrap_err();
    says("a server without TLS", &error, ErrorKind::Backend, &["TLS"]);
}
