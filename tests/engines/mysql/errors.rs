//! Refusals of a server, each with what to do about it, and sessions with unusual settings.

use std::sync::Arc;

use lock_runtime::backend::{AcquireOutcome, AcquireRequest, Backend, LeaseStatus, Owner};
use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{Credentials, ErrorKind, Key, LockPool};
use lock_tests::expected_error::{CANARY, says};
use lock_tests::prelude::*;
use lock_tests::tls::{Authority, Tls};
use lock_tests::{MysqlServer, eventually_async};

use super::conformance::shared;

#[tokio::test]
async fn a_refusal_names_its_remedy() {
    let server = shared();
    let with_tables = server.database("refusals");
    let at = |user: &str, rest: &str| format!("mysql://{user}@127.0.0.1:{}/{rest}", server.port());
    let refused = async |url: String| LockPool::connect(&url).await.unwrap_err();
    let backend = ErrorKind::Backend;
    let without_tables = refused(at("locks", "refusals")).await;
    says("no tables", &without_tables, backend, &["lock_lease", "docs/mysql.md", "?create=on"]);
    server.query("GRANT ALL ON nothing.* TO locks@'%'");
    says("no database", &refused(at("locks", "nothing")).await, backend, &["nothing", "1049"]);
    says("no user", &refused(at("stranger", "refusals")).await, backend, &["stranger", "user"]);
    LockPool::connect(&with_tables).await.unwrap();
    server.query("CREATE USER worker@'%'");
    let unknown = refused(at("worker", "refusals")).await;
    says("no rights on the database", &unknown, backend, &["1044", "rights"]);
    server.query("GRANT SELECT ON refusals.lock_lease TO worker@'%'");
    let unprivileged = refused(at("worker", "refusals")).await;
    says("no rights", &unprivileged, backend, &["1142", "GRANT SELECT, INSERT, UPDATE, DELETE"]);
    let creates = refused(at("worker", "refusals?create=on&table=other")).await;
    says("no right to create", &creates, backend, &["1142", "docs/mysql.md"]);
    let rights = "SELECT, INSERT, UPDATE, DELETE";
    server.query(&format!(
        "GRANT {rights} ON refusals.lock_lease TO worker@'%'; GRANT {rights} ON refusals.lock_queue TO worker@'%'"
    ));
    let [one, other] = [
        patient(at("worker", "refusals"), ms(20_000)).await,
        patient(at("worker", "refusals"), ms(20_000)).await,
    ];
    alternate([one.clone(), other], "order:1", 10).await;
    assert_eq!(one.health().await.unwrap().warnings.len(), 1, "of the flush alone");
    server.query("REVOKE UPDATE ON refusals.lock_lease FROM worker@'%'");
    let error = one.lock("order:1").wait(ms(500)).acquire().await.unwrap_err();
    says("a right taken away", &error, backend, &["1142", "GRANT"]);
    server.query("GRANT UPDATE ON refusals.lock_lease TO worker@'%'");
    cycle(&one, "order:1").await;
}

#[tokio::test]
async fn a_password_is_checked_and_never_shown() {
    let server = shared();
    server.database("passwords");
    server.query(&format!(
        "CREATE USER secret@'%' IDENTIFIED BY '{CANARY}'; GRANT ALL ON passwords.* TO secret@'%'"
    ));
    let url = |password: &str| {
        let port = server.port();
        format!("mysql://secret:{password}@127.0.0.1:{port}/passwords?create=on")
    };
    let pool = LockPool::connect(&url(CANARY)).await.unwrap();
    cycle(&pool, "order:1").await;
    let error = LockPool::connect(&url("wrong")).await.unwrap_err();
    says("a wrong password", &error, ErrorKind::Backend, &["1045", "user and password"]);
    let given = || async { Ok::<_, std::io::Error>(Credentials::new("secret", CANARY)) };
    let error = LockPool::builder(url("wrong")).credentials(given).connect().await.unwrap_err();
    says("two passwords", &error, ErrorKind::Config, &["the URL has a password", "leave"]);
    let pool = LockPool::builder(url("")).credentials(given).connect().await.unwrap();
    cycle(&pool, "order:1").await;
}

#[tokio::test]
async fn an_address_without_a_server_is_an_error_that_names_it() {
    let port = lock_tests::server::another_port();
    let url = format!("mysql://worker:{CANARY}@127.0.0.1:{port}/locks");
    let error = LockPool::connect(&url).await.unwrap_err();
    says("unreachable", &error, ErrorKind::Backend, &["127.0.0.1", "unreachable"]);
}

