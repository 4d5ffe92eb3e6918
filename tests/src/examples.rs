//! The programs in `examples/`, built when they are missing or old.

use std::path::Path;
use std::sync::OnceLock;

use crate::cargo::cargo;

/// Where the example's program is. The first call builds them all, into the target directory and
/// with the features of `tests/run.sh`, which has them built already.
///
/// # Panics
///
/// When they do not build.
#[track_caller]
pub fn example(name: &str) -> String {
    static BUILT: OnceLock<()> = OnceLock::new();
    // target/<profile>/deps/<test>
    let test = std::env::current_exe().expect("a program knows where it is");
    let folder = test.ancestors().nth(2).expect("tests live below a profile's directory");
    BUILT.get_or_init(|| build(folder));
    folder.join("examples").join(name).display().to_string()
}

fn build(folder: &Path) {
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        None | Some("debug") => "dev",
        Some(name) => name,
    };
    let mut command = cargo("build");
    command
        .args(["--examples", "--profile", profile, "--target-dir"])
        .arg(folder.parent().expect("a profile's directory is in the target directory"));
    let output = command.output().expect("cargo can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
