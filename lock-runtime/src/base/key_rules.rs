//! Which keys a pool accepts.

use sha2::{Digest, Sha256};

use crate::base::error::{ErrorKind, LockError};
use crate::base::key::Key;

/// Longer keys keep their head and get the rest hashed.
const MAX_BYTES: usize = 512;

/// Marks a hashed tail. `%` in a rendered value is always followed by two hex digits, so that no
/// value can look like one.
const HASH_MARK: &str = "%~";

/// Stands in the names of what is kept beside the locks, their wait queues and the counters of fences.
pub(crate) const RESERVED: &str = "lock_runtime:";

impl Key {
    /// Refuses an empty key and shortens one of more than 512 bytes.
    pub(crate) fn checked(self) -> Result<Self, LockError> {
        let text = self.as_str();
        if text.is_empty() {
            return Err(LockError::new(ErrorKind::InvalidKey, "the lock key is empty")
                .remedy("an empty key would make unrelated calls wait for each other; name what is locked, for example `order:42`"));
        }
        if text.len() <= MAX_BYTES {
            return Ok(self);
        }
        Ok(Self::from(shortened(text)))
    }

    /// Refuses a key that, behind `prefix`, could be the name of something beside a lock.
    pub(crate) fn is_free_behind(&self, prefix: &str) -> Result<(), LockError> {
        let text = self.as_str();
        let crosses = |at| prefix.ends_with(&RESERVED[..at]) && text.starts_with(&RESERVED[at..]);
        if text.contains(RESERVED) || (!prefix.is_empty() && (1..RESERVED.len()).any(crosses)) {
            // Without the key, which `LockError::keys` has: events show the text.
            let cause = format!(
                "the lock key contains `{RESERVED}`, or does so behind the prefix of the pool"
            );
            return Err(LockError::new(ErrorKind::InvalidKey, cause).remedy("names like that are those of what is kept beside the locks; name the lock otherwise"));
        }
        Ok(())
    }
}

/// The head of `text` and a SHA-256 of all of it: exactly 512 bytes or a few less, and still different
/// for different texts.
fn shortened(text: &str) -> String {
    let digest = Sha256::digest(text.as_bytes());
    let limit = MAX_BYTES - HASH_MARK.len() - 2 * digest.len();
    let head = (0..=limit).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let mut short = String::with_capacity(MAX_BYTES);
    short.push_str(&text[..head]);
    short.push_str(HASH_MARK);
    for byte in digest {
        push_hex(&mut short, byte);
    }
    short
}

pub(crate) fn push_hex(out: &mut String, byte: u8) {
    const DIGITS: [char; 16] =
        ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F'];
    out.push(DIGITS[usize::from(byte >> 4)]);
    out.push(DIGITS[usize::from(byte & 15)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_beside_a_lock_are_no_keys() {
        let refused = |prefix: &str, text: &str| {
            Key::from(text).is_free_behind(prefix).err().map(|error| {
                assert_eq!(error.kind(), ErrorKind::InvalidKey);
                assert!(error.to_string().contains("lock_runtime:"), "{error}");
            })
        };
        for (prefix, text) in [
            ("", "lock_runtime:fence"),
            ("app:", "lock_runtime:ballots"),
            ("", "app:order:7:lock_runtime:line"),
            ("lock_", "runtime:fence"),
            ("app:lock_runtime", ":probe"),
            ("l", "ock_runtime:fence"),
        ] {
            assert!(refused(prefix, text).is_some(), "{prefix} {text}");
        }
        for (prefix, text) in [
            ("", "lock_runtime"),
            ("lock_", "lock_"),
            ("lock_runtime", "fence"),
            ("app:", "order:7"),
        ] {
            assert!(refused(prefix, text).is_none(), "{prefix} {text}");
        }
    }
}
