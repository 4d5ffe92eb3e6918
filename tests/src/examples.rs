//! The programs in `examples/`, built when they are missing or old.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

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
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member has a workspace");
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut command = Command::new(cargo);
    command
        .args(["build", "--all-features", "--examples", "--quiet"])
        .args(["--profile", profile, "--target-dir"])
        .arg(folder.parent().expect("a profile's directory is in the target directory"))
        .current_dir(root);
    // Cargo's variables for tests would make build scripts run again.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
        }) {
            command.env_remove(name);
        }
    }
    let output = command.output().expect("cargo can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
