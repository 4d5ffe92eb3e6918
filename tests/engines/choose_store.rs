//! The example `choose_store` on each store.

use std::time::Duration;

use lock_tests::{Worker, example};

mod postgres {
    #[test]
    fn one_service_runs_on_it() {
        let server = lock_tests::PostgresServer::start();
        super::runs_on(&server.url(), "postgres");
    }
}

mod mysql {
    #[test]
    fn one_service_runs_on_it() {
        let server = lock_tests::MysqlServer::start();
        super::runs_on(&server.url(), "mysql");
    }
}

mod etcd {
    #[test]
    fn one_service_runs_on_it() {
        let (server, root) = lock_tests::EtcdServer::shared();
        super::runs_on(&server.url_of(&root), "etcd");
    }
}

mod zookeeper {
    #[test]
    fn one_service_runs_on_it() {
        let (server, root) = lock_tests::ZooKeeperServer::shared();
        super::runs_on(&server.url_of(&root), "zookeeper");
    }
}

#[track_caller]
fn runs_on(url: &str, store: &str) {
    let worker = Worker::start(&example("choose_store"), &[url]);
    let status = worker.wait_for_exit(Duration::from_secs(120));
    let output = worker.stdout().join("\n");
    assert!(status.success(), "{status}\n{output}\n{:#?}", worker.stderr());
    let calls = format!("{store}: 80 calls in 2 processes, one at a time, and fences have grown");
    assert!(output.contains(&calls), "{output}");
    let holder = format!("/{}", worker.pid());
    assert!(output.contains("  round trip ") && output.contains(&holder), "{output}");
}
