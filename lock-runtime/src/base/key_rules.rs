//! Which keys a pool accepts.

use sha2::{Digest, Sha256};

use crate::base::error::{ErrorKind, LockError};
use crate::base::key::Key;

/// Longer keys keep their head, and the rest is hashed. Includes the prefix of the pool: a MySQL column holds no more.
const MAX_BYTES: usize = 512;

/// The limit for the prefix of a pool. A shortened key keeps it whole, so that a search by the prefix finds the key.
const MAX_PREFIX_BYTES: usize = 256;

/// The maximum number of keys in one request. Their script takes the store about a millisecond, and blocks all other clients.
pub(crate) const MOST_KEYS: usize = 128;

/// Marks a hashed tail. `%` in a rendered value is always followed by two hex digits, so that no
/// value can look like one.
const HASH_MARK: &str = "%~";

/// Part of the names of data beside the locks: their wait queues and the counters of fences.
pub(crate) const RESERVED: &str = "lock_runtime:";

impl Key {
    /// Refuses an empty key and shortens one of more than 512 bytes.
    pub(crate) fn checked(self) -> Result<Self, LockError> {
        let text = self.as_str();
        if text.is_empty() {
            return Err(LockError::new(ErrorKind::InvalidKey, "the lock key is empty")
                .remedy("an empty key would make unrelated calls wait for each other; name what is locked, for example `order:42`"));
        }
        Ok(self.within(MAX_BYTES))
    }

    /// The key, shortened so that it has no more than 512 bytes with `prefix`. The prefix of a pool leaves room for the
    /// key's head.
    pub(crate) fn shortened_for(self, prefix: &str) -> Self {
        self.within(MAX_BYTES - prefix.len().min(MAX_PREFIX_BYTES))
    }

    fn within(self, limit: usize) -> Self {
        let text = self.as_str();
        if text.len() <= limit {
            return self;
        }
        Self::from(shortened(text, limit))
    }

    /// The key as the store knows it.
    pub(crate) fn prefixed(&self, prefix: &str) -> Self {
        if prefix.is_empty() {
            return self.clone();
        }
        Self::from([prefix, self.as_str()].concat())
    }

    /// Refuses a key that, after `prefix`, could be the name of something other than a lock.
    pub(crate) fn check_reserved_text(&self, prefix: &str) -> Result<(), LockError> {
        let text = self.as_str();
        let crosses = |at| prefix.ends_with(&RESERVED[..at]) && text.starts_with(&RESERVED[at..]);
        if text.contains(RESERVED) || (!prefix.is_empty() && (1..RESERVED.len()).any(crosses)) {
            // Without the key, which `LockError::keys` has: events show the text.
            let cause = format!(
                "the lock key contains `{RESERVED}`, or does so after the prefix of the pool"
            );
            return Err(LockError::new(ErrorKind::InvalidKey, cause).remedy("such names are reserved for data beside the locks; choose another name for the lock"));
        }
        Ok(())
    }
}

/// Refuses a prefix that makes each key a reserved name, or leaves too little room for keys.
pub(crate) fn check_prefix(prefix: &str) -> Result<(), LockError> {
    if prefix.contains(RESERVED) {
        let cause = format!("the prefix `{prefix}` contains `{RESERVED}`");
        return Err(LockError::new(ErrorKind::Config, cause).remedy(
            "names with it are reserved for data beside the locks; choose another prefix",
        ));
    }
    if prefix.len() > MAX_PREFIX_BYTES {
        let bytes = prefix.len();
        let cause = format!(
            "the prefix of the keys has {bytes} bytes, and may have at most {MAX_PREFIX_BYTES}"
        );
        return Err(LockError::new(ErrorKind::Config, cause)
            .remedy("choose a shorter one, such as `orders:`"));
    }
    Ok(())
}

/// The head of `text` and a SHA-256 of all of it: exactly `limit` bytes or a few less, and still different
/// for different texts.
fn shortened(text: &str, limit: usize) -> String {
    let digest = Sha256::digest(text.as_bytes());
    let room = limit - HASH_MARK.len() - 2 * digest.len();
    let head = (0..=room).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let mut short = String::with_capacity(limit);
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
    fn a_key_with_its_prefix_has_512_bytes_at_most() {
        let prefix = "p".repeat(MAX_PREFIX_BYTES);
        let key = |text: &str| Key::from(text).checked().unwrap().shortened_for(&prefix);
        for length in [1, 255, 256, 257, 300, 512, 513, 10_000] {
            let (one, two) = ("k".repeat(length - 1) + "1", "k".repeat(length - 1) + "2");
            assert_ne!(key(&one), key(&two), "{length}");
            let short = key(&one);
            assert!(short.prefixed(&prefix).as_str().len() <= MAX_BYTES);
            assert_eq!(short.as_str() == one, length <= 256, "{length}");
            // A search returns the shortened key, which names the same lock.
            assert_eq!(key(short.as_str()), short, "{length}");
        }
        check_prefix(&prefix).unwrap();
        let error = check_prefix(&(prefix + "p")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("has 257 bytes, and may have at most 256"), "{error}");
    }

    #[test]
    fn the_names_beside_a_lock_are_no_keys() {
        let refused = |prefix: &str, text: &str| {
            Key::from(text).check_reserved_text(prefix).err().map(|error| {
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
