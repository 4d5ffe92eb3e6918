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

    /// The tag of a stored token. `None` for text of another form, which is of another client.
    #[cfg(feature = "_remote")]
    pub(crate) fn parse(token: &[u8]) -> Option<Self> {
        let token: &[u8; 32] = token.try_into().ok()?;
        let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        token.iter().all(is_digit).then(|| Self::of_token(token))
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

#[cfg(all(test, feature = "_remote"))]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_of_a_whole_token_alone() {
        let token = b"0123456789abcdef0123456789abcdef";
        assert_eq!(OwnerTag::parse(token).unwrap().to_string(), "01234567");
        let shouted = token.to_ascii_uppercase();
        for other in [&token[..31], &shouted, b"", b"another client", &[&token[..], b"0"].concat()]
        {
            assert_eq!(OwnerTag::parse(other), None);
        }
    }
}
