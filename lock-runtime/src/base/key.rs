//! The name of a lock.

use std::borrow::{Borrow, Cow};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// The name of a lock. Cheap to clone; a literal is not copied.
///
/// Text that contains `lock_runtime:` is not a valid key: such names are reserved for data beside the locks. An acquire
/// refuses it with [`ErrorKind::InvalidKey`](crate::ErrorKind::InvalidKey) in every store, as it does an empty key.
///
/// It is made from text, which is taken unchanged:
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

/// An item of an iterator over texts.
impl From<&&str> for Key {
    fn from(text: &&str) -> Self {
        Self::from(*text)
    }
}

impl From<Box<str>> for Key {
    fn from(text: Box<str>) -> Self {
        Self(Text::Shared(text.into()))
    }
}

/// Borrowed text is copied.
impl From<Cow<'_, str>> for Key {
    fn from(text: Cow<'_, str>) -> Self {
        Self(Text::Shared(text.into()))
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
