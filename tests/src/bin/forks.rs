//! Forks while it holds a lock at the store of the given URL, and prints the observations of parent and child. For the
//! test of forks.

// Pauses between two looks at a condition.
#![allow(clippy::disallowed_methods)]

use std::future::Future;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, sleep};
use std::time::Duration;

use fork::Fork;
use lock_runtime::{LockError, LockPool, distributed_lock};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use tracing::Subscriber;
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// How many spans of the pool's calls the subscriber was told of, or about, in this process.
static SPANS: AtomicUsize = AtomicUsize::new(0);

/// Counts what becomes of the spans.
struct CountSpans;

impl<S: Subscriber> Layer<S> for CountSpans {
    fn on_new_span(&self, _: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        SPANS.fetch_add(1, Ordering::SeqCst);
    }

    fn on_record(&self, _: &Id, _: &Record<'_>, _: Context<'_, S>) {
        SPANS.fetch_add(1, Ordering::SeqCst);
    }

    fn on_close(&self, _: Id, _: Context<'_, S>) {
        SPANS.fetch_add(1, Ordering::SeqCst);
    }
}

const SOON: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

#[distributed_lock(key = "annotated", wait = "0s")]
async fn annotated() -> Result<(), LockError> {
    Ok(())
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// The outcome of `future`, or `hung` if there is none.
async fn told<T>(future: impl Future<Output = Result<T, LockError>>) -> String {
    match timeout(SOON, future).await {
        Err(_) => "hung".to_owned(),
        Ok(Ok(_)) => "done".to_owned(),
        Ok(Err(error)) => format!("{:?}: {error}", error.kind()),
    }
}

/// Whether `key` is held by another owner.
async fn is_busy(pool: &LockPool, key: &'static str) -> bool {
    let guard = pool.lock(key).fencing(false).try_acquire().await.expect("an answer");
    match guard {
        Some(guard) => {
            guard.release().await.expect("a release");
            false
        }
        None => true,
    }
}

fn wait_until_busy(runtime: &Runtime, pool: &LockPool, key: &'static str) {
    while !runtime.block_on(is_busy(pool, key)) {
        sleep(PAUSE);
    }
}

/// Locks until `runtime` has a connection of its own, beside the one of the driver.
fn warm_up(runtime: &Runtime, pool: &LockPool, url: &str) {
    let mut server = redis::Client::open(url).and_then(|client| client.get_connection());
    let server = server.as_mut().expect("a connection");
    runtime.block_on(async {
        loop {
            pool.lock("warm-up")
                .fencing(false)
                .acquire()
                .await
                .expect("a lock")
                .release()
                .await
                .expect("free");
            let list: String =
                redis::cmd("CLIENT").arg("LIST").query(server).expect("the connections");
            if list.lines().filter(|line| line.contains(" cmd=evalsha ")).count() == 1
                && list.lines().count() == 3
            {
                return;
            }
        }
    });
}

fn main() -> ExitCode {
    let spans = CountSpans.with_filter(tracing_subscriber::filter::filter_fn(|metadata| {
        metadata.is_span() && metadata.target() == "lock_runtime"
    }));
    tracing_subscriber::registry().with(spans).init();
    let url = std::env::args().nth(1).unwrap_or_default();
    let parent = runtime();
    // A request that gets no answer is not repeated before the program has printed that.
    let pool = LockPool::builder(&url).request_timeout(SOON * 4).connect();
    let pool = parent.block_on(pool).expect("a pool");
    lock_runtime::install("default", pool.clone()).expect("the first pool");
    warm_up(&parent, &pool, &url);
    let acquire = |key: &'static str| pool.lock(key).fencing(false).acquire();
    let guard = parent.block_on(acquire("parent")).expect("a lock");
    // A body that both processes have.
    let (entered, is_entered) = tokio::sync::oneshot::channel();
    let mut body = Box::pin(pool.lock("body").fencing(false).run(async {
        let _ = entered.send(());
        std::future::pending::<()>().await;
    }));
    parent.block_on(async {
        tokio::select! {
            _ = body.as_mut() => unreachable!("it is pending"),
            entered = is_entered => entered.expect("the body runs"),
        }
    });
    // It waits for the first of its keys.
    let several = pool.lock_all(["parent", "several"]).fencing(false).wait(Duration::MAX);
    let mut several = Box::pin(several.acquire());
    let is_pending = async { timeout(PAUSE, several.as_mut()).await.is_err() };
    assert!(parent.block_on(is_pending), "the first key is held");
    // A used token does not show whether parent and child would draw the same next one.
    match fork::fork().expect("a fork") {
        Fork::Child => {
            let child = runtime();
            SPANS.store(0, Ordering::SeqCst);
            println!("child, acquire: {}", child.block_on(told(acquire("any"))));
            println!("child, annotated: {}", child.block_on(told(annotated())));
            println!("child, health: {}", child.block_on(told(pool.health())));
            println!("child, verify: {}", child.block_on(told(guard.verify())));
            println!("child, is held: {}", guard.is_held());
            let lost = async { Err::<(), _>(guard.lost().await) };
            println!("child, lost: {}", child.block_on(told(lost)));
            println!("child, release: {}", child.block_on(told(guard.release())));
            println!("child, body: {}", child.block_on(told(body.as_mut())));
            println!("child, several: {}", child.block_on(told(several.as_mut())));
            let shutdown = async { Ok(pool.shutdown(SOON).await) };
            println!("child, shutdown: {}", child.block_on(told(shutdown)));
            drop((pool, body, several));
            println!("child, spans: {}", SPANS.load(Ordering::SeqCst));
            let own = child.block_on(lock_runtime::init(&url)).expect("a pool of its own");
            println!(
                "child, the parent's lock is busy: {}",
                child.block_on(is_busy(&own, "parent"))
            );
            println!("child, annotated again: {}", child.block_on(told(annotated())));
            let both = child.block_on(own.lock("both").fencing(false).acquire()).expect("a lock");
            let ready = child.block_on(own.lock("ready").fencing(false).acquire()).expect("a lock");
            wait_until_busy(&child, &own, "end");
            drop((both, ready));
            child.block_on(own.shutdown(SOON));
            println!("child, end");
        }
        Fork::Parent(child) => {
            drop(several);
            // On a thread of its own, which uses up none of the randomness that the child has, too.
            let waiting = pool.clone();
            let waiting = thread::spawn(move || wait_until_busy(&runtime(), &waiting, "ready"));
            waiting.join().expect("the child is ready");
            // With the token of the child it would be granted, like a repeated request.
            let stays_busy = (0..64).all(|_| parent.block_on(is_busy(&pool, "both")));
            println!("parent, both is busy: {stays_busy}");
            println!("parent, verify: {}", parent.block_on(told(guard.verify())));
            let end = parent.block_on(acquire("end")).expect("a lock");
            while parent.block_on(is_busy(&pool, "ready")) {
                sleep(PAUSE);
            }
            drop((guard, end, body));
            // The child has dropped its copy of the runtime, and of the connection on it.
            assert_eq!(fork::waitpid(child).expect("the child has ended"), 0);
            println!("parent, another: {}", parent.block_on(told(acquire("another"))));
            parent.block_on(pool.shutdown(SOON));
            println!("parent, end");
        }
    }
    ExitCode::SUCCESS
}
