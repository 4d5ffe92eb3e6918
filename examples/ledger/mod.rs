//! In place of a shared database: one file per order, one line per entry.

use std::io::{self, Write};
use std::path::PathBuf;

#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    folder: PathBuf,
}

impl Ledger {
    /// A ledger in `folder`, or in a folder of this machine's for temporary files.
    pub(crate) fn open(folder: Option<String>) -> io::Result<Self> {
        let folder = folder.map_or_else(|| std::env::temp_dir().join("orders"), PathBuf::from);
        std::fs::create_dir_all(&folder)?;
        Ok(Self { folder })
    }

    fn file(&self, id: u64) -> PathBuf {
        self.folder.join(id.to_string())
    }

    pub(crate) fn has(&self, id: u64, entry: &str) -> io::Result<bool> {
        match std::fs::read_to_string(self.file(id)) {
            Ok(text) => Ok(text.lines().any(|line| line == entry)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn append(&self, id: u64, entry: &str) -> io::Result<()> {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(self.file(id))?;
        writeln!(file, "{entry}")
    }
}
