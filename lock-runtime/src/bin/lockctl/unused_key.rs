//! Keys for the locks that a command acquires itself.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A key of no program, nor of another run of `command`.
pub(crate) fn unused_key(command: &str) -> String {
    format!("lockctl-{command}:{:016x}", RandomState::new().build_hasher().finish())
}
