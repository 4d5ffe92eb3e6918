//! Servers with a clock that can be stepped, and made to run fast or slow.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use tempfile::{NamedTempFile, TempDir};

use crate::folder::new_folder;
use crate::server::{Config, RedisServer};

/// The clock of one server, as far as it is from this machine's. It stays so over restarts.
///
/// Only the wall clock is shifted, by which leases expire, and not the monotonic one that event loops
/// run on.
#[derive(Debug)]
pub struct Skew {
    file: NamedTempFile,
    ahead_us: AtomicI64,
}

/// Which way a clock is stepped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Into the future.
    Forward,
    /// Into the past.
    Back,
}

impl Skew {
    /// Starts a server with a correct clock.
    ///
    /// # Panics
    ///
    /// Like [`Config::start`], and when there is no C compiler.
    #[track_caller]
    pub fn start(config: Config) -> (RedisServer, Self) {
        let skew = Self::new();
        let server = skew
            .environment()
            .into_iter()
            .fold(config, |config, (name, value)| config.env(name, value));
        (server.start(), skew)
    }

    /// A correct clock, for a server with its [`environment`](Self::environment).
    ///
    /// # Panics
    ///
    /// When there is no C compiler.
    #[allow(clippy::new_without_default)]
    #[track_caller]
    pub fn new() -> Self {
        let file = NamedTempFile::with_prefix("lock-tests-skew-").expect("a file can be made");
        readable(file.path());
        let skew = Self { file, ahead_us: AtomicI64::new(0) };
        skew.write(0, 0);
        skew.write(1, 0);
        skew.write(2, 0);
        skew
    }

    /// The variables of a server process that has this clock.
    #[track_caller]
    pub fn environment(&self) -> [(&'static str, PathBuf); 2] {
        [("LD_PRELOAD", shim().to_owned()), ("LOCK_TESTS_SKEW", self.file.path().to_owned())]
    }

    /// Steps the clock, as an administrator does, or a time server after a long outage.
    pub fn step(&self, by: Duration, step: Step) {
        let by = micros(by);
        let by = if step == Step::Forward { by } else { -by };
        self.write(0, self.ahead_us.fetch_add(by, Ordering::SeqCst) + by);
    }

    /// From now on the clock runs so many percent too fast, or too slow if negative. Once for each
    /// clock.
    pub fn rate(&self, percent: f64) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        self.write(1, micros(now.expect("it is after 1970")));
        self.write(2, (percent * 10_000.0) as i64);
    }

    /// The layout is `struct skew` of skew.c. One word at a time, so that no half of one is read.
    fn write(&self, word: u64, value: i64) {
        let file: &File = self.file.as_file();
        file.write_all_at(&value.to_ne_bytes(), word * 8).expect("the file takes a word");
    }
}

fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).expect("300,000 years")
}

/// The library, compiled once per process.
#[track_caller]
fn shim() -> &'static Path {
    static SHIM: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, library) = SHIM.get_or_init(|| {
        let folder = new_folder();
        let library = folder.path().join("lock-tests-skew.so");
        compile(&library);
        readable(folder.path());
        readable(&library);
        (folder, library)
    });
    library
}

/// Some servers run as another user.
fn readable(path: &Path) {
    let permissions = Permissions::from_mode(0o755);
    fs::set_permissions(path, permissions).expect("the owner can change them");
}

fn compile(library: &Path) {
    let mut compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-x", "c", "-o"])
        .arg(library)
        .arg("-")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("cannot start cc, run tests/run.sh: {error}"));
    let source = include_bytes!("skew.c");
    let sent = compiler.stdin.take().map(|mut stdin| stdin.write_all(source));
    let output = compiler.wait_with_output().expect("a child can be waited for");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && matches!(sent, Some(Ok(()))), "cc: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ahead(server: &RedisServer) -> i64 {
        let time = server.cli(&["TIME"]);
        let mut parts = time.lines().map(|part| part.parse::<i64>().unwrap());
        let micros_there = parts.next().unwrap() * 1_000_000 + parts.next().unwrap();
        micros_there - micros(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap())
    }

    #[track_caller]
    fn assert_near(ahead_us: i64, seconds: i64) {
        assert!((ahead_us - seconds * 1_000_000).abs() < 2_000_000, "{ahead_us}, not {seconds} s");
    }

    #[test]
    fn a_stepped_clock_is_another_one_for_keys_and_scripts() {
        let (server, skew) = Skew::start(RedisServer::builder());
        assert_near(ahead(&server), 0);
        server.cli(&["SET", "k", "v", "PX", "30000"]);
        skew.step(Duration::from_secs(90), Step::Back);
        assert_near(ahead(&server), -90);
        let left: i64 = server.cli(&["PTTL", "k"]).parse().unwrap();
        assert!(left > 60_000, "{left}");
        skew.step(Duration::from_secs(150), Step::Forward);
        assert_near(ahead(&server), 60);
        assert_eq!(server.cli(&["GET", "k"]), "(nil)");
        let script = "return tonumber(redis.call('TIME')[1])";
        let there: i64 = server.cli(&["EVAL", script, "0"]).parse().unwrap();
        assert_near(ahead(&server), 60);
        let here = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert_near(there * 1_000_000 - micros(here), 60);
        server.restart();
        assert_near(ahead(&server), 60);
    }

    #[test]
    fn a_fast_clock_gains() {
        let (server, skew) = Skew::start(RedisServer::builder());
        skew.rate(1_000.0);
        let before = (SystemTime::now(), ahead(&server));
        // Two seconds of time, so that slow answers of the server make little difference.
        let gained = crate::eventually_some(Duration::from_secs(30), "it gains", || {
            let gained = ahead(&server) - before.1;
            (gained > 20_000_000).then_some(gained)
        });
        let passed = micros(before.0.elapsed().unwrap());
        assert!(gained < 11 * passed, "{gained} in {passed}");
        assert!(gained > 4 * passed, "{gained} in {passed}");
    }
}
