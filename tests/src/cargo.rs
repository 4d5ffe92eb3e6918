//! cargo as a child process of a test.

use std::path::Path;
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
