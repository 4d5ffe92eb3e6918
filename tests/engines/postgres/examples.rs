//! The examples that need a PostgreSQL server.

use std::time::Duration;

use lock_tests::{PostgresServer, Worker, example};

#[test]
fn a_table_refuses_the_write_of_a_holder_that_was_stopped() {
    let server = PostgresServer::start();
    let url = format!("postgres://locks@127.0.0.1:{}/locks", server.port());
    let worker = Worker::start(&example("fenced_writes"), &[&url]);
    let status = worker.wait_for_exit(Duration::from_secs(60));
    let output = worker.stdout().join("\n");
    assert!(status.success(), "{status}\n{output}\n{:#?}", worker.stderr());
    for line in
        ["second: the write of `shipped` is accepted", "the write of `cancelled` is refused"]
    {
        assert!(output.contains(line), "{line}?\n{output}");
    }
}
