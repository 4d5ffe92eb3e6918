//! The name of a lock.

use std::borrow::{Borrow, Cow};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::base::error::{ErrorKind, LockError};

/// Longer keys keep their head and get the rest hashed.
const MAX_BYTES: usize = 512;

/// Marks a hashed tail. `%` in a rendered value is always followed by two hex digits, so that no
/// value can look like one.
const HASH_MARK: &str = "%~";

/// Stands in the names of what is kept beside the locks, their wait queues and the counters of fences.
pub(crate) const RESERVED: &str = "lock_runtime:";

/// The name of a lock. Cheap to clone; a literal is not copied.
///
/// Text with `lock_runtime:` in it is no key: names like that are those of what is kept beside the locks. An acquire refuses it
/// as [`ErrorKind::InvalidKey`], in every store, as it does an empty one.
///
/// Made from text, which is taken as it is:
///
/// ```
/// use lock_runtime::Key;
/// let key = Key::from(format!("order:{}", 42));
/// assert_eq!(key.as_str(), "order:42");
/// ```
#[derive(Clone)]
pub struct Key(Text);

#[derive(Clone)]
enum Text {
    Static(&'static str),
    Shared(Arc<str>),
}

impl Key {
    /// A key from a literal, without a copy.
    #[must_use]
    pub const fn from_static(text: &'static str) -> Self {
        Self(Text::Static(text))
    }

    /// The key's text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match &self.0 {
            Text::Static(text) => text,
            Text::Shared(text) => text,
        }
    }

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
            let cause = format!("the lock key `{prefix}{text}` contains `{RESERVED}`");
            return Err(LockError::new(ErrorKind::InvalidKey, cause).remedy("names like that are those of what is kept beside the locks; name the lock otherwise"));
        }
        Ok(())
    }

    pub(crate) fn prefixed(&self, prefix: &str) -> Self {
        if prefix.is_empty() {
            return self.clone();
        }
        Self::from([prefix, self.as_str()].concat())
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

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        Self(Text::Shared(text.into()))
    }
}

impl From<String> for Key {
    fn from(text: String) -> Self {
        Self(Text::Shared(text.into()))
    }
}

impl From<&String> for Key {
    fn from(text: &String) -> Self {
        Self::from(text.as_str())
    }
}

impl From<Cow<'static, str>> for Key {
    fn from(text: Cow<'static, str>) -> Self {
        match text {
            Cow::Borrowed(text) => Self::from_static(text),
            Cow::Owned(text) => Self::from(text),
        }
    }
}

impl From<Arc<str>> for Key {
    fn from(text: Arc<str>) -> Self {
        Self(Text::Shared(text))
    }
}

impl From<&Self> for Key {
    fn from(key: &Self) -> Self {
        key.clone()
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl Borrow<str> for Key {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({:?})", self.as_str())
    }
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
