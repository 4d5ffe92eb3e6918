//! A grant as a value that travels with a request.

use std::borrow::Cow;
use std::error::Error;
use std::fmt::{self, Write};
use std::str::FromStr;
use std::sync::Arc;

use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::key_rules::{MOST_KEYS, push_hex};
use crate::base::owner::Owner;

/// A grant as one value: keys, fence, and the owner token by which the store knows it (Chubby's sequencer).
///
/// The holder sends it with a request, and the receiver asks the store with [`LockPool::check`](crate::LockPool::check)
/// whether the grant still stands. [`LockGuard::sequencer`](crate::LockGuard::sequencer) creates it. Its text fits into an
/// HTTP header, and with the feature `serde` it is serialized as that text.
///
/// The text contains the owner token, with which the lock can be released. It is for services that may use the store
/// themselves, not for browsers or logs; `Debug` shows a few digits of the token.
///
/// ```
/// use lock_runtime::{LockPool, Sequencer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = LockPool::connect("memory://").await?;
/// let guard = pool.lock("order:42").acquire().await?;
/// let header = guard.sequencer()?.to_string();
///
/// // In another service, with a pool on the same store:
/// let sequencer: Sequencer = header.parse()?;
/// pool.check(&sequencer).await?;
/// assert_eq!(sequencer.key().as_str(), "order:42");
///
/// guard.release().await?;
/// assert!(pool.check(&sequencer).await.unwrap_err().is_lost());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sequencer {
    /// Sorted and distinct. At least one.
    keys: Arc<[Key]>,
    fence: Fence,
    owner: Owner,
}

impl Sequencer {
    pub(crate) fn new(keys: Arc<[Key]>, fence: Fence, owner: Owner) -> Self {
        Self { keys, fence, owner }
    }

    /// The key, without a pool's prefix; the first one if the grant is for several.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.keys[0]
    }

    /// All keys, sorted.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// The fencing token of the grant, as sent by the holder. The store is asked about the owner token instead.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.fence
    }

    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    pub(crate) fn shared_keys(&self) -> &Arc<[Key]> {
        &self.keys
    }
}

/// The version of the text.
const VERSION: &str = "v1";

/// `v1;<fence>;<owner token>;<key>`, followed by further keys. Bytes of a key other than letters, digits and a few signs
/// are escaped as in a URL.
impl fmt::Display for Sequencer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = std::str::from_utf8(self.owner.as_bytes()).map_err(|_| fmt::Error)?;
        write!(f, "{VERSION};{};{owner}", self.fence)?;
        let mut escaped = String::new();
        for key in self.keys.iter() {
            escaped.clear();
            for byte in key.as_str().bytes() {
                if is_plain(byte) {
                    escaped.push(char::from(byte));
                } else {
                    escaped.push('%');
                    push_hex(&mut escaped, byte);
                }
            }
            f.write_char(';')?;
            f.write_str(&escaped)?;
        }
        Ok(())
    }
}

impl FromStr for Sequencer {
    type Err = InvalidSequencer;

    fn from_str(text: &str) -> Result<Self, InvalidSequencer> {
        let mut parts = text.split(';');
        let version = parts.next().unwrap_or_default();
        if version != VERSION {
            let is_version = version.len() <= 4
                && version.starts_with('v')
                && version[1..].bytes().all(|byte| byte.is_ascii_digit());
            return Err(if is_version {
                let cause = format!("version `{version}` of a sequencer is not known here");
                InvalidSequencer(format!("{cause}; update lock-runtime at the receiver").into())
            } else {
                wrong("the text is not a sequencer")
            });
        }
        let fence = parts.next().and_then(|number| number.parse::<u64>().ok());
        let fence = fence
            .and_then(|number| Fence::try_from(number).ok())
            .ok_or_else(|| wrong("the fence of the sequencer is not a number up to 2^63 - 1"))?;
        let owner = parts.next().and_then(Owner::parse).ok_or_else(|| {
            wrong("the owner token of the sequencer is not 32 hexadecimal digits")
        })?;
        let mut keys = Vec::new();
        for part in parts {
            let key = unescaped(part).filter(|key| !key.is_empty());
            let key = key.and_then(|key| Key::from(key).checked().ok());
            keys.push(key.ok_or_else(|| wrong("a key of the sequencer is empty or not escaped"))?);
            if keys.len() > MOST_KEYS {
                return Err(wrong("the sequencer has more than 128 keys"));
            }
        }
        if keys.is_empty() {
            return Err(wrong("the sequencer has no key: its text was cut off"));
        }
        keys.sort_unstable();
        keys.dedup();
        Ok(Self::new(keys.into(), fence, owner))
    }
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~:/{}".contains(&byte)
}

fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(Some(byte).filter(|byte| is_plain(*byte))?);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        bytes.push(u8::try_from(16 * digit()? + digit()?).ok()?);
    }
    String::from_utf8(bytes).ok()
}

/// A text that is not a [`Sequencer`]. The error does not show it, because it may contain an owner token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidSequencer(Cow<'static, str>);

