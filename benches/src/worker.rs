//! Worker processes: further instances of the bench.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use lock_runtime::{LockPool, Wait};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;

use crate::lockers::Locker;
use crate::{clock, runtime};

/// The first argument of a worker.
pub(crate) const ROLE: &str = "--worker";

/// One body under the lock, in nanoseconds of the shared clock. `left` is 0 if it never ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Section {
    pub(crate) process: usize,
    pub(crate) task: usize,
    pub(crate) asked: u64,
    pub(crate) entered: u64,
    pub(crate) left: u64,
}

/// The work that the tasks of a worker repeat.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work<'a> {
    pub(crate) locker: &'a str,
    pub(crate) url: &'a str,
    pub(crate) tasks: usize,
    pub(crate) body: Duration,
    /// By request, without the attribute, and not with default options.
    pub(crate) ttl: Option<Duration>,
    pub(crate) keys: Keys,
}

/// What the tasks of a worker lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keys {
    /// One key.
    Shared,
    /// Each a key of its own.
    Own,
}

/// A worker of this process. It ends with this process, and when dropped.
pub(crate) struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Worker {
    fn start(args: &[String], log: &Path) -> Self {
        let program = std::env::current_exe().expect("this program has a path");
        let args = [ROLE].into_iter().chain(args.iter().map(String::as_str));
        Self::of(Command::new(program).args(args), log)
    }

    fn of(program: &Command, log: &Path) -> Self {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program.get_program());
        let mut child = command
            .args(program.get_args())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a worker can be started");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        Self { child, input, output, log: log.to_owned() }
    }

    /// Starts `work`, which begins at [`go`](Self::go). If the worker will be killed before the end, each section is
    /// logged immediately.
    pub(crate) fn sections(work: Work<'_>, log: &Path, at_once: bool) -> Self {
        let ttl = work.ttl.map_or(0, |ttl| ttl.as_millis());
        let args = [
            "sections".to_owned(),
            work.locker.to_owned(),
            work.url.to_owned(),
            work.tasks.to_string(),
            work.body.as_micros().to_string(),
            ttl.to_string(),
            at_once.to_string(),
            (work.keys == Keys::Own).to_string(),
            log.display().to_string(),
        ];
        let mut worker = Self::start(&args, log);
        worker.expect("ready");
        worker
    }

    /// Starts a program in another language. Its own arguments are followed by the number of tasks, the microseconds of a body,
    /// whether each task has its own key, and the log.
    pub(crate) fn foreign(program: &Command, work: Work<'_>, log: &Path) -> Self {
        let mut command = Command::new(program.get_program());
        command.args(program.get_args()).args([
            work.tasks.to_string(),
            work.body.as_micros().to_string(),
            (work.keys == Keys::Own).to_string(),
            log.display().to_string(),
        ]);
        let mut worker = Self::of(&command, log);
        worker.expect("ready");
        worker
    }

    /// Starts a process that takes `locks` locks and holds them.
    pub(crate) fn holder(url: &str, locks: usize, block: bool) -> Self {
        let args = ["hold", url, &locks.to_string(), &block.to_string()].map(str::to_owned);
        let mut worker = Self::start(&args, Path::new(""));
        worker.expect("held");
        worker
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a child has a pid"), signal).expect("a child can be signalled");
    }

    /// Sends one line to the worker.
    pub(crate) fn say(&mut self, line: &str) {
        let input = self.input.as_mut().expect("it is open");
        writeln!(input, "{line}").expect("the worker listens");
    }

    /// Receives one line from the worker.
    pub(crate) fn receive(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the worker speaks");
        line.trim().to_owned()
    }

    fn expect(&mut self, word: &str) {
        let line = self.receive();
        assert_eq!(line, word, "a worker says when it is there");
    }

    /// Runs the sections from `begin` to `end`.
    pub(crate) fn go(&mut self, begin: u64, end: u64) {
        self.say(&format!("{begin} {end}"));
    }

    /// Waits for the end, and reads the log.
    pub(crate) fn finish(mut self, process: usize) -> Vec<Section> {
        self.input = None;
        let _ = self.child.wait();
        read(&self.log, process)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(log: &Path, process: usize) -> Vec<Section> {
    let bytes = fs::read(log).unwrap_or_default();
    let mut sections: Vec<Section> = Vec::new();
    for record in bytes.chunks_exact(32) {
        let word = |n: usize| {
            u64::from_le_bytes(record[8 * n..8 * n + 8].try_into().expect("eight bytes are eight"))
        };
        let (task, asked, entered, left) = (word(0) as usize, word(1), word(2), word(3));
        // Logged at its start, and again at its end.
        let open = sections
            .iter_mut()
            .rev()
            .take(1000)
            .find(|open| open.left == 0 && open.entered == entered);
        match open {
            Some(open) => open.left = left,
            None => sections.push(Section { process, task, asked, entered, left }),
        }
    }
    sections
}

pub(crate) fn main(args: &[String]) {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<u64>().expect("a number");
    match args[..] {
        ["sections", locker, url, tasks, body, ttl, at_once, own, log] => {
            let work = Work {
                locker,
                url,
                tasks: number(tasks) as usize,
                body: Duration::from_micros(number(body)),
                ttl: Some(Duration::from_millis(number(ttl))).filter(|ttl| !ttl.is_zero()),
                keys: if own == "true" { Keys::Own } else { Keys::Shared },
            };
            runtime().block_on(sections(work, at_once == "true", Path::new(log)));
        }
        ["hold", url, locks, block] => {
            runtime().block_on(hold(url, number(locks) as usize, block == "true"));
        }
        _ => unreachable!("no worker is called with {args:?}"),
    }
}

async fn sections(work: Work<'_>, at_once: bool, log: &Path) {
    let locker = match work.ttl {
        Some(ttl) => Locker::OursByRequest(
            LockPool::builder(work.url).ttl(ttl).connect().await.expect("the server is reachable"),
        ),
        None => Locker::connect(work.locker, work.url).await,
    };
    let file = Arc::new(File::create(log).expect("the log can be written"));
    println!("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the bench speaks");
    let mut span = line.split_whitespace().map(|word| word.parse::<u64>().expect("a number"));
    let (begin, end) = (span.next().unwrap_or(0), span.next().unwrap_or(0));
    let mut set = JoinSet::new();
    for task in 0..work.tasks {
        let (locker, file, body) = (locker.clone(), file.clone(), work.body);
        let key = match work.keys {
            Keys::Shared => "between".to_owned(),
            Keys::Own => format!("own:{task}"),
        };
        set.spawn(async move {
            tokio::time::sleep(Duration::from_nanos(begin.saturating_sub(clock::now()))).await;
            let mut records = Vec::with_capacity(1 << 16);
            loop {
                let asked = clock::now();
                if asked >= end {
                    return records;
                }
                let (sender, receiver) = std::sync::mpsc::channel();
                let file = file.clone();
                let run = move || {
                    let entered = clock::now();
                    if at_once {
                        write(&file, [task as u64, asked, entered, 0]);
                    }
                    if !body.is_zero() {
                        std::thread::sleep(body);
                    }
                    let left = clock::now();
                    if at_once {
                        write(&file, [task as u64, asked, entered, left]);
                    }
                    let _ = sender.send((entered, left));
                };
                locker.section(&key, run).await;
                let (entered, left) = receiver.recv().expect("the body has run");
                records.push([task as u64, asked, entered, left]);
            }
        });
    }
    let all = set.join_all().await;
    if !at_once {
        let bytes: Vec<u8> =
            all.into_iter().flatten().flatten().flat_map(u64::to_le_bytes).collect();
        fs::write(log, bytes).expect("the log can be written");
    }
}

fn write(mut file: &File, record: [u64; 4]) {
    let bytes: Vec<u8> = record.into_iter().flat_map(u64::to_le_bytes).collect();
    file.write_all(&bytes).expect("the log can be written");
}

/// Holds `locks` locks until the bench closes the pipe; then reports how many were lost.
async fn hold(url: &str, locks: usize, block: bool) {
    let pool = LockPool::connect(url).await.expect("the server is reachable");
    let (mut set, mut guards) = (JoinSet::new(), Vec::with_capacity(locks));
    for n in 0..locks {
        let request = pool.lock(format!("held:{n}")).ttl(Duration::from_secs(30)).fencing(false);
        set.spawn(request.wait(Wait::Forever).acquire());
        if set.len() >= 256 {
            guards.extend(set.join_next().await.and_then(Result::ok).and_then(Result::ok));
        }
    }
    guards.extend(set.join_all().await.into_iter().flatten());
    assert_eq!(guards.len(), locks, "all locks are held");
    println!("held");
    if block {
        // Blocks one of the executor's two threads half of the time.
        tokio::spawn(async {
            loop {
                std::thread::sleep(Duration::from_millis(500));
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        });
    }
    let hung_up = tokio::task::spawn_blocking(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    });
    let _ = hung_up.await;
    println!("{}", guards.iter().filter(|guard| !guard.is_held()).count());
    // The server ends with the bench.
    std::process::exit(0);
}

impl Worker {
    /// Closes the pipe to a holder, and returns how many of its locks were lost.
    pub(crate) fn lost(mut self) -> usize {
        self.input = None;
        self.receive().parse().expect("a number")
    }
}
