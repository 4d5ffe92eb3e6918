//! `frozen-holder <url> <history> <ttl in ms>` holds the lock `guard` and, around a body, the lock
//! `body`, and prints `holding`. After a freeze longer than the ttl, it prints its observations and
//! the fence that a careless writer would use.

#![allow(clippy::disallowed_methods)]

use std::error::Error;
use std::future::{pending, poll_fn};
use std::path::Path;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use lock_runtime::{Fence, LockError, LockGuard, LockPool, distributed_lock};
use lock_tests::history::{Recorder, now_ns};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (url, dir) = (args.next().ok_or("no url")?, args.next().ok_or("no directory")?);
    let ttl = Duration::from_millis(args.next().ok_or("no ttl")?.parse()?);
    let recorder: &Recorder = Box::leak(Box::new(Recorder::create(Path::new(&dir), "frozen")?));
    let pool = LockPool::builder(url).ttl(ttl).connect().await?;

    let asked = now_ns();
    let guard = pool.lock("guard").acquire().await?;
    let watcher = std::thread::spawn(move || watch(&guard, ttl, asked, recorder));
    let error = hold(&pool, ttl, now_ns(), recorder).await.unwrap_err();
    println!("body: {:?}", error.kind());
    watcher.join().map_err(|_| "the watcher panicked")?;
    Ok(())
}

/// Checks the guard continuously until it is not held any more.
fn watch(guard: &LockGuard, ttl: Duration, asked: u64, recorder: &Recorder) {
    let grant = note(guard, asked, recorder);
    let mut last = now_ns();
    loop {
        let now = now_ns();
        let held = guard.is_held();
        if !held || now - last > nanos(ttl) {
            println!("first check: {held}");
            println!("writes with {}", guard.fence().map_or(0, Fence::get));
            recorder.lost(grant);
            recorder.release(grant);
            return;
        }
        recorder.renewed(grant, || guard.valid_for());
        last = now;
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[distributed_lock(key = "body", pool = pool, guard = guard)]
async fn hold(
    pool: &LockPool,
    ttl: Duration,
    asked: u64,
    recorder: &Recorder,
) -> Result<(), LockError> {
    let grant = note(guard, asked, recorder);
    let _end = End { recorder, grant };
    println!("holding");
    let mut last = now_ns();
    let mut tick = pin!(async {
        loop {
            recorder.renewed(grant, || guard.valid_for());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    poll_fn(|cx| {
        let now = now_ns();
        if now - last > nanos(ttl) {
            println!("the body was polled after the freeze");
        }
        last = now;
        let _: Poll<()> = tick.as_mut().poll(cx);
        Poll::<()>::Pending
    })
    .await;
    pending().await
}

fn note(guard: &LockGuard, asked: u64, recorder: &Recorder) -> u64 {
    let fence = guard.fence().map(Fence::get);
    recorder.granted(guard.key().as_str(), 0, asked, || guard.valid_for(), fence)
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// A body ends by being dropped.
struct End<'a> {
    recorder: &'a Recorder,
    grant: u64,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.recorder.lost(self.grant);
        self.recorder.release(self.grant);
    }
}
