//! Two processes take tasks from the same table. Taking a batch reads and rewrites the table, so it is done under a
//! lock: while no lease is lost, every task is assigned exactly once.
//!
//! ```text
//! cargo run --example batch_dispatcher -- redis://127.0.0.1:6379   # two processes
//! cargo run --example batch_dispatcher                             # two workers in one process
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io, process};

use lock_runtime::{LockError, distributed_lock};

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
#[distributed_lock(key = "dispatch:<table.display()>", ttl = "5s", wait = "10s")]
async fn next_batch(table: &Path) -> Result<Vec<String>, DispatchError> {
    let text = tokio::fs::read_to_string(table).await?;
    let mut open: Vec<String> = text.lines().map(str::to_owned).collect();
    let rest = open.split_off(BATCH.min(open.len()));
    tokio::fs::write(table, rest.join("\n")).await?;
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
        work(table.as_ref(), done.as_ref()).await?;
        lock_runtime::shutdown(Duration::from_secs(1)).await;
        return Ok(());
    }

    let folder = std::env::temp_dir().join(format!("batch_dispatcher-{}", process::id()));
    fs::create_dir_all(&folder)?;
    let table = folder.join("table");
    let tasks: Vec<String> = (0..TASKS).map(|n| format!("task-{n}")).collect();
    fs::write(&table, tasks.join("\n"))?;
    let done = [folder.join("done-1"), folder.join("done-2")];

    match args.first() {
        Some(url) => in_two_processes(url, &table, &done)?,
        None => {
            lock_runtime::init("memory://").await?;
            let (one, two) = tokio::join!(work(&table, &done[0]), work(&table, &done[1]));
            one.and(two)?;
        }
    }

    let lists: Vec<String> = done.iter().map(fs::read_to_string).collect::<Result<_, _>>()?;
    fs::remove_dir_all(&folder)?;
    let mut handed_out: Vec<&str> = lists.iter().flat_map(|list| list.lines()).collect();
    let total = handed_out.len();
    handed_out.sort_unstable();
    handed_out.dedup();
    let counts: Vec<usize> = lists.iter().map(|list| list.lines().count()).collect();
    println!(
        "{total} tasks were handed out, {} different ones: {counts:?} to the two workers",
        handed_out.len()
    );
    assert_eq!((total, handed_out.len()), (TASKS, TASKS));
    Ok(())
}

fn in_two_processes(url: &str, table: &Path, done: &[PathBuf; 2]) -> io::Result<()> {
    let program = std::env::current_exe()?;
    let workers: Vec<process::Child> = done
        .iter()
        .map(|done| process::Command::new(&program).arg(url).arg(table).arg(done).spawn())
        .collect::<Result<_, _>>()?;
    for mut worker in workers {
        if !worker.wait()?.success() {
            return Err(io::Error::other("a worker failed"));
        }
    }
    Ok(())
}
