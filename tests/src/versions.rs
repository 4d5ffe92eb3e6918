//! The installed servers: every version that `tests/run.sh` installs.
//!
//! Redis and Valkey are programs in `target/servers`, the servers of other stores are folders beside them.

use std::env;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A server's program.
#[derive(Clone, Debug)]
pub struct Version {
    /// The program.
    pub program: PathBuf,
    /// Its vendor.
    pub make: Make,
    /// Major and minor.
    pub number: (u16, u16),
    /// Whether it was built with TLS.
    pub tls: bool,
}

/// A vendor of servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Make {
    /// Redis.
    Redis,
    /// Valkey.
    Valkey,
}

/// The `redis-server` of this machine and those in `LOCK_TEST_SERVERS`, paths with `:` in between; without it
/// those in `target/servers`.
///
/// # Panics
///
/// When one of them does not run.
pub fn installed() -> Vec<Version> {
    let mut programs = vec![PathBuf::from("redis-server")];
    match env::var_os("LOCK_TEST_SERVERS") {
        Some(paths) => {
            programs.extend(env::split_paths(&paths).filter(|path| !path.as_os_str().is_empty()));
        }
        None => {
            let mut found: Vec<_> = fs::read_dir(folder())
                .into_iter()
                .flatten()
                .flatten()
                .map(|entry| entry.path())
                .filter(|path| {
                    let is_note = |ext| ext == "part" || ext == "left_out";
                    path.is_file() && !path.extension().is_some_and(is_note)
                })
                .collect();
            found.sort();
            programs.extend(found);
        }
    }
    programs.into_iter().map(Version::of).collect()
}

/// A server that is older than the oldest tested one: `LOCK_TEST_OLD_SERVER`, or the one in `target/servers/old`.
#[must_use]
pub fn too_old() -> PathBuf {
    env::var_os("LOCK_TEST_OLD_SERVER")
        .map_or_else(|| folder().join("old/redis-6.0"), PathBuf::from)
}

/// The folder of another version of a store's server than the distribution's, such as `postgres-18`.
///
/// `None`, with a line of output, without `LOCK_TEST_NEWER=on`, or if `tests/servers.sh` has found that it is not to be had here.
///
/// # Panics
///
/// When it is missing for another reason.
#[must_use]
pub fn of_store(name: &str) -> Option<PathBuf> {
    if env::var("LOCK_TEST_NEWER").as_deref() != Ok("on") {
        println!("{name} is left out: LOCK_TEST_NEWER=on runs its tests");
        return None;
    }
    let path = folder().join(name);
    if path.join(".installed").is_file() {
        // A later failure belongs to this version.
        println!("{}", path.display());
        return Some(path);
    }
    let reason = fs::read_to_string(folder().join(format!("{name}.left_out")));
    let reason = reason.unwrap_or_else(|_| panic!("{name} is missing: run tests/servers.sh"));
    println!("{name} is left out: {}", reason.trim());
    None
}

fn folder() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| root.join("target"), PathBuf::from)
        .join("servers")
}

impl Version {
    fn of(program: PathBuf) -> Self {
        let output = Command::new(&program)
            .arg("--version")
            .output()
            .unwrap_or_else(|error| panic!("{} does not run: {error}", program.display()));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let make = if text.starts_with("Valkey") { Make::Valkey } else { Make::Redis };
        let number = text
            .split_once("v=")
            .and_then(|(_, rest)| {
                let mut parts = rest.split('.').map_while(|part| part.parse().ok());
                Some((parts.next()?, parts.next()?))
            })
            .unwrap_or_else(|| panic!("{} does not tell its version: {text}", program.display()));
        // Without a certificate it does not start, and names the missing option.
        let started = Command::new(&program)
            .args(["--port", "0", "--tls-port", "1"])
            .output()
            .map(|output| [output.stdout, output.stderr].concat());
        let output = String::from_utf8_lossy(&started.unwrap_or_default()).into_owned();
        Self { program, make, number, tls: output.contains("Failed to configure TLS") }
    }

    /// Whether `SET IFEQ` and a compare-and-delete are commands of it.
    pub fn compares(&self) -> bool {
        match self.make {
            Make::Redis => self.number >= (8, 4),
            Make::Valkey => self.number >= (9, 0),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}.{}", self.make, self.number.0, self.number.1)
    }
}
