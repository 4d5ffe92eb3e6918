//! The embedded store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use lock_runtime::LockPool;
use tokio::task::JoinSet;

use crate::lockers::Locker;
use crate::report::{Bar, Report};
use crate::stats::percentile;
use crate::{Plan, runtime};

const TASKS: usize = 64;
const KEYS: usize = 8;

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    report.begin("memory", "memory://, through the attribute");
    let runtime = runtime();
    let pool = runtime.block_on(LockPool::connect("memory://")).expect("memory is there");
    let locker = Locker::Ours(pool);
    let runs: Vec<f64> = (0..plan.runs)
        .map(|_| {
            let locker = locker.clone();
            runtime.block_on(async move {
                let cycles = tokio::spawn(async move {
                    let mut cycles = Vec::with_capacity(100_000);
                    for _ in 0..100_000 {
                        let began = Instant::now();
                        locker.section("alone", || {}).await;
                        cycles.push(began.elapsed().as_secs_f64() * 1e6);
                    }
                    percentile(&mut cycles, 50.0)
                });
                cycles.await.expect("it ends")
            })
        })
        .collect();
    report.figure("uncontended cycle, p50", "us", &runs, Bar::AtMost(2.0));

    let cycles = if plan.quick { 2_000_000 } else { 10_000_000 };
    let violations = runtime.block_on(storm(&locker, cycles));
    let name = format!("{cycles} cycles of 64 tasks on 8 keys: violations");
    report.figure(&name, "", &[violations as f64], Bar::AtMost(0.0));
}

async fn storm(locker: &Locker, cycles: usize) -> usize {
    let inside: Arc<[AtomicBool; KEYS]> = Arc::default();
    let violations = Arc::new(AtomicUsize::new(0));
    let mut set = JoinSet::new();
    for task in 0..TASKS {
        let (locker, inside, violations) = (locker.clone(), inside.clone(), violations.clone());
        set.spawn(async move {
            for n in 0..cycles / TASKS {
                let key = (task + n) % KEYS;
                let (inside, violations) = (inside.clone(), violations.clone());
                let body = move || {
                    if inside[key].swap(true, Ordering::AcqRel) {
                        violations.fetch_add(1, Ordering::Relaxed);
                    }
                    inside[key].store(false, Ordering::Release);
                };
                locker.section(&key.to_string(), body).await;
            }
        });
    }
    set.join_all().await;
    violations.load(Ordering::Relaxed)
}
