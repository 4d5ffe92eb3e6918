//! `transfers <url> <history> <process> <seed>`: four tasks that lock three of 16 accounts together until standard input
//! ends, and record the validity of their leases. Prints `working` when it begins, and the number of transfers at its end.
//! It fails then if a request has failed.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use lock_runtime::{Fence, LockError, LockPool, Wait};
use lock_tests::history::{Recorder, now_ns};
use lock_tests::worker_tasks::{InputEnd, until_input_ends};

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
    let work = |task, end| work(pool.clone(), recorder.clone(), task, rng.fork(), end);
    let mut transfers = 0;
    for done in until_input_ends(TASKS, work).await? {
        transfers += done?;
    }
    println!("{transfers}");
    Ok(())
}

async fn work(
    pool: LockPool,
    recorder: Arc<Recorder>,
    task: u64,
    mut rng: Rng,
    end: InputEnd,
) -> Result<u64, LockError> {
    let mut transfers = 0;
    while !end.is_reached() {
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
