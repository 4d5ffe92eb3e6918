//! What an early first renewal adds to an uncontended cycle. After that renewal, Redis notifies the holder of a `DEL`.

use std::time::{Duration, Instant};

use lock_runtime::LockPool;
use lock_tests::RedisServer;

use crate::report::{Bar, Report};
use crate::resources::cpu_seconds;
use crate::scenarios::commands_sent;
use crate::{Plan, runtime};

const FIRST_RENEWAL: Duration = Duration::from_millis(25);

/// The commands of these cycles are counted.
const COUNTED: u32 = 10;

/// Means of some cycles, in microseconds.
struct Cycle {
    /// Acquire and release, without the body.
    took: f64,
    /// Of this process and of the server.
    cpu: f64,
}

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    report.begin("first-renewal", "uncontended cycles with and without an early first renewal");
    let server = RedisServer::start();
    let runtime = runtime();
    let builders = [
        LockPool::builder(server.url()),
        LockPool::builder(server.url()).first_renewal(FIRST_RENEWAL),
    ];
    let pools = builders.map(|pool| runtime.block_on(pool.connect()).expect("it is reachable"));
    let few = if plan.quick { 20 } else { 40 };
    for (name, body, cycles) in
        [("empty body", Duration::ZERO, 100 * few), ("body of 50 ms", 2 * FIRST_RENEWAL, few)]
    {
        let mut figures = [const { (Vec::new(), Vec::new()) }; 2];
        // The first pair warms up.
        for run in 0..=plan.runs {
            for (pool, (took, cpu)) in pools.iter().zip(&mut figures) {
                let task = runtime.spawn(cycle(pool.clone(), body, cycles, server.pid()));
                let cycle = runtime.block_on(task).expect("no cycle panics");
                if run > 0 {
                    took.push(cycle.took);
                    cpu.push(cycle.cpu);
                }
            }
        }
        for ((setting, pool), (took, cpu)) in ["without", "with"].iter().zip(&pools).zip(figures) {
            let what = format!("{name}, {setting}");
            let commands = commands_sent(&server, || {
                runtime.block_on(cycle(pool.clone(), body, COUNTED, server.pid()));
            });
            let commands = commands as f64 / f64::from(COUNTED);
            report.figure(&format!("{what}: commands"), "", &[commands], Bar::None);
            report.figure(&format!("{what}: acquire and release"), "us", &took, Bar::None);
            report.figure(&format!("{what}: processor time"), "us", &cpu, Bar::None);
        }
    }
}

async fn cycle(pool: LockPool, body: Duration, cycles: u32, server: u32) -> Cycle {
    let cpu_of_both = || cpu_seconds(std::process::id()) + cpu_seconds(server);
    let (mut took, cpu) = (Duration::ZERO, cpu_of_both());
    for _ in 0..cycles {
        let began = Instant::now();
        let guard = pool.lock("bench:first").fencing(false).acquire().await.expect("it is free");
        took += began.elapsed();
        if !body.is_zero() {
            tokio::time::sleep(body).await;
        }
        let ended = Instant::now();
        guard.release().await.expect("it is held");
        took += ended.elapsed();
    }
    let micros = |seconds: f64| seconds * 1e6 / f64::from(cycles);
    Cycle { took: micros(took.as_secs_f64()), cpu: micros(cpu_of_both() - cpu) }
}