/// The first host of a URL may be a replica: the next one is tried.
#[tokio::test]
async fn a_replica_is_refused_and_the_next_host_is_tried() {
    let server = MysqlServer::builder().option("read-only").start();
    let at = |hosts: &str| format!("mysql://locks@{hosts}/locks?create=on");
    let replica = format!("127.0.0.1:{}", server.port());
    let error = LockPool::connect(&at(&replica)).await.unwrap_err();
    says("a replica", &error, ErrorKind::Backend, &["read-only", "primary"]);
    let primary = shared().port();
    let pool = LockPool::connect(&at(&format!("{replica},127.0.0.1:{primary}"))).await.unwrap();
    cycle(&pool, "replica:1").await;
    // A primary becomes a replica while a pool is connected: the first refusal says so.
    server.query("SET GLOBAL read_only = 0");
    let pool = LockPool::connect(&at(&replica)).await.unwrap();
    cycle(&pool, "order:1").await;
    server.query("SET GLOBAL read_only = 1");
    let error = pool.lock("order:1").wait(ms(500)).acquire().await.unwrap_err();
    says("a primary no more", &error, ErrorKind::Backend, &["read-only", "primary"]);
    let error = pool.health().await.unwrap_err();
    says("its health", &error, ErrorKind::Backend, &["read-only", "primary"]);
    server.query("SET GLOBAL read_only = 0");
    server.query(match server.is_mariadb() {
        true => {
            "CHANGE MASTER TO MASTER_HOST = '127.0.0.1'; \
             GRANT REPLICA MONITOR ON *.* TO locks@'%'"
        }
        false => {
            "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1'; \
             GRANT REPLICATION CLIENT ON *.* TO locks@'%'"
        }
    });
    server.kill_clients();
    eventually_async(DEADLINE, "a replica without `read_only` is warned of", async || {
        let warnings = pool.health().await.map(|health| format!("{:?}", health.warnings));
        warnings.is_ok_and(|warnings| warnings.contains("replicates"))
    })
    .await;
}

/// The sessions of a demoted primary stay open. A user with all rights may even write there.
#[tokio::test]
async fn a_demoted_primary_is_left_for_the_next_host() {
    let old = MysqlServer::start();
    old.query("CREATE USER admin@'%'; GRANT ALL ON *.* TO admin@'%'");
    let new = MysqlServer::start();
    new.query("CREATE USER admin@'%'; GRANT ALL ON *.* TO admin@'%'");
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", old.port(), new.port());
    let mut pools = Vec::new();
    for user in ["locks", "admin"] {
        let url = format!("mysql://{user}@{hosts}/locks?create=on&table={user}");
        pools.push((user, LockPool::connect(&url).await.unwrap()));
    }
    for (user, pool) in &pools {
        cycle(pool, "order:1").await;
        assert_eq!(old.query(&format!("SELECT COUNT(*) FROM {user}_lease")), [["1"]]);
    }
    old.query("SET GLOBAL read_only = 1");
    for (user, pool) in &pools {
        let moved = format!("SELECT COUNT(*) FROM {user}_lease WHERE `key` = 'order:2'");
        eventually_async(DEADLINE, &format!("the pool of {user} has moved"), async || {
            if let Ok(guard) = pool.lock("order:2").wait(ms(500)).acquire().await {
                let _ = guard.release().await;
            }
            new.try_query(&moved).is_ok_and(|count| count == [["1"]])
        })
        .await;
        // Also the other connection.
        eventually_async(DEADLINE, "it renews there", async || {
            match pool.lock("order:2").wait(ms(500)).acquire().await {
                Ok(guard) => guard.verify().await.is_ok() && guard.release().await.is_ok(),
                Err(_) => false,
            }
        })
        .await;
    }
}

#[tokio::test]
async fn sessions_with_unusual_settings_conform() {
    let server = MysqlServer::builder()
        .option("autocommit=0")
        .option("sql-mode=ANSI_QUOTES,NO_BACKSLASH_ESCAPES,HIGH_NOT_PRECEDENCE")
        .mariadb_option("sql-mode=ORACLE,ANSI_QUOTES,NO_BACKSLASH_ESCAPES,EMPTY_STRING_IS_NULL,SIMULTANEOUS_ASSIGNMENT,HIGH_NOT_PRECEDENCE")
        .option("default-time-zone=+05:45")
        .option("transaction-isolation=SERIALIZABLE")
        .option("transaction-read-only=1")
        .option("completion-type=CHAIN")
        .option("character-set-server=latin1")
        .option("collation-server=latin1_german1_ci")
        .mariadb_option("lower-case-table-names=1")
        .mariadb_option("max-statement-time=1")
        .start();
    server.query("SET GLOBAL init_connect = 'SET autocommit = 0, sql_select_limit = 1, sql_safe_updates = 1'");
    let url = server.url();
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
}

