//! `waiter <url> <history> <process> <ttl in ms>` waits for the lock `k` by the commands of its standard
//! input, line by line: `lock`, `free`, or `loop <pause in ms>` for one short section after the other, which
//! does not end. Records the validity of its leases; prints `ready`, `in <moment>` and `out`.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use lock_runtime::{Fence, LockGuard, LockPool, Wait};
use lock_tests::history::{Recorder, now_ns};
use tokio::io::{AsyncBufReadExt, BufReader};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<_> = std::env::args().collect();
    let [_, url, dir, process, ttl] = args.as_slice() else { return Err("four arguments".into()) };
    let recorder = Recorder::create(Path::new(dir), process)?;
    let ttl = Duration::from_millis(ttl.parse()?);
    let pool = LockPool::builder(url).ttl(ttl).wait(Wait::Forever).connect().await?;
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    let mut held = None;
    println!("ready");
    while let Some(order) = orders.next_line().await? {
        if order == "lock" {
            held = Some(lock(&pool, &recorder).await?);
            println!("in {}", now_ns());
        } else if let (true, Some((guard, grant))) = (order == "free", held.take()) {
            recorder.release(grant);
            guard.release().await?;
            println!("out");
        } else if let Some(pause) = order.strip_prefix("loop ") {
            let pause = Duration::from_millis(pause.parse()?);
            loop {
                let (guard, grant) = lock(&pool, &recorder).await?;
                tokio::time::sleep(Duration::from_millis(1)).await;
                if !guard.is_held() {
                    recorder.lost(grant);
                }
                recorder.release(grant);
                // A loss during a freeze of this process is expected.
                let _ = guard.release().await;
                tokio::time::sleep(pause).await;
            }
        }
    }
    Ok(())
}

async fn lock(pool: &LockPool, recorder: &Recorder) -> Result<(LockGuard, u64), Box<dyn Error>> {
    loop {
        let asked = now_ns();
        match pool.lock("k").acquire().await {
            Ok(guard) => {
                let fence = guard.fence().map(Fence::get);
                let grant = recorder.granted("k", 0, asked, || guard.valid_for(), fence);
                return Ok((guard, grant));
            }
            // Granted, and then frozen until the end of the validity.
            Err(error) if error.is_lost() => {}
            Err(error) => return Err(error.into()),
        }
    }
}
