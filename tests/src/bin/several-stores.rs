//! `several-stores <history> <process> <url> [<url>]`: four tasks that take and free two hot locks until standard input ends, each
//! lock in all stores, in the order of the URLs. Records when a task has a lock in all stores, as `hot:<n>`, and the fence of each
//! store, as `<scheme>:hot:<n>`. Prints `working` when it begins.

use std::error::Error;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lock_runtime::{Fence, LockError, LockGuard, LockPool};
use lock_tests::history::{Recorder, now_ns};

const TASKS: u64 = 4;
const KEYS: u64 = 2;
const TTL: Duration = Duration::from_millis(300);

struct Store {
    scheme: String,
    pool: LockPool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (dir, process) = (args.next().ok_or("no folder")?, args.next().ok_or("no name")?);
    let recorder = Arc::new(Recorder::create(Path::new(&dir), &process)?);
    let mut stores = Vec::new();
    for url in args {
        let pool = LockPool::builder(&*url).ttl(TTL).wait(Duration::from_secs(1)).connect().await?;
        let scheme = url.split("://").next().unwrap_or_default().to_owned();
        stores.push(Store { scheme, pool });
    }
    let (stores, over) = (Arc::new(stores), Arc::new(AtomicBool::new(false)));
    let work = |task| tokio::spawn(work(stores.clone(), recorder.clone(), task, over.clone()));
    let tasks: Vec<_> = (0..TASKS).map(work).collect();
    println!("working");
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    over.store(true, Ordering::SeqCst);
    for task in tasks {
        task.await?;
    }
    for store in &*stores {
        store.pool.shutdown(Duration::from_secs(5)).await;
    }
    Ok(())
}

async fn work(stores: Arc<Vec<Store>>, recorder: Arc<Recorder>, task: u64, over: Arc<AtomicBool>) {
    let mut round = task;
    while !over.load(Ordering::SeqCst) {
        round += 1;
        let key = format!("hot:{}", round % KEYS);
        let asked = now_ns();
        // A conflict: the next try follows.
        let Ok(guards) = acquire(&stores, &key).await else { continue };
        let valid_for = || guards.iter().map(LockGuard::valid_for).min().unwrap_or_default();
        let mut grants = vec![recorder.granted(&key, task, asked, valid_for, None)];
        for (store, guard) in stores.iter().zip(&guards) {
            let key = format!("{}:{key}", store.scheme);
            let fence = guard.fence().map(Fence::get);
            grants.push(recorder.granted(&key, task, asked, valid_for, fence));
        }
        let until = now_ns() + 5_000_000 * (1 + round % 4);
        while !valid_for().is_zero() && now_ns() < until {
            for grant in &grants {
                recorder.renewed(*grant, valid_for);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        for grant in grants {
            recorder.release(grant);
        }
        for guard in guards.into_iter().rev() {
            // A lost lock is expected here.
            let _ = guard.release().await;
        }
    }
}

/// The lock in each store, one after another.
async fn acquire(stores: &[Store], key: &str) -> Result<Vec<LockGuard>, LockError> {
    let mut guards = Vec::new();
    for store in stores {
        guards.push(store.pool.lock(key).acquire().await?);
    }
    Ok(guards)
}
