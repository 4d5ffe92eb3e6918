//! `crowd <url> <history> <process> <seed>`: eight tasks that take and free four hot locks until standard
//! input ends, and record the validity of their leases. Prints `working` when it begins.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use lock_runtime::{Fence, LockPool};
use lock_tests::history::{Recorder, now_ns};
use lock_tests::worker_tasks::{InputEnd, until_input_ends};

const TASKS: u64 = 8;
const KEYS: u8 = 4;
const TTL: Duration = Duration::from_millis(300);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<_> = std::env::args().collect();
    let [_, url, dir, process, seed] = args.as_slice() else { return Err("four arguments".into()) };
    let recorder = Arc::new(Recorder::create(Path::new(dir), process)?);
    let pool = LockPool::builder(url).ttl(TTL).wait(Duration::from_secs(1)).connect().await?;
    let mut rng = Rng::with_seed(seed.parse()?);
    until_input_ends(TASKS, |task, end| {
        work(pool.clone(), recorder.clone(), task, rng.fork(), end)
    })
    .await?;
    Ok(())
}

async fn work(pool: LockPool, recorder: Arc<Recorder>, task: u64, mut rng: Rng, end: InputEnd) {
    while !end.is_reached() {
        let key = format!("hot:{}", rng.u8(..KEYS));
        let asked = now_ns();
        // A conflict or a cut connection: the next try follows.
        let Ok(guard) = pool.lock(key.as_str()).acquire().await else { continue };
        let fence = guard.fence().map(Fence::get);
        let grant = recorder.granted(&key, task, asked, || guard.valid_for(), fence);
        let until = now_ns() + rng.u64(..50_000_000);
        while guard.is_held() && now_ns() < until {
            recorder.renewed(grant, || guard.valid_for());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if !guard.is_held() {
            recorder.lost(grant);
        }
        recorder.release(grant);
        // A lost lock and a silent store are expected here.
        let _ = guard.release().await;
    }
}
