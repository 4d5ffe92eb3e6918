//! What `tests/foreign/install.sh` has installed.

use std::path::PathBuf;

/// The path of `name` below `target/foreign`.
///
/// # Panics
///
/// When it is not installed.
#[must_use]
#[track_caller]
pub fn installed(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a program knows where it is");
    let folders = test.ancestors().map(|folder| folder.join("foreign"));
    let path = folders.map(|folder| folder.join(name)).find(|path| path.exists());
    path.unwrap_or_else(|| panic!("target/foreign/{name} is missing: run tests/foreign/install.sh"))
}
