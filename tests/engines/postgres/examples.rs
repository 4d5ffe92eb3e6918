//! The examples that need a PostgreSQL server.

use std::time::Duration;

use lock_tests::{PostgresServer, Worker, example};

#[test]
fn a_table_refuses_the_write_of_a_holder_that_was_stopped() {
    let says =
        ["second: the write of `shipped` is accepted", "the write of `cancelled` is refused"];
    ends_well("fenced_writes", &says);
}

#[test]
fn a_pinned_transaction_of_a_holder_that_was_stopped_is_refused() {
    let says = [
        "second: the transaction of `shipped` is committed",
        "first:  the transaction of `cancelled` is refused with SQLSTATE LK001",
    ];
    ends_well("postgres_orders", &says);
}

#[test]
fn the_late_commit_of_a_session_that_was_idle_for_too_long_fails() {
    let says = [
        "second: the transaction of `shipped` is committed",
        "first:  the late commit fails: the server has ended the session",
    ];
    ends_well("for_update", &says);
}

/// The example ends well, and its output contains `says`.
#[track_caller]
fn ends_well(name: &str, says: &[&str]) {
    let server = PostgresServer::start();
    let url = format!("postgres://locks@127.0.0.1:{}/locks", server.port());
    let worker = Worker::start(&example(name), &[&url]);
    let status = worker.wait_for_exit(Duration::from_secs(60));
    let output = worker.stdout().join("\n");
    assert!(status.success(), "{status}\n{output}\n{:#?}", worker.stderr());
    for line in says {
        assert!(output.contains(line), "{line}?\n{output}");
    }
}
