//! Child processes that cannot outlive the test, and workers with output that a test can await.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::eventually::eventually_some;

/// A child process: killed when dropped, and by the kernel when this process dies.
#[derive(Debug)]
pub struct Process {
    child: Mutex<Child>,
    pid: u32,
}

impl Process {
    /// A command for [`spawn`](Self::spawn).
    pub fn command(program: impl AsRef<OsStr>) -> Command {
        static SETPRIV: OnceLock<bool> = OnceLock::new();
        let available = *SETPRIV.get_or_init(|| {
            let version = Command::new("setpriv").arg("--version").stdout(Stdio::null()).status();
            version.is_ok_and(|status| status.success())
        });
        if !available {
            return Command::new(program);
        }
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program);
        command
    }

    /// Starts a command made by [`command`](Self::command).
    pub fn spawn(command: Command) -> io::Result<Self> {
        let child = spawn_from_an_immortal_thread(command)?;
        let pid = child.id();
        Ok(Self { child: Mutex::new(child), pid })
    }

    /// Its process id, also after it ended.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Stops it as a long garbage collection or a hung host would (SIGSTOP), until
    /// [`resume`](Self::resume). It has stopped when this returns.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
        // Threads that are running take the signal a moment later.
        while self.has_a_running_thread() {
            std::thread::yield_now();
        }
    }

    /// Ends a pause.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Ends it (SIGKILL works on a paused process too) and waits until it is gone.
    pub fn kill(&self) -> ExitStatus {
        let mut child = self.child();
        // An error means that it has ended already.
        let _ = child.kill();
        child.wait().expect("a child can be waited for")
    }

    /// How it ended; `None` while it runs.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        self.child().try_wait().expect("a child can be waited for")
    }

    fn signal(&self, signal: Signal) {
        let mut child = self.child();
        // The pid of a child that was waited for may belong to another process.
        if child.try_wait().is_ok_and(|status| status.is_none()) {
            let pid = Pid::from_child(&child);
            kill_process(pid, signal).expect("a running child takes signals");
        }
    }

    fn has_a_running_thread(&self) -> bool {
        let Ok(threads) = fs::read_dir(format!("/proc/{}/task", self.pid)) else { return false };
        threads.flatten().any(|thread| {
            let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            !matches!(state, None | Some('T' | 't' | 'Z' | 'X'))
        })
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

type SpawnRequest = (Command, mpsc::Sender<io::Result<Child>>);

/// The death signal comes when the *thread* that spawned ends, and tests are threads.
fn spawn_from_an_immortal_thread(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<mpsc::Sender<SpawnRequest>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (requests, inbox) = mpsc::channel::<SpawnRequest>();
        std::thread::Builder::new()
            .name("spawner".into())
            .spawn(move || {
                for (mut command, reply) in inbox {
                    let _ = reply.send(command.spawn());
                }
            })
            .expect("a thread can be started");
        requests
    });
    let (reply, child) = mpsc::channel();
    spawner.send((command, reply)).expect("the spawner never ends");
    child.recv().expect("the spawner always answers")
}

/// A worker process; its output is read line by line.
#[derive(Debug)]
pub struct Worker {
    process: Process,
    stdin: Mutex<Option<ChildStdin>>,
    stdout: Arc<Output>,
    stderr: Arc<Output>,
}

impl Worker {
    /// Starts `program`, as a rule `env!("CARGO_BIN_EXE_<name>")`.
    ///
    /// # Panics
    ///
    /// When it cannot be started.
    #[track_caller]
    pub fn start<A: AsRef<OsStr>>(program: &str, args: &[A]) -> Self {
        Self::start_with_env(program, args, &[])
    }

