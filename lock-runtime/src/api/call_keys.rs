//! The keys of one call.

use std::sync::Arc;

use crate::base::error::{ErrorKind, LockError};
use crate::base::key::Key;
use crate::base::key_rules::MOST_KEYS;

/// The keys of one call, as the program names them. Most calls have one, which takes no allocation of its own.
#[derive(Debug)]
pub(crate) enum CallKeys {
    One(Key),
    Several(Vec<Key>),
}

impl CallKeys {
    pub(crate) fn first(&self) -> Option<&Key> {
        match self {
            Self::One(key) => Some(key),
            Self::Several(keys) => keys.first(),
        }
    }

    /// Checks each key on its own.
    ///
    /// # Errors
    /// [`InvalidKey`](ErrorKind::InvalidKey) for one that is empty.
    pub(crate) fn checked(self) -> Result<Self, LockError> {
        Ok(match self {
            Self::One(key) => Self::One(key.checked()?),
            Self::Several(keys) => {
                Self::Several(keys.into_iter().map(Key::checked).collect::<Result<_, _>>()?)
            }
        })
    }

    /// The keys, short enough for a pool with `prefix`. They are distinct and in one order for all callers, so that two of them
    /// cannot wait for each other.
    pub(super) fn sorted(self, prefix: &str) -> Result<Arc<[Key]>, LockError> {
        let keys = match self {
            Self::One(key) => return Ok([key.shortened_for(prefix)].into()),
            Self::Several(keys) => keys,
        };
        let mut keys: Vec<_> = keys.into_iter().map(|key| key.shortened_for(prefix)).collect();
        keys.sort();
        keys.dedup();
        if keys.is_empty() {
            return Err(LockError::new(ErrorKind::InvalidKey, "the list of lock keys is empty")
                .remedy("name at least one key, or skip the call when there is nothing to lock"));
        }
        if keys.len() > MOST_KEYS {
            return Err(too_many(keys.len()));
        }
        Ok(keys.into())
    }
}

impl FromIterator<Key> for CallKeys {
    fn from_iter<I: IntoIterator<Item = Key>>(keys: I) -> Self {
        // An iterator of results goes on after its first error.
        let mut keys = keys.into_iter().fuse();
        match (keys.next(), keys.next()) {
            (Some(key), None) => Self::One(key),
            (first, second) => Self::Several(first.into_iter().chain(second).chain(keys).collect()),
        }
    }
}

#[cold]
fn too_many(count: usize) -> LockError {
    let message = format!(
        "{count} keys in one request; at most {MOST_KEYS} are allowed, because the store serves no other client meanwhile"
    );
    LockError::new(ErrorKind::Config, message).remedy(
        "lock one key for all of them, or acquire them with several requests, in the same order everywhere",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_key_is_the_same_as_a_list_of_one() {
        let collected: CallKeys = [Key::from("a")].into_iter().collect();
        assert!(matches!(&collected, CallKeys::One(key) if key.as_str() == "a"));
        let listed = CallKeys::Several(vec![Key::from("a"), Key::from("a")]);
        assert_eq!(collected.sorted("p:").unwrap(), listed.sorted("p:").unwrap());
        let none: CallKeys = [].into_iter().collect();
        assert_eq!(none.sorted("").unwrap_err().kind(), ErrorKind::InvalidKey);
        let three: CallKeys = ["c", "a", "b", "a"].map(Key::from).into_iter().collect();
        assert_eq!(three.first(), Some(&Key::from("c")));
        assert_eq!(&*three.sorted("").unwrap(), ["a", "b", "c"].map(Key::from));
    }

    #[test]
    fn the_first_key_that_is_invalid_is_the_error() {
        let keys = ["a", "b", "c"];
        let refused = |key| Err::<Key, _>(LockError::new(ErrorKind::InvalidKey, key));
        let error = keys.into_iter().map(refused).collect::<Result<CallKeys, _>>().unwrap_err();
        assert_eq!(error.cause(), "a");
    }
}
