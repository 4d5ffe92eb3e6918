//! More tasks than a line may hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lock_runtime::{ErrorKind, LockPool, Wait};
use lock_tests::RedisServer;
use tokio::task::JoinSet;

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
        let pool = pool.connect().await.expect("the server takes us");
        let held = pool.lock("crowd").acquire().await.expect("nobody else wants it");
        let memory = resident_mb(std::process::id());
        let began = Instant::now();
        let refused = Arc::new(AtomicUsize::new(0));
        let mut set = JoinSet::new();
        for _ in 0..TASKS {
            let (pool, refused) = (pool.clone(), refused.clone());
            set.spawn(async move {
                match pool.lock("crowd").wait(Wait::Forever).acquire().await {
                    Ok(guard) => usize::from(guard.release().await.is_ok()),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::QueueFull);
                        refused.fetch_add(1, Ordering::Relaxed);
                        0
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
        held.release().await.expect("it is ours");
        let served: usize = set.join_all().await.into_iter().sum();
        report.figure("served", "tasks", &[served as f64], Bar::AtLeast(MAX_WAITERS as f64));
    });
}
