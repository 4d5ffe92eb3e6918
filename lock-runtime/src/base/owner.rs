//! Owner tokens.

use std::cell::RefCell;
use std::fmt;

use crate::base::error::{ErrorKind, LockError};
use crate::base::owner_tag::OwnerTag;
use crate::base::process::Process;

/// The owner token of one grant: 128 bits of the operating system's randomness, as 32 hex digits.
///
/// It is chosen before the first request of an acquire and is the same for all retries. A retry therefore recognises
/// a lock that an earlier request with a lost reply may have acquired.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner([u8; 32]);

impl Owner {
    /// A new token.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] if the operating system provides no randomness.
    pub fn random() -> Result<Self, LockError> {
        let bytes = RandomBuffer::take().map_err(|error| {
            LockError::new(
                ErrorKind::Backend,
                format!("the operating system provides no randomness: {error}"),
            )
        })?;
        let mut text = [0_u8; 32];
        for (pair, byte) in text.chunks_exact_mut(2).zip(bytes) {
            pair[0] = HEX[usize::from(byte >> 4)];
            pair[1] = HEX[usize::from(byte & 15)];
        }
        Ok(Self(text))
    }

    /// The token from its stored form.
    #[cfg(any(feature = "redis", feature = "_sql", feature = "zookeeper"))]
    pub(crate) const fn from_text(text: [u8; 32]) -> Self {
        Self(text)
    }

    /// The token from a text of 32 hexadecimal digits in lower case.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let bytes: [u8; 32] = text.as_bytes().try_into().ok()?;
        bytes.iter().all(|byte| HEX.contains(byte)).then_some(Self(bytes))
    }

    /// The token from its stored form: what [`as_bytes`](Self::as_bytes) returned, perhaps in another process. `None` for
    /// bytes of another form, which belong to another client.
    ///
    /// ```
    /// use lock_runtime::backend::Owner;
    ///
    /// let owner = Owner::random()?;
    /// assert_eq!(Owner::from_bytes(owner.as_bytes()), Some(owner));
    /// assert_eq!(Owner::from_bytes(b"another client"), None);
    /// # Ok::<(), lock_runtime::LockError>(())
    /// ```
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        std::str::from_utf8(bytes).ok().and_then(Self::parse)
    }

    /// The token in its stored form: 32 bytes of ASCII.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The part that may be shown.
    #[must_use]
    pub const fn tag(&self) -> OwnerTag {
        OwnerTag::of_token(&self.0)
    }
}

/// Random bytes that were fetched and not used yet: the system call costs more than the rest of a token. A forked
/// process inherits the same bytes and therefore fetches new ones.
struct RandomBuffer {
    bytes: [u8; 512],
    used: usize,
    /// The process that has fetched them.
    process: Option<Process>,
}

thread_local! {
    static BUFFER: RefCell<RandomBuffer> = const { RefCell::new(RandomBuffer { bytes: [0; 512], used: 512, process: None }) };
}

impl RandomBuffer {
    fn take() -> Result<[u8; 16], getrandom::Error> {
        BUFFER.with_borrow_mut(|buffer| {
            let is_own = buffer.process.as_ref().is_some_and(Process::is_current);
            if buffer.used == buffer.bytes.len() || !is_own {
                // A failure must not leave the bytes of the parent of a fork to be used.
                buffer.process = None;
                getrandom::fill(&mut buffer.bytes)?;
                (buffer.process, buffer.used) = (Some(Process::current()), 0);
            }
            let mut token = [0; 16];
            let fresh = &mut buffer.bytes[buffer.used..][..16];
            token.copy_from_slice(fresh);
            fresh.fill(0);
            buffer.used += 16;
            Ok(token)
        })
    }
}

const HEX: &[u8; 16] = b"0123456789abcdef";

/// Shows a few digits: enough to distinguish owners in a log, too few to release their locks.
impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({}..)", self.tag())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_a_whole_token_alone() {
        let token = b"0123456789abcdef0123456789abcdef";
        assert_eq!(Owner::from_bytes(token).unwrap().tag().to_string(), "01234567");
        let shouted = token.to_ascii_uppercase();
        for other in [&token[..31], &shouted, b"", b"another client", &[&token[..], b"0"].concat()]
        {
            assert_eq!(Owner::from_bytes(other), None);
        }
    }
}