#[cold]
fn wrong(cause: &'static str) -> InvalidSequencer {
    InvalidSequencer(
        format!(
            "{cause}; send the text of `guard.sequencer()?.to_string()`: `v1;<fence>;<owner token>;<key>`"
        )
        .into(),
    )
}

impl fmt::Display for InvalidSequencer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for InvalidSequencer {}

#[cfg(feature = "serde")]
impl serde::Serialize for Sequencer {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Sequencer {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SequencerVisitor;
        impl serde::de::Visitor<'_> for SequencerVisitor {
            type Value = Sequencer;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the text of a sequencer")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Sequencer, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(SequencerVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequencer(keys: &[&str]) -> Sequencer {
        let keys: Vec<_> = keys.iter().copied().map(Key::from).collect();
        let owner = Owner::parse("0123456789abcdef0123456789abcdef").unwrap();
        Sequencer::new(keys.into(), Fence::new(34), owner)
    }

    #[test]
    fn the_text_is_one_word_of_visible_characters() {
        for keys in [
            &["order:42"][..],
            &["a;b", "a%3Bb", "ünï→☃", "x y", "\r\n"][..],
            &["%~", "{tag}:1", "\"", "\0"][..],
        ] {
            let mut keys = keys.to_vec();
            keys.sort_unstable();
            let sequencer = sequencer(&keys);
            let text = sequencer.to_string();
            assert!(text.bytes().all(|byte| byte.is_ascii_graphic()), "{text}");
            assert_eq!(text.parse(), Ok(sequencer), "{text}");
        }
        let text = "v1;34;0123456789abcdef0123456789abcdef;order:42";
        assert_eq!(sequencer(&["order:42"]).to_string(), text);
    }

    #[test]
    fn a_wrong_text_is_refused_and_not_shown() {
        let owner = "0123456789abcdef0123456789abcdef";
        for (text, expected) in [
            ("", "not a sequencer"),
            ("order:42", "not a sequencer"),
            ("v2;1;x;y", "update lock-runtime"),
            ("v1", "the fence"),
            ("v1;-1;x;y", "the fence"),
            ("v1;9223372036854775808;x;y", "the fence"),
            ("v1;1;secret;y", "the owner token"),
            (&format!("v1;1;{}x;y", &owner[..31]), "the owner token"),
            (&format!("v1;1;{owner}"), "no key"),
            (&format!("v1;1;{owner};"), "a key"),
            (&format!("v1;1;{owner};a b"), "a key"),
            (&format!("v1;1;{owner};a%3"), "a key"),
            (&format!("v1;1;{owner};%ff"), "a key"),
            (&format!("v1;1;{owner}{}", ";a".repeat(129)), "128 keys"),
        ] {
            let error = text.parse::<Sequencer>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
            assert!(!error.contains("secret") && !error.contains(owner), "{error}");
            let says_how = error.contains("guard.sequencer()") || error.contains("update");
            assert!(says_how, "{error}");
        }
    }

    #[test]
    fn debug_hides_most_of_the_owner_token() {
        let shown = format!("{:?}", sequencer(&["order:42"]));
        assert!(shown.contains("order:42") && shown.contains("34"), "{shown}");
        assert!(!shown.contains("0123456789"), "{shown}");
    }

    #[test]
    fn up_to_128_keys_are_read_and_sorted() {
        let owner = "0123456789abcdef0123456789abcdef";
        let read =
            |keys: &[String]| format!("v1;1;{owner};{}", keys.join(";")).parse::<Sequencer>();
        let mut keys: Vec<_> = (100..228).map(|n| format!("key:{n}")).collect();
        keys.reverse();
        let sequencer = read(&keys).unwrap();
        keys.reverse();
        assert!(sequencer.keys().iter().map(Key::as_str).eq(&keys));
        assert_eq!(sequencer.key().as_str(), "key:100");
        keys.push("key:228".to_owned());
        assert!(read(&keys).is_err());
    }

    #[cfg(feature = "serde")]
    #[test]
    fn it_is_serialized_as_its_text() {
        use serde::de::value::Error;
        use serde::de::{Deserialize, IntoDeserializer};

        struct Serialized(Sequencer);

        impl fmt::Display for Serialized {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                serde::Serialize::serialize(&self.0, f)
            }
        }

        let text = sequencer(&["order:42"]).to_string();
        assert_eq!(Serialized(sequencer(&["order:42"])).to_string(), text);
        let read = Sequencer::deserialize(IntoDeserializer::<Error>::into_deserializer(&*text));
        assert_eq!(read, Ok(sequencer(&["order:42"])));
        let wrong =
            Sequencer::deserialize(IntoDeserializer::<Error>::into_deserializer("order:42"));
        assert!(wrong.unwrap_err().to_string().contains("not a sequencer"));
        let number = Sequencer::deserialize(IntoDeserializer::<Error>::into_deserializer(42_u64));
        assert!(number.unwrap_err().to_string().contains("expected the text of a sequencer"));
    }
}
