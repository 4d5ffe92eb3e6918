//! Empty data directories, from which servers start faster than from nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tempfile::TempDir;

/// A directory for each program of a server, made at its first use.
#[derive(Debug)]
pub(crate) struct Templates(Mutex<BTreeMap<PathBuf, TempDir>>);

impl Templates {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// The directory of `program`. Another caller waits until it is made.
    pub(crate) fn get_or_make(&self, program: &Path, make: impl FnOnce() -> TempDir) -> PathBuf {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        made.entry(program.to_owned()).or_insert_with(make).path().to_owned()
    }
}
