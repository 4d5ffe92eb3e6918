//! The part of an owner token that may be shown.

use std::fmt;

/// The first eight of the 32 digits of an owner token: enough to tell owners apart, too few to release their locks.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct OwnerTag([u8; 8]);

impl OwnerTag {
    /// The tag of a token.
    pub(crate) const fn of_token(token: &[u8; 32]) -> Self {
        let [a, b, c, d, e, f, g, h, ..] = *token;
        Self([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Display for OwnerTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

impl fmt::Debug for OwnerTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnerTag({self}..)")
    }
}

/// The eight digits as text.
#[cfg(feature = "serde")]
impl serde::Serialize for OwnerTag {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
