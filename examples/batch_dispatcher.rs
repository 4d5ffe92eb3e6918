//! Two processes take tasks from the same table. Taking a batch reads and rewrites the table, so it is done under a
//! lock: while no lease is lost, every task is assigned exactly once.
//!
//! ```text
//! cargo run --example batch_dispatcher -- redis://127.0.0.1:6379   # two processes
//! cargo run --example batch_dispatcher                             # two workers in one process
//! ```

use std::path::Path;
use std::time::Duration;
use std::{fs, io, process};

use lock_runtime::{LockError, distributed_lock};
use tokio::process::Command;

const TASKS: usize = 500;
const BATCH: usize = 7;

#[derive(Debug, thiserror::Error)]
enum DispatchError {
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("the table of tasks: {0}")]
    Table(#[from] io::Error),
}

/// Takes the next batch from the table: a file with one unassigned task per line.
///
/// A lost lease stops it at an `await`, but not a rename that has begun: a batch may then be handed out again. A database that
/// compares fences refuses such a write, as in `fenced_writes`.
#[distributed_lock(key = "dispatch:<table.display()>", ttl = "5s", wait = "10s", guard = lock)]
async fn next_batch(table: &Path) -> Result<Vec<String>, DispatchError> {
    let text = tokio::fs::read_to_string(table).await?;
    let mut open: Vec<String> = text.lines().map(str::to_owned).collect();
    let rest = open.split_off(BATCH.min(open.len()));
    // The table is replaced as a whole. The new one has a name of its own for each grant.
    let new = table.with_extension(lock.fence().map_or(0, u64::from).to_string());
    tokio::fs::write(&new, rest.join("\n")).await?;
    tokio::fs::rename(&new, table).await?;
    Ok(open)
}

/// Takes batches until the table is empty, and writes its tasks to `done`.
async fn work(table: &Path, done: &Path) -> Result<(), DispatchError> {
    let mut log = String::new();
    loop {
        let batch = next_batch(table).await?;
        if batch.is_empty() {
            return Ok(fs::write(done, log)?);
        }
        for task in batch {
            log.push_str(&task);
            log.push('\n');
        }
        // The work itself runs outside the lock.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [url, table, done] = args.as_slice() {
        lock_runtime::init(url).await?;
        let outcome = work(table.as_ref(), done.as_ref()).await;
        lock_runtime::shutdown(Duration::from_secs(1)).await;
        return Ok(outcome?);
    }

    let folder = std::env::temp_dir().join(format!("batch_dispatcher-{}", process::id()));
    fs::create_dir_all(&folder)?;
    let outcome = dispatch(args.first().map(String::as_str), &folder).await;
    fs::remove_dir_all(&folder)?;
    outcome
}

async fn dispatch(url: Option<&str>, folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let table = folder.join("table");
    let tasks: Vec<String> = (0..TASKS).map(|n| format!("task-{n}")).collect();
    fs::write(&table, tasks.join("\n"))?;
    let done = [folder.join("done-1"), folder.join("done-2")];

    match url {
        Some(url) => {
            let worker = |done| worker_process(url, &table, done);
            let (one, two) = tokio::join!(worker(&done[0]), worker(&done[1]));
            one.and(two)?;
        }
        None => {
            lock_runtime::init("memory://").await?;
            let (one, two) = tokio::join!(work(&table, &done[0]), work(&table, &done[1]));
            lock_runtime::shutdown(Duration::from_secs(1)).await;
            one.and(two)?;
        }
    }

    let lists: Vec<String> = done.iter().map(fs::read_to_string).collect::<Result<_, _>>()?;
    let mut handed_out: Vec<&str> = lists.iter().flat_map(|list| list.lines()).collect();
    let total = handed_out.len();
    handed_out.sort_unstable();
    handed_out.dedup();
    let counts: Vec<usize> = lists.iter().map(|list| list.lines().count()).collect();
    println!(
        "{total} tasks were handed out, {} different ones: {counts:?} to the two workers",
        handed_out.len()
    );
    if (total, handed_out.len()) != (TASKS, TASKS) {
        return Err(format!("{TASKS} tasks were to be handed out, each once").into());
    }
    Ok(())
}

async fn worker_process(url: &str, table: &Path, done: &Path) -> io::Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    let status = command.arg(url).arg(table).arg(done).kill_on_drop(true).status().await?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("a worker: {status}"))) }
}
