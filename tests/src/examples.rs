//! The programs in `examples/`, built when they are missing or old.

use std::sync::OnceLock;

use crate::cargo::{build_programs, programs};

/// Where the example's program is. The first call builds them all, into the target directory and
/// with the features of `tests/run.sh`, which has them built already.
///
/// # Panics
///
/// When they do not build.
#[track_caller]
pub fn example(name: &str) -> String {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| build_programs(&["--examples"]));
    programs().join("examples").join(name).display().to_string()
}
