//! Several processes lock overlapping sets of keys.

use lock_tests::transfers::overlap_without_an_error;
use lock_tests::{Engine, EngineKind, eventually_async};

on_each_engine!(overlapping_keys_of_processes_end_in_no_deadlock);

async fn overlapping_keys_of_processes_end_in_no_deadlock(kind: EngineKind) {
    let engine = Engine::start(kind);
    let url = engine.url();
    let program = env!("CARGO_BIN_EXE_transfers");
    tokio::task::spawn_blocking(move || overlap_without_an_error(program, &url)).await.unwrap();
    let empty = async || engine.owners() == 0;
    eventually_async(std::time::Duration::from_secs(10), "nothing is left", empty).await;
    assert_eq!(engine.deadlocks(), 0, "{}", engine.log());
}
