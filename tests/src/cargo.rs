//! cargo as a child process of a test.

use std::path::{Path, PathBuf};
use std::process::Command;

/// cargo in the folder of the workspace, with the features of `tests/run.sh`: what that script has built is not built
/// again.
///
/// Cargo sets variables for the package of this test. Build scripts of other packages would run again because of them.
pub fn cargo(command: &str) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member has a workspace");
    let mut cargo = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
    cargo.args([command, "--all-features", "--quiet"]).current_dir(root);
    for (name, _) in std::env::vars_os() {
        let of_a_package = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if name.to_str().is_some_and(|name| of_a_package.iter().any(|at| name.starts_with(at))) {
            cargo.env_remove(name);
        }
    }
    cargo
}

/// Where the programs are that were built with this test: `target/<profile>`.
pub(crate) fn programs() -> PathBuf {
    // target/<profile>/deps/<test>
    let test = std::env::current_exe().expect("a program knows where it is");
    test.ancestors().nth(2).expect("tests live below a profile's directory").to_owned()
}

/// Builds `targets`, as `cargo build` names them, into the folder of [`programs`].
#[track_caller]
pub(crate) fn build_programs(targets: &[&str]) {
    let folder = programs();
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        None | Some("debug") => "test",
        Some(name) => name,
    };
    let mut command = cargo("build");
    command
        .args(targets)
        .args(["--profile", profile, "--target-dir"])
        .arg(folder.parent().expect("a profile's directory is in the target directory"));
    let output = command.output().expect("cargo can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