    /// [`start`](Self::start) with environment variables on top of this process's own.
    ///
    /// # Panics
    ///
    /// When it cannot be started.
    #[track_caller]
    pub fn start_with_env<A: AsRef<OsStr>>(
        program: &str,
        args: &[A],
        env: &[(&str, &str)],
    ) -> Self {
        let mut command = Process::command(program);
        command.args(args).envs(env.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let process = Process::spawn(command)
            .unwrap_or_else(|error| panic!("cannot start {program}: {error}"));
        let (stdin, stdout, stderr) = {
            let mut child = process.child();
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        };
        Self {
            process,
            stdin: Mutex::new(stdin),
            stdout: Output::follow(stdout.expect("stdout is piped")),
            stderr: Output::follow(stderr.expect("stderr is piped")),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// SIGSTOP, see [`Process::pause`].
    pub fn pause(&self) {
        self.process.pause();
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.process.resume();
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        self.process.terminate();
    }

    /// SIGKILL, and waits until it is gone and its output is read.
    pub fn kill(&self) -> ExitStatus {
        let status = self.process.kill();
        self.drain();
        status
    }

    /// The lines of its standard output so far.
    pub fn stdout(&self) -> Vec<String> {
        self.stdout.lines.lock().unwrap().0.clone()
    }

    /// The lines of its standard error so far.
    pub fn stderr(&self) -> Vec<String> {
        self.stderr.lines.lock().unwrap().0.clone()
    }

    /// Writes a line to its standard input.
    ///
    /// # Panics
    ///
    /// When the worker has closed it.
    #[track_caller]
    pub fn send_line(&self, line: &str) {
        let mut stdin = self.stdin.lock().unwrap();
        let stdin = stdin.as_mut().expect("stdin is open");
        writeln!(stdin, "{line}").expect("the worker reads its stdin");
    }

    /// Closes its standard input.
    pub fn close_stdin(&self) {
        self.stdin.lock().unwrap().take();
    }

    /// The first line of its standard output, from the start, that `matches`.
    ///
    /// # Panics
    ///
    /// With all output, when `deadline` has passed or the output has ended without it.
    #[track_caller]
    pub fn wait_for_line(&self, deadline: Duration, matches: impl Fn(&str) -> bool) -> String {
        let Some(line) = self.stdout.wait_for(deadline, matches) else {
            panic!(
                "the line did not come within {deadline:?}\nstdout: {:#?}\nstderr: {:#?}",
                self.stdout(),
                self.stderr()
            );
        };
        line
    }

    /// Waits until it has ended by itself and its output is read.
    ///
    /// # Panics
    ///
    /// When it still runs after `deadline`.
    #[track_caller]
    pub fn wait_for_exit(&self, deadline: Duration) -> ExitStatus {
        let status = eventually_some(deadline, "the worker ends", || self.process.exit_status());
        self.drain();
        status
    }

    /// Not for ever: a child of the worker's may have inherited its output.
    fn drain(&self) {
        for output in [&self.stdout, &self.stderr] {
            output.wait_for(Duration::from_secs(5), |_| false);
        }
    }
}

#[derive(Debug, Default)]
struct Output {
    /// Whether the output has ended.
    lines: Mutex<(Vec<String>, bool)>,
    grown: Condvar,
}

impl Output {
    fn follow(pipe: impl Read + Send + 'static) -> Arc<Self> {
        let output = Arc::new(Self::default());
        let filled = Arc::clone(&output);
        std::thread::spawn(move || {
            let mut pipe = BufReader::new(pipe);
            let mut line = Vec::new();
            while pipe.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
                let text = String::from_utf8_lossy(&line).trim_end_matches('\n').to_owned();
                filled.lines.lock().unwrap().0.push(text);
                filled.grown.notify_all();
                line.clear();
            }
            filled.lines.lock().unwrap().1 = true;
            filled.grown.notify_all();
        });
        output
    }

    fn wait_for(&self, deadline: Duration, matches: impl Fn(&str) -> bool) -> Option<String> {
        let end = Instant::now() + deadline;
        let mut seen = 0;
        let mut lines = self.lines.lock().unwrap();
        loop {
            if let Some(line) = lines.0[seen..].iter().find(|line| matches(line)) {
                return Some(line.clone());
            }
            seen = lines.0.len();
            let left = end.saturating_duration_since(Instant::now());
            if lines.1 || left.is_zero() {
                return None;
            }
            lines = self.grown.wait_timeout(lines, left).unwrap().0;
        }
    }
}
