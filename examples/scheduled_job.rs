//! A job that is due once a minute, in a service of three instances. Each instance has the schedule, and the first one at the
//! lock runs the job; the others skip it. `min_hold` keeps the lock for longer than the clocks of the instances differ, so a
//! late instance does not run the job again.
//!
//! A record says up to which minute the job has reported, and the next run begins there. So it makes up for a run that was
//! skipped or cut off, and no minute is reported twice.
//!
//! ```text
//! cargo run --example scheduled_job -- redis://127.0.0.1:6379     # three processes, one of which dies in a run
//! cargo run --example scheduled_job                               # three tasks
//! ```

use std::path::Path;
use std::process::{self, ExitStatus};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fs, io};

use lock_runtime::{LockError, distributed_lock};
use tokio::process::Command;

/// A minute of the schedule.
const MINUTE: Duration = Duration::from_millis(200);
const MINUTES: u64 = 12;
/// How far the clock of each instance is behind the clock of the one before it.
const CLOCK_DIFFERENCE: Duration = Duration::from_millis(20);
/// The first instance dies in its first run from here on.
const DIES_AT: u64 = 4;

#[derive(Debug, thiserror::Error)]
enum JobError {
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("the record: {0}")]
    Record(#[from] io::Error),
}

/// One instance of the service.
struct Scheduler<'a> {
    instance: u32,
    /// A line for each run: its instance, the first minute and the last one. Usually a table of a database.
    record: &'a Path,
    dies: bool,
}

impl Scheduler<'_> {
    /// Reports the minutes that are not reported yet, up to `minute`.
    #[distributed_lock(
        key = "jobs:report",
        ttl = "1s",
        wait = "0s",
        min_hold = "100ms",
        on_conflict = "skip"
    )]
    async fn report(&self, minute: u64) -> Result<(), JobError> {
        let first = reported(self.record)? + 1;
        if first > minute {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        if self.dies && minute >= DIES_AT {
            process::abort();
        }
        let run =
            format!("{}{} {first} {minute}\n", fs::read_to_string(self.record)?, self.instance);
        // The record is replaced as a whole.
        let new = self.record.with_extension(self.instance.to_string());
        fs::write(&new, run)?;
        Ok(fs::rename(new, self.record)?)
    }

    /// Runs the job at the begin of each minute, until the last one is reported. The schedule begins at `begin`.
    async fn run(&self, begin: SystemTime) -> Result<(), JobError> {
        let begin = begin + CLOCK_DIFFERENCE * self.instance;
        for minute in 1.. {
            let due = begin + MINUTE * u32::try_from(minute).unwrap_or(u32::MAX);
            tokio::time::sleep(due.duration_since(SystemTime::now()).unwrap_or_default()).await;
            // A failure is not the end of the schedule: the next run makes up for it.
            if let Err(error) = self.report(minute.min(MINUTES)).await {
                eprintln!("instance {}, minute {minute}: {error}", self.instance);
            }
            if reported(self.record)? >= MINUTES {
                break;
            }
        }
        Ok(())
    }
}

/// The last minute that is reported. Zero at first.
fn reported(record: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(record)?;
    let last = text.lines().last().and_then(|run| run.rsplit(' ').next());
    last.map_or(Ok(0), |minute| minute.parse().map_err(io::Error::other))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [url, record, instance, begin] = args.as_slice() {
        lock_runtime::init(url).await?;
        let (instance, begin) = (instance.parse()?, Duration::from_millis(begin.parse()?));
        let scheduler = Scheduler { instance, record: record.as_ref(), dies: instance == 0 };
        let outcome = scheduler.run(UNIX_EPOCH + begin).await;
        lock_runtime::shutdown(Duration::from_secs(1)).await;
        return Ok(outcome?);
    }

    let record = std::env::temp_dir().join(format!("scheduled_job-{}", process::id()));
    fs::write(&record, "")?;
    let outcome = run_all(args.first().map(String::as_str), &record).await;
    fs::remove_file(&record)?;
    outcome
}

async fn run_all(url: Option<&str>, record: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let begin = SystemTime::now();
    match url {
        Some(url) => {
            let process = |instance| instance_process(url, record, instance, begin);
            let (first, second, third) = tokio::join!(process(0), process(1), process(2));
            second.and(third)?;
            println!("instance 0: {}", first?);
        }
        None => {
            lock_runtime::init("memory://").await?;
            let task = |instance| async move {
                Scheduler { instance, record, dies: false }.run(begin).await
            };
            let (first, second, third) = tokio::join!(task(0), task(1), task(2));
            lock_runtime::shutdown(Duration::from_secs(1)).await;
            first.and(second).and(third)?;
        }
    }

    let record = fs::read_to_string(record)?;
    print!("instance, first and last minute of each run:\n{record}");
    let mut next = 1;
    for run in record.lines() {
        let numbers: Vec<u64> = run.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        if numbers[1] != next {
            return Err(format!("minute {next} was to be reported next").into());
        }
        next = numbers[2] + 1;
    }
    println!("{} minutes were reported, each once", next - 1);
    Ok(())
}

/// How the process ended.
async fn instance_process(
    url: &str,
    record: &Path,
    instance: u32,
    begin: SystemTime,
) -> io::Result<ExitStatus> {
    let begin = begin.duration_since(UNIX_EPOCH).map_err(io::Error::other)?.as_millis();
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(url).arg(record).args([instance.to_string(), begin.to_string()]);
    let status = command.kill_on_drop(true).status().await?;
    if status.success() || instance == 0 {
        Ok(status)
    } else {
        Err(io::Error::other(format!("instance {instance}: {status}")))
    }
}
