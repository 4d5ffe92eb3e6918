//! Who holds a lock.

use std::cell::RefCell;
use std::fmt;

use crate::base::error::{ErrorKind, LockError};
use crate::base::process::Process;

/// The owner token of one grant: 128 bits of the operating system's randomness, as 32 hex digits.
///
/// Chosen before the first request of an acquire and the same for all its retries, so that a retry
/// recognises what an earlier try, whose reply was lost, may have taken.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner([u8; 32]);

impl Owner {
    /// A new token.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] if the operating system gives no randomness.
    pub fn random() -> Result<Self, LockError> {
        let bytes = Stock::take().map_err(|error| {
            LockError::new(
                ErrorKind::Backend,
                format!("the operating system gives no randomness: {error}"),
            )
        })?;
        let mut text = [0_u8; 32];
        for (pair, byte) in text.chunks_exact_mut(2).zip(bytes) {
            pair[0] = HEX[usize::from(byte >> 4)];
            pair[1] = HEX[usize::from(byte & 15)];
        }
        Ok(Self(text))
    }

    /// The token from what a store has kept of it.
    #[cfg(feature = "redis")]
    pub(crate) const fn from_text(text: [u8; 32]) -> Self {
        Self(text)
    }

    /// The token as a store keeps it.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Randomness that was fetched and not used yet: a call to the operating system costs more than the rest
/// of a token. A process that was forked meanwhile has the same bytes, and fetches its own.
struct Stock {
    bytes: [u8; 512],
    used: usize,
    /// Which one has fetched them.
    process: Option<Process>,
}

thread_local! {
    static STOCK: RefCell<Stock> = const { RefCell::new(Stock { bytes: [0; 512], used: 512, process: None }) };
}

impl Stock {
    fn take() -> Result<[u8; 16], getrandom::Error> {
        STOCK.with_borrow_mut(|stock| {
            let is_ours = stock.process.as_ref().is_some_and(Process::is_current);
            if stock.used == stock.bytes.len() || !is_ours {
                stock.process = Some(Process::current());
                getrandom::fill(&mut stock.bytes)?;
                stock.used = 0;
            }
            let mut token = [0; 16];
            let fresh = &mut stock.bytes[stock.used..][..16];
            token.copy_from_slice(fresh);
            fresh.fill(0);
            stock.used += 16;
            Ok(token)
        })
    }
}

const HEX: &[u8; 16] = b"0123456789abcdef";

/// Shows a few digits: enough to tell two owners apart in a log, too little to release their locks.
impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({}..)", String::from_utf8_lossy(&self.0[..8]))
    }
}
