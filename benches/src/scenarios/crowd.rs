//! More tasks than a wait queue may hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lock_runtime::{ErrorKind, LockPool, Wait};
use lock_tests::RedisServer;

use crate::report::{Bar, Report};
use crate::resources::resident_mb;
use crate::{Plan, runtime};

const TASKS: usize = 100_000;
const MAX_WAITERS: usize = 1000;

pub(crate) fn measure(_plan: Plan, report: &mut Report) {
    report.begin("crowd", "100,000 tasks want one key, of which 1,000 may wait");
    let server = RedisServer::start();
    runtime().block_on(async {
        let pool = LockPool::builder(server.url()).max_waiters(MAX_WAITERS);
        let pool = pool.connect().await.expect("the server is reachable");
        let held = pool.lock("crowd").acquire().await.expect("the lock is free");
        let memory = resident_mb(std::process::id());
        let began = Instant::now();
        let (refused, served) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        for n in 0..TASKS {
            // Spawned in portions, as requests would arrive.
            while n > MAX_WAITERS + refused.load(Ordering::Relaxed) + 10_000 {
                tokio::time::sleep(Duration::from_micros(100)).await;
            }
            let (pool, refused, served) = (pool.clone(), refused.clone(), served.clone());
            // Not joined: a finished task must free all its memory.
            tokio::spawn(async move {
                match pool.lock("crowd").wait(Wait::Forever).acquire().await {
                    Ok(guard) => {
                        guard.release().await.expect("the lock is held");
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::QueueFull);
                        refused.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        while refused.load(Ordering::Relaxed) < TASKS - MAX_WAITERS {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let took = began.elapsed().as_secs_f64();
        let grown = resident_mb(std::process::id()) - memory;
        report.figure("until 99,000 were refused", "s", &[took], Bar::AtMost(1.0));
        report.figure("growth of the resident memory", "MB", &[grown], Bar::AtMost(64.0));
        held.release().await.expect("the lock is held");
        while served.load(Ordering::Relaxed) < MAX_WAITERS && began.elapsed().as_secs() < 60 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let served = served.load(Ordering::Relaxed);
        report.figure("served", "tasks", &[served as f64], Bar::AtLeast(MAX_WAITERS as f64));
    });
}
