//! Tests that need a process of their own, because they change state that exists once per process.

use std::env;
use std::time::Duration;

use crate::process::Worker;

const VARIABLE: &str = "LOCK_TESTS_ALONE";
const DEADLINE: Duration = Duration::from_secs(120);

/// Runs `body` in a new process of this test program, in which no other test runs.
///
/// `test` is the path of the calling test: `concat!(module_path!(), "::its_name")`.
///
/// # Panics
///
/// With the output of the process, when it fails or when no test has this path.
#[track_caller]
pub fn in_own_process(test: &str, body: impl FnOnce()) {
    let (_, name) = test.split_once("::").expect("a path begins with the name of the program");
    if env::var(VARIABLE).is_ok_and(|it| it == name) {
        return body();
    }
    let program = env::current_exe().expect("a program knows where it lies");
    let process = Worker::start_with_env(
        &program.display().to_string(),
        &["--exact", name, "--nocapture"],
        &[(VARIABLE, name)],
    );
    let status = process.wait_for_exit(DEADLINE);
    let output = [process.stdout(), process.stderr()].concat().join("\n");
    assert!(status.success() && output.contains("1 passed"), "{test}: {status}\n{output}");
    println!("{output}");
}
