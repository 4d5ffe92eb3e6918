//! Temporary folders that do not outlive the test program.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use tempfile::TempDir;

/// An empty folder that is removed when dropped, or else when the program has ended.
///
/// A value in a `static` is never dropped, and a killed program drops nothing. A server of a `static` leaves more than
/// 100 MB behind.
///
/// # Panics
///
/// When it cannot be made.
#[must_use]
#[track_caller]
pub fn new_folder() -> TempDir {
    static ALL: OnceLock<(TempDir, Child)> = OnceLock::new();
    let (all, _) = ALL.get_or_init(|| {
        let all = TempDir::with_prefix("lock-tests-").expect("a temporary folder can be made");
        // Some servers run as another user.
        let permissions = Permissions::from_mode(0o711);
        fs::set_permissions(all.path(), permissions).expect("the owner can change them");
        let remover = remove_at_the_end(all.path());
        (all, remover)
    });
    TempDir::new_in(all.path()).expect("a temporary folder can be made")
}

/// Copies a folder with all owners, permissions and times: to `to`, or into it if that is a folder.
///
/// # Panics
///
/// When it cannot be copied.
#[track_caller]
pub fn copy_folder(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status();
    assert!(copied.is_ok_and(|copied| copied.success()), "{from:?} is copied to {to:?}");
}

/// A process that removes `folder` when this one has ended, in whatever way: its standard input ends then.
///
/// The servers of this program are killed at the same moment, so that they may still write at the first attempt.
fn remove_at_the_end(folder: &Path) -> Child {
    let script = "trap '' HUP INT TERM; cat >/dev/null; for n in 1 2 3 4 5; do rm -rf -- \"$0\" && exit; sleep 1; done";
    Command::new("sh")
        .args(["-c", script])
        .arg(folder)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("sh can be started")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::eventually::eventually;

    #[test]
    fn a_folder_of_a_program_that_has_ended_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "content").unwrap();
        let mut remover = remove_at_the_end(folder.path());
        assert!(remover.try_wait().unwrap().is_none(), "it waits for the end of the program");
        assert!(folder.path().exists());
        drop(remover.stdin.take());
        eventually(Duration::from_secs(30), "the folder is gone", || !folder.path().exists());
        remover.wait().unwrap();
    }
}
