//! The program `lockctl`, built when it is missing or old.

use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;

use crate::cargo::{build_programs, programs};

/// A command with these arguments, without the variables that `lockctl` reads. Answers may take long, as on a busy machine.
///
/// # Panics
///
/// When the program does not build.
#[track_caller]
pub fn lockctl<'a>(args: impl IntoIterator<Item = &'a str>) -> Command {
    static BUILT: OnceLock<()> = OnceLock::new();
    // With the examples, dependencies have the features that they have for tests, and are not built again.
    BUILT.get_or_init(|| build_programs(&["--bin", "lockctl", "--examples"]));
    let mut command = Command::new(programs().join("lockctl"));
    command.args(args);
    for variable in ["LOCK_URL", "LOCK_PREFIX", "NO_COLOR", "CLICOLOR_FORCE"] {
        command.env_remove(variable);
    }
    command.env("LOCK_REQUEST_TIMEOUT", "20s");
    command
}

/// How a run of `lockctl` ended, and what it has printed.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code.
    pub code: i32,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// Runs `command` to its end.
///
/// # Panics
///
/// When it cannot be started, or is killed.
#[track_caller]
pub fn run(mut command: Command) -> Ended {
    let Output { status, stdout, stderr } = command.output().expect("lockctl can be started");
    let text = |bytes| String::from_utf8(bytes).expect("it prints UTF-8");
    let code = status.code().expect("it ends by itself");
    Ended { code, stdout: text(stdout), stderr: text(stderr) }
}

impl Ended {
    /// The JSON of its standard output.
    ///
    /// # Panics
    ///
    /// When it is none.
    #[must_use]
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}
