//! Stores other than Redis. Each has a module, and a variable that leaves it out, see `tests/run.sh`.

/// Each of these tests on each store.
macro_rules! on_each_engine {
    ($($name:ident),* $(,)?) => {
        on_each_engine!(@ postgres Postgres $($name)*);
        on_each_engine!(@ mysql Mysql $($name)*);
        on_each_engine!(@ etcd Etcd $($name)*);
        on_each_engine!(@ zookeeper ZooKeeper $($name)*);
    };
    (@ $engine:ident $kind:ident $($name:ident)*) => {
        mod $engine {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(lock_tests::EngineKind::$kind).await;
                }
            )*
        }
    };
}

mod ambiguity;
mod cancellation;
mod chaos;
mod choose_store;
mod clock_steps;
mod dead_leaders;
mod etcd;
mod exit_paths;
mod failover;
mod fence_gate;
mod late_writes;
mod locked_rows;
mod long_keys;
mod moved_store;
mod mysql;
mod old_tables;
mod pin;
mod postgres;
mod queued_owners;
mod renewals;
mod restores;
mod several_keys;
mod slow_links;
mod zookeeper;
