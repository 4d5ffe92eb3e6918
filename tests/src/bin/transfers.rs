//! `transfers <url> <history> <process> <seed>`: four tasks that lock three of 16 accounts together until standard input
//! ends, and record the validity of their leases. Prints `working` when it begins, and the number of transfers at its end.
//! An error of a request ends it.

use std::error::Error;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fastrand::Rng;
use lock_runtime::{Fence, LockError, LockPool, Wait};
use lock_tests::history::{Recorder, now_ns};

const TASKS: u64 = 4;
const ACCOUNTS: u8 = 16;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<_> = std::env::args().collect();
    let [_, url, dir, process, seed] = args.as_slice() else { return Err("four arguments".into()) };
    let recorder = Arc::new(Recorder::create(Path::new(dir), process)?);
    // Longer than a freeze of a busy machine, so that no lease is lost.
    let ttl = Duration::from_secs(30);
    let pool = LockPool::builder(url).ttl(ttl).wait(Wait::Forever).connect().await?;
    let mut rng = Rng::with_seed(seed.parse()?);
    let over = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            tokio::spawn(work(pool.clone(), recorder.clone(), task, rng.fork(), over.clone()))
        })
        .collect();
    println!("working");
    let ended = over.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ended.store(true, Ordering::SeqCst);
    });
    let mut transfers = 0;
    for task in tasks {
        transfers += task.await??;
    }
    println!("{transfers}");
    Ok(())
}

async fn work(
    pool: LockPool,
    recorder: Arc<Recorder>,
    task: u64,
    mut rng: Rng,
    over: Arc<AtomicBool>,
) -> Result<u64, LockError> {
    let mut transfers = 0;
    while !over.load(Ordering::SeqCst) {
        let accounts = (0..3).map(|_| format!("account:{}", rng.u8(..ACCOUNTS)));
        let asked = now_ns();
        let guard = pool.lock_all(accounts).acquire().await?;
        let fence = guard.fence().map(Fence::get);
        let grant = |key: &str| recorder.granted(key, task, asked, || guard.valid_for(), fence);
        let grants: Vec<_> = guard.keys().iter().map(|key| grant(key.as_str())).collect();
        tokio::time::sleep(Duration::from_micros(rng.u64(..2_000))).await;
        grants.into_iter().for_each(|grant| recorder.release(grant));
        guard.release().await?;
        transfers += 1;
    }
    Ok(transfers)
}
