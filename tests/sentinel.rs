//! A master that sentinels watch, and that is another one from time to time.

#![allow(clippy::disallowed_methods)]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lock_runtime::testing::{conformance, open};
use lock_runtime::{ErrorKind, LockPool};
use lock_tests::sentinel::{Passwords, Watched, role};
use lock_tests::{RedisServer, eventually_async};

const KEYS: usize = 4;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[tokio::test]
async fn every_store_passes_the_suite_this_one_too() {
    let watched = Watched::start();
    let url = watched.url();
    conformance(open(&url).await.unwrap(), open(&url).await.unwrap()).await;
}
