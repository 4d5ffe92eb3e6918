//! Examples that need etcd.

use std::time::Duration;

use lock_tests::prelude::*;
use lock_tests::{EtcdTrio, Worker, eventually, example};

/// The leader of the cluster is killed while one of three processes leads.
#[tokio::test]
async fn etcd_leader() {
    const LIMIT: Duration = Duration::from_secs(120);
    let cluster = EtcdTrio::shared().await;
    let worker = Worker::start(&example("etcd_leader"), &[cluster.url_of("/leader")]);
    // A pool that connects during an election may fail.
    for candidate in 0..3 {
        let connected = format!("candidate {candidate} is connected");
        worker.wait_for_line(LIMIT, |line| line == connected);
    }
    worker.wait_for_line(LIMIT, |line| line.contains(" leads with fence "));
    eventually(DEADLINE, "the cluster has a leader", || cluster.leader().is_some());
    let killed = cluster.leader().unwrap();
    killed.kill();
    let status = worker.wait_for_exit(LIMIT);
    killed.restart();
    let output = worker.stdout().join("\n");
    println!("{output}");
    assert!(status.success(), "{status}\n{output}\n{:#?}", worker.stderr());
    assert!(output.contains("terms, one leader at a time: yes"), "{output}");
    // The lease has five seconds, and its full length again at an election.
    let vacant = output.lines().find_map(|line| {
        let (_, rest) = line.split_once(" leads ")?;
        rest.split_once("s after the death of ")?.0.parse::<f64>().ok()
    });
    let vacant = vacant.expect("the time without a leader");
    assert!(vacant > 2.0 && vacant < 12.0, "{vacant} s\n{output}");
}
