//! Why a command ends without its answer, and the exit code for it.

use std::io;
use std::process::ExitCode;

use lock_runtime::{ErrorKind, LockError};

use crate::output::{BAD, error_text, printable};

/// The store failed.
const FAILED: u8 = 1;
/// The command line is wrong, or what it asks for is refused. clap has the same code.
pub(crate) const REFUSED: u8 = 2;

#[derive(Debug)]
pub(crate) enum Failure {
    Lock(LockError),
    /// Refused before anything was sent that changes a lock.
    Refused(String),
    Output(io::Error),
}

impl Failure {
    /// The error of a store, which may be the answer that was sought.
    pub(crate) fn of_store(&self) -> Option<&LockError> {
        match self {
            Self::Lock(error) if error.kind() == ErrorKind::Backend => Some(error),
            Self::Lock(_) | Self::Refused(_) | Self::Output(_) => None,
        }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        let is_config =
            |error: &LockError| matches!(error.kind(), ErrorKind::Config | ErrorKind::InvalidKey);
        match self {
            Self::Lock(error) if is_config(error) => REFUSED.into(),
            Self::Refused(_) => REFUSED.into(),
            // `lockctl ls | head` is not a failure.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            Self::Lock(_) | Self::Output(_) => FAILED.into(),
        }
    }

    pub(crate) fn print(&self) {
        let text = match self {
            Self::Lock(error) => error.to_string(),
            Self::Refused(why) => why.clone(),
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return,
            Self::Output(error) => format!("the output cannot be written: {error}"),
        };
        error_text(&format!("{BAD}error:{BAD:#} {}\n", printable(&text)));
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}