/// The answer to a renewal has a row for each lease, and one that is missing would be a loss.
#[tokio::test]
async fn the_limits_of_rows_of_a_server_cut_no_answer() {
    let server = MysqlServer::start();
    server.query("SET GLOBAL sql_select_limit = 1, GLOBAL max_join_size = 1");
    let store = open_backend(&server.url()).await.unwrap();
    let request = |n| {
        let keys: Arc<[Key]> = Arc::new([Key::from(format!("order:{n}"))]);
        AcquireRequest::new(keys, Owner::random().unwrap(), ms(60_000))
    };
    let requests: Vec<_> = (0..5).map(request).collect();
    for outcome in store.acquire(&requests).await {
        assert!(matches!(outcome, Ok(AcquireOutcome::Acquired { .. })), "{outcome:?}");
    }
    let leases: Vec<_> = requests.iter().map(AcquireRequest::lease).collect();
    for outcome in store.renew(&leases).await {
        assert!(matches!(outcome, Ok(LeaseStatus::Held)), "{outcome:?}");
    }
}

/// With a binary log, as a primary has one.
#[tokio::test]
async fn tables_may_have_another_name_and_database() {
    let server = MysqlServer::builder().durable().option("log-bin").option("sync-binlog=1").start();
    server.database("app");
    let url = format!("{}&table=app.mutex", server.url());
    let pools = [patient(&url, ms(20_000)).await, patient(&url, ms(20_000)).await];
    alternate(pools.clone(), "order:1", 10).await;
    assert_eq!(server.query("SELECT COUNT(*) FROM app.mutex_lease"), [["1"]]);
    assert_eq!(pools[0].health().await.unwrap().warnings, []);
    server.query("SET GLOBAL binlog_format = STATEMENT");
    server.kill_clients();
    eventually_async(DEADLINE, "the refusal names the format of the log", async || {
        let error = pools[0].lock("order:1").wait(ms(200)).acquire().await.err();
        error.is_some_and(|error| error.to_string().contains("binlog_format"))
    })
    .await;
}

#[tokio::test]
async fn settings_by_which_locks_could_be_lost_are_warned_of() {
    let server = MysqlServer::builder().option("log-bin").option("sync-binlog=0").start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let text = format!("{:?}", pool.health().await.unwrap().warnings);
    for expected in ["innodb_flush_log_at_trx_commit", "sync_binlog"] {
        assert!(text.contains(expected), "`{expected}` is missing in {text}");
    }
    server.query("ALTER TABLE lock_queue ENGINE = MyISAM");
    let error = pool.health().await.unwrap_err();
    says("no transactions", &error, ErrorKind::Backend, &["engine", "InnoDB"]);
}

#[tokio::test]
async fn rows_that_are_not_needed_are_deleted() {
    let server = shared();
    let url = server.database("sweeps");
    let pool = LockPool::connect(&format!("{url}&forget=1s")).await.unwrap();
    for n in 0..20 {
        cycle(&pool, &format!("order:{n}")).await;
    }
    server.query("INSERT INTO sweeps.lock_queue VALUES ('order:1', 'nothing', 1, '', 0)");
    let kept = pool.lock("order:held").acquire().await.unwrap();
    let rows =
        "SELECT (SELECT COUNT(*) FROM sweeps.lock_lease), (SELECT COUNT(*) FROM sweeps.lock_queue)";
    eventually_async(DEADLINE, "only the held lock has a row", async || {
        server.query(rows) == [["1", "0"]]
    })
    .await;
    kept.verify().await.unwrap();
}

#[tokio::test]
async fn connections_may_be_encrypted() {
    let tls = Tls::new(&Authority::new());
    let server = MysqlServer::builder().tls(tls).start();
    server.query("ALTER USER locks@'%' REQUIRE SSL");
    let ca = server.tls_files().authority.display().to_string();
    let url = format!("{}&ssl-mode=required&ca={ca}", server.url());
    let pools = [patient(&url, ms(20_000)).await, patient(&url, ms(20_000)).await];
    alternate(pools.clone(), "order:1", 10).await;
    let unencrypted = LockPool::connect(&server.url()).await.unwrap_err();
    says("without TLS", &unencrypted, ErrorKind::Backend, &["1045"]);
    let unknown =
        LockPool::connect(&format!("{}&ssl-mode=required", server.url())).await.unwrap_err();
    says("an unknown authority", &unknown, ErrorKind::Backend, &["certificate"]);
    let error = LockPool::connect(&format!("{}&ssl-mode=required", shared().url())).await;
    says("a server without TLS", &error.unwrap_err(), ErrorKind::Backend, &["TLS"]);
}
