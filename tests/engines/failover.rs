//! The primary of a database changes, and the former one lives on.

use lock_runtime::LockPool;
use lock_tests::prelude::*;
use lock_tests::{FaultProxy, PostgresServer, eventually_async};

mod postgres {
    use super::*;

    /// Two servers with the tables of the locks.
    async fn servers() -> [PostgresServer; 2] {
        let servers = [PostgresServer::start(), PostgresServer::start()];
        for server in &servers {
            cycle(&LockPool::connect(&server.url()).await.unwrap(), "order:1").await;
        }
        servers
    }

    #[tokio::test]
    async fn a_pool_leaves_a_server_that_becomes_read_only() {
        let [former, next] = servers().await;
        let hosts = [&former, &next].map(|server| format!("127.0.0.1:{}", server.port())).join(",");
        let pool = LockPool::connect(&format!("postgres://locks@{hosts}/locks")).await.unwrap();
        cycle(&pool, "order:1").await;
        former.query("ALTER SYSTEM SET default_transaction_read_only = on");
        former.query("SELECT pg_reload_conf()");
        // Each statement is refused from now on.
        let is_read_only = async || former.query("SHOW transaction_read_only") == [["on"]];
        eventually_async(DEADLINE, "the setting", is_read_only).await;
        let before = next.query_in("locks", "SELECT max(last_fence) FROM lock_lease");
        let guard = pool.lock("order:1").wait(DEADLINE).acquire().await.unwrap();
        assert_ne!(next.query_in("locks", "SELECT max(last_fence) FROM lock_lease"), before);
        guard.release().await.unwrap();
    }

    /// The name of the primary leads to the next one, and one of the two connections is opened again. The other one would renew
    /// leases at the former primary, while other processes have the locks.
    #[tokio::test]
    async fn both_connections_of_a_pool_lead_to_one_server() {
        let [former, next] = servers().await;
        let proxy = FaultProxy::to_port(former.port());
        let builder = LockPool::builder(former.url_at(proxy.port())).ttl(ms(6_000));
        let pool = builder.connect().await.unwrap();
        let guard = pool.lock("order:1").acquire().await.unwrap();
        proxy.redirect(next.port());
        let ended = former.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE application_name = 'lock_runtime' AND query LIKE '%INSERT INTO%lock_lease%'",
        );
        assert_eq!(ended, [["t"]]);
        let other = pool.lock("order:2").wait(DEADLINE).acquire().await.unwrap();
        assert_eq!(
            next.query_in("locks", "SELECT count(*) FROM lock_lease WHERE key = 'order:2'"),
            [["1"]]
        );
        within(DEADLINE, "the loss", guard.lost()).await;
        assert!(other.verify().await.is_ok());
    }
}
