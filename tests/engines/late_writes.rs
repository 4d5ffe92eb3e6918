//! `lock_delay`, and holders that are stopped and write after their ttl.

use std::time::Duration;

use lock_tests::late_writes::{DELAY, StoppedHolder, rounds};
use lock_tests::prelude::*;
use lock_tests::{Engine, EngineKind};

on_each_engine!(a_late_write_comes_before_the_next_grant_with_a_lock_delay_alone);

async fn a_late_write_comes_before_the_next_grant_with_a_lock_delay_alone(kind: EngineKind) {
    let url = Engine::shared(kind).url();
    let all: Vec<_> = (0..rounds()).collect();
    for few in all.chunks(5) {
        on_each(few, async |n| late_writes(&url, *n).await);
    }
}

/// Two holders are stopped. When the lock without a delay is granted again, the other one would be too.
async fn late_writes(url: &str, n: usize) {
    let program = env!("CARGO_BIN_EXE_late-writer");
    let delayed = StoppedHolder::start(program, url, &format!("delayed:{n}"), DELAY).await;
    let plain = format!("plain:{n}");
    let mut plain = StoppedHolder::start(program, url, &plain, Duration::ZERO).await;
    let next = within(DEADLINE, "the next grant", &mut plain.waiter).await.unwrap().unwrap();
    assert!(!plain.has_written() && !delayed.has_written());
    delayed.resume().await;
    assert!(!delayed.waiter.is_finished(), "the lock was granted before the late write");
    plain.resume().await;
    assert!(next.is_held(), "another holder is active while the first one writes");
    next.release().await.unwrap();
    delayed.end().await;
    plain.end().await;
}
