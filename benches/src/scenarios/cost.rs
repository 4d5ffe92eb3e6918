//! The cost of the attribute in the size of a future and in build time.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use lock_tests::sizes::{Sizes, sizes};

use crate::Plan;
use crate::report::{Bar, Report};

pub(crate) fn measure(_plan: Plan, report: &mut Report) {
    report.begin("cost", "bytes of a wrapped future, seconds of a build");
    for Sizes { what, plain, locked, .. } in sizes() {
        let more = (locked - plain) as f64;
        report.figure(&format!("{what}: added to the future"), "bytes", &[more], Bar::None);
    }
    let folder = tempfile::tempdir().expect("a folder can be made");
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member has a workspace");
    let began = Instant::now();
    let built = Command::new(cargo)
        .args(["build", "--quiet", "-p", "lock-macros", "--target-dir"])
        .arg(folder.path())
        .current_dir(root)
        .status();
    assert!(built.is_ok_and(|status| status.success()), "lock-macros builds");
    let took = began.elapsed().as_secs_f64();
    report.figure("clean build of lock-macros and what it needs", "s", &[took], Bar::None);
}
