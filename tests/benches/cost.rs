//! What a lock costs: `cargo bench -p lock-tests --bench cost`.
//!
//! Cycles of an uncontended lock, against the two commands that any such lock needs, on one bare
//! connection of the same client library; then the size of wrapped futures; then the clean build
//! of the macro crate. Bound and subject alternate in one run, so that only their ratio counts.

#![allow(clippy::disallowed_methods)]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_runtime::{LockError, LockPool, distributed_lock};
use lock_tests::RedisServer;
use lock_tests::sizes::{Sizes, sizes};
use redis::aio::MultiplexedConnection;
use redis::{Script, Value};
use tokio::task::JoinSet;

const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(500);
const TASKS: [usize; 3] = [1, 64, 1024];

#[distributed_lock(key = "cost:<id>", ttl = "30s", pool = pool)]
async fn attribute(pool: &LockPool, id: usize) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "cost:<id>", ttl = "30s", pool = pool, guard = lock)]
async fn attribute_fenced(pool: &LockPool, id: usize) -> Result<u64, LockError> {
    Ok(lock.fence().map_or(0, lock_runtime::Fence::get))
}

async fn guard(pool: &LockPool, id: usize, fencing: bool) -> Result<(), LockError> {
    let request = pool.lock(format!("cost:{id}")).ttl(Duration::from_secs(30)).fencing(fencing);
    request.acquire().await?.release().await
}

/// What is compared with the bound.
#[derive(Clone, Copy)]
enum Subject {
    Attribute,
    AttributeFenced,
    Guard,
    GuardFenced,
}

impl Subject {
    const ALL: [(Self, &'static str); 4] = [
        (Self::Attribute, "attribute"),
        (Self::Guard, "guard, fencing(false)"),
        (Self::AttributeFenced, "attribute with guard (fenced)"),
        (Self::GuardFenced, "guard (fenced)"),
    ];

    async fn cycle(self, pool: &LockPool, id: usize) {
        let outcome = match self {
            Self::Attribute => attribute(pool, id).await,
            Self::AttributeFenced => attribute_fenced(pool, id).await.map(drop),
            Self::Guard => guard(pool, id, false).await,
            Self::GuardFenced => guard(pool, id, true).await,
        };
        outcome.expect("nobody else wants the lock");
    }
}

/// `SET NX PX`, and a script that compares and deletes.
struct Bare {
    connection: MultiplexedConnection,
    hash: String,
}

impl Bare {
    async fn connect(url: &str) -> Self {
        let script = Script::new(
            "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0",
        );
        let client = redis::Client::open(url).expect("the URL is right");
        let mut connection =
            client.get_multiplexed_async_connection().await.expect("the server takes connections");
        script.load_async(&mut connection).await.expect("the server takes scripts");
        Self { connection, hash: script.get_hash().to_owned() }
    }

    async fn cycle(&self, id: usize) {
        let mut connection = self.connection.clone();
        let key = format!("cost:{id}");
        let token = format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        let mut set = redis::cmd("SET");
        set.arg(&key).arg(&token).arg("NX").arg("PX").arg(30_000);
        let taken: Value = set.query_async(&mut connection).await.expect("the server answers");
        assert_eq!(taken, Value::Okay);
        let mut free = redis::cmd("EVALSHA");
        free.arg(&self.hash).arg(1).arg(&key).arg(&token);
        let freed: u64 = free.query_async(&mut connection).await.expect("the server answers");
        assert_eq!(freed, 1);
    }
}

/// Cycles per second of `tasks` tasks.
async fn rate<F>(tasks: usize, cycle: impl Fn(usize) -> F + Clone + Send + 'static) -> f64
where
    F: Future<Output = ()> + Send,
{
    let began = Instant::now();
    let mut set = JoinSet::new();
    for id in 0..tasks {
        let cycle = cycle.clone();
        set.spawn(async move {
            let mut cycles = 0_u32;
            while began.elapsed() < ROUND {
                cycle(id).await;
                cycles += 1;
            }
            cycles
        });
    }
    let cycles: u32 = set.join_all().await.iter().sum();
    f64::from(cycles) / began.elapsed().as_secs_f64()
}

/// Median rates of bound and subject, and the median of the ratios of neighbouring rounds.
async fn compare(pool: &LockPool, bare: &Arc<Bare>, subject: Subject, tasks: usize) -> [f64; 3] {
    let mut rounds = [Vec::new(), Vec::new(), Vec::new()];
    // The first round warms up.
    for round in 0..=ROUNDS {
        let bare = bare.clone();
        let bound = rate(tasks, move |id| {
            let bare = bare.clone();
            async move { bare.cycle(id).await }
        })
        .await;
        let pool = pool.clone();
        let measured = rate(tasks, move |id| {
            let pool = pool.clone();
            async move { subject.cycle(&pool, id).await }
        })
        .await;
        if round > 0 {
            for (values, value) in rounds.iter_mut().zip([bound, measured, measured / bound]) {
                values.push(value);
            }
        }
    }
    rounds.map(|mut values| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    })
}

async fn cycles() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.expect("the server takes connections");
    let bare = Arc::new(Bare::connect(&server.url()).await);
    println!(
        "cycles of an uncontended lock, per second; ratio above 1 is faster than bare redis-rs"
    );
    println!("{:<32}{:>7}{:>12}{:>12}{:>9}", "", "tasks", "bare", "lock", "ratio");
    for tasks in TASKS {
        for (subject, name) in Subject::ALL {
            let [bound, measured, ratio] = compare(&pool, &bare, subject, tasks).await;
            println!("{name:<32}{tasks:>7}{bound:>12.0}{measured:>12.0}{ratio:>8.2}x");
        }
    }
}

fn print_sizes() {
    println!("\nbytes of the future");
    println!("{:<32}{:>7}{:>12}{:>12}", "", "plain", "locked", "more");
    for Sizes { what, plain, locked } in sizes() {
        println!("{what:<32}{plain:>7}{locked:>12}{:>12}", locked - plain);
    }
}

fn build() {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member has a workspace");
    let began = Instant::now();
    let built = Command::new(cargo)
        .args(["build", "--quiet", "-p", "lock-macros", "--target-dir"])
        .arg(folder.path())
        .current_dir(root)
        .status();
    assert!(built.is_ok_and(|status| status.success()), "lock-macros builds");
    println!(
        "\nclean build of lock-macros and its dependencies: {:.1} s",
        began.elapsed().as_secs_f64()
    );
}

fn main() {
    // `cargo test --benches` only wants to know that it builds.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime can be made");
    runtime.block_on(cycles());
    print_sizes();
    build();
}
