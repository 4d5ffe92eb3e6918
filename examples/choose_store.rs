//! One service on any store: the URL is all that differs. For each URL, two processes settle an order again and again, and never
//! at the same time. Then a line says what the store provides.
//!
//! ```text
//! cargo add lock-runtime --features etcd,mysql,postgres,zookeeper     # in another program: the ones for its stores
//! cargo run --example choose_store                                    # in this process
//! cargo run --example choose_store -- redis://127.0.0.1:6379 'postgres://user:password@127.0.0.1/database?create=on'
//! cargo run --example choose_store -- 'mysql://user:password@127.0.0.1/database?create=on' redlock://host1,host2,host3
//! cargo run --example choose_store -- etcd://127.0.0.1:2379/locks zookeeper://127.0.0.1:2181/locks
//! ```

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use lock_runtime::{LockPool, distributed_lock};
use tokio::process::Command;
use tokio::task::JoinSet;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const TASKS: usize = 4;
const CALLS: usize = 10;

/// The service. Its locks are in the store of its pool.
#[derive(Clone)]
struct Orders {
    locks: LockPool,
    folder: PathBuf,
}

impl Orders {
    /// Fails where another call for the order is under way, in any process, and where the fence has not grown.
    #[distributed_lock(key = "example:order:<id>", ttl = "5s", wait = "30s", pool = self.locks, guard = lock)]
    async fn settle(&self, id: u64) -> Result<(), Failure> {
        let _call = OnlyCall::enter(self.folder.join("call"))?;
        let (path, fence) = (self.folder.join("fence"), lock.fence().map_or(0, u64::from));
        let last = fs::read_to_string(&path).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
        if fence <= last {
            return Err(format!("order {id}: fence {fence} comes after {last}").into());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
        Ok(fs::write(path, fence.to_string())?)
    }

    async fn settle_often(&self) -> Result<(), Failure> {
        let mut tasks = JoinSet::new();
        for _ in 0..TASKS {
            let orders = self.clone();
            tasks.spawn(async move {
                for _ in 0..CALLS {
                    orders.settle(42).await?;
                }
                Ok::<_, Failure>(())
            });
        }
        tasks.join_all().await.into_iter().collect()
    }
}

/// A file that exists while a call is under way.
struct OnlyCall(PathBuf);

impl OnlyCall {
    fn enter(path: PathBuf) -> Result<Self, Failure> {
        match File::create_new(&path) {
            Ok(_) => Ok(Self(path)),
            Err(error) => Err(format!("two calls at the same time: {error}").into()),
        }
    }
}

impl Drop for OnlyCall {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let args: Vec<String> = env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["second-process", url, folder] => settle_in_second_process(url, folder.into()).await,
        [] => try_store("memory://").await,
        ref urls => {
            for url in urls {
                try_store(url).await?;
            }
            Ok(())
        }
    }
}

async fn try_store(url: &str) -> Result<(), Failure> {
    let store = url.split_once("://").map_or(url, |(scheme, _)| scheme);
    let folder = env::temp_dir().join(format!("choose_store-{}-{store}", std::process::id()));
    let orders = Orders { locks: LockPool::connect(url).await?, folder };
    fs::create_dir(&orders.folder)?;
    let tried = settle_in_all_processes(&orders, url, store).await;
    orders.locks.shutdown(Duration::from_secs(1)).await;
    fs::remove_dir_all(&orders.folder)?;
    tried
}

async fn settle_in_all_processes(orders: &Orders, url: &str, store: &str) -> Result<(), Failure> {
    // The locks of `memory://` exist only in this process.
    let processes = if store == "memory" { 1 } else { 2 };
    let second = (processes > 1).then(|| start_second_process(url, &orders.folder)).transpose()?;
    let settled = orders.settle_often().await;
    if let Some(second) = second {
        let ended = second.wait_with_output().await?;
        if !ended.status.success() {
            return Err(String::from_utf8_lossy(&ended.stderr).into());
        }
    }
    settled?;
    let calls = processes * TASKS * CALLS;
    let them = if processes == 1 { "1 process" } else { "2 processes" };
    println!("{store}: {calls} calls in {them}, one at a time, and fences have grown");

    let lock = orders.locks.lock("example:order:42").acquire().await?;
    let health = orders.locks.health().await?;
    let holder = orders.locks.inspect("example:order:42").await?.holder;
    let process =
        holder.and_then(|holder| holder.info).map_or("unknown".into(), |it| it.to_string());
    let fence = lock.fence().map_or("none".into(), |fence| fence.to_string());
    lock.release().await?;
    println!("  round trip {:?}, fence {fence}, holder {process}", health.round_trip);
    for warning in health.warnings {
        println!("  warning: {warning}");
    }
    Ok(())
}

fn start_second_process(url: &str, folder: &Path) -> Result<tokio::process::Child, Failure> {
    let mut command = Command::new(env::current_exe()?);
    command.args(["second-process", url]).arg(folder).stderr(Stdio::piped()).kill_on_drop(true);
    Ok(command.spawn()?)
}

async fn settle_in_second_process(url: &str, folder: PathBuf) -> Result<(), Failure> {
    let orders = Orders { locks: LockPool::connect(url).await?, folder };
    let settled = orders.settle_often().await;
    orders.locks.shutdown(Duration::from_secs(1)).await;
    settled
}
