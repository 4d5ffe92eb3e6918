//! Names of keys: `<root>/<escaped lock>/<owner>`, as `etcdctl lock` and Go's `concurrency.Mutex` have them.

use crate::backend::Owner;
use crate::backend::etcd::protocol::transaction::{KeyCondition, KeySearch, SearchOrder};
use crate::base::key::Key;

/// What the names of all keys begin with.
#[derive(Clone, Debug)]
pub(crate) struct KeyNames {
    /// Empty, or with a trailing slash.
    root: String,
}

impl KeyNames {
    pub(crate) fn new(root: &str) -> Self {
        Self { root: if root.is_empty() { String::new() } else { format!("{root}/") } }
    }

    /// What the keys of all owners of `lock` begin with.
    pub(crate) fn queue(&self, lock: &Key) -> String {
        format!("{}{}/", self.root, escaped(lock))
    }

    pub(crate) fn of_owner(&self, lock: &Key, owner: &Owner) -> Vec<u8> {
        let mut name = self.queue(lock).into_bytes();
        name.extend_from_slice(owner.as_bytes());
        name
    }

    /// The key that says which connection may use a lease. No name of a lock begins like this.
    pub(crate) fn of_lease(&self, lease: i64) -> Vec<u8> {
        format!("{}%lease/{lease:016x}", self.root).into_bytes()
    }

    /// The last change of this key is the fence that queued owners have to exceed.
    pub(crate) fn of_fence(&self, lock: &Key) -> Vec<u8> {
        format!("{}%fence/{}", self.root, escaped(lock)).into_bytes()
    }

    /// From the first key of `lock` to just past the last one.
    pub(crate) fn range(&self, lock: &Key) -> (Vec<u8>, Vec<u8>) {
        let from = self.queue(lock).into_bytes();
        let mut to = from.clone();
        if let Some(last) = to.last_mut() {
            // A slash is not the last character.
            *last += 1;
        }
        (from, to)
    }

    /// From the first key of a lock that starts with `text` to just past the last one.
    pub(crate) fn starting_with(&self, text: &str) -> (Vec<u8>, Vec<u8>) {
        let from = format!("{}{}", self.root, escaped(&Key::from(text))).into_bytes();
        let mut to = from.clone();
        // No text in UTF-8 has this byte.
        to.push(0xff);
        if from.is_empty() { (vec![0], vec![0]) } else { (from, to) }
    }

    /// The lock of an owner's key. `None` for any other key.
    pub(crate) fn lock_of(&self, key: &[u8]) -> Option<Key> {
        let key = std::str::from_utf8(key).ok()?.strip_prefix(&*self.root)?;
        let (lock, owner) = key.rsplit_once('/')?;
        let is_lock = !owner.is_empty() && !lock.contains('/');
        // Names beside the locks begin with another escape.
        is_lock.then(|| unescaped(lock)).flatten().map(Key::from)
    }

    /// The owner in the name of its key, if it is one of this library.
    pub(crate) fn owner_in(key: &[u8]) -> Option<Owner> {
        let (_, owner) = std::str::from_utf8(key).ok()?.rsplit_once('/')?;
        Owner::parse(owner)
    }

    /// The start of a search after the key and the others of its lock.
    pub(crate) fn behind(key: &[u8]) -> Vec<u8> {
        let Some(end) = key.iter().rposition(|byte| *byte == b'/') else {
            // Not a key of a lock.
            return [key, &b"\0"[..]].concat();
        };
        let mut next = key[..end].to_vec();
        // The character after a slash.
        next.push(b'/' + 1);
        next
    }

    /// No owner has a key for `lock`.
    pub(crate) fn is_free(&self, lock: &Key) -> KeyCondition {
        let (from, to) = self.range(lock);
        KeyCondition::NoneIn { from, to }
    }

    /// No other owner than `owner` has a key for `lock`.
    pub(crate) fn has_no_other(&self, lock: &Key, owner: &Owner) -> [KeyCondition; 2] {
        let ((from, to), own) = (self.range(lock), self.of_owner(lock, owner));
        let after = [&own[..], b"\0"].concat();
        [KeyCondition::NoneIn { from, to: own }, KeyCondition::NoneIn { from: after, to }]
    }

    /// The first or the last `limit` keys of `lock`.
    pub(crate) fn search(&self, lock: &Key, order: SearchOrder, limit: i64) -> KeySearch {
        let (from, to) = self.range(lock);
        KeySearch { from, to, order, limit, created_from: 0, created_to: 0 }
    }
}

/// A slash in the name of a lock would put its owners into the queue of another lock.
fn escaped(lock: &Key) -> String {
    let mut name = String::with_capacity(lock.as_str().len());
    for character in lock.as_str().chars() {
        match character {
            '/' => name.push_str("%2F"),
            '%' => name.push_str("%25"),
            other => name.push(other),
        }
    }
    name
}

/// The reverse. `None` for a text that no name has.
fn unescaped(name: &str) -> Option<String> {
    let mut parts = name.split('%');
    let mut lock = parts.next()?.to_owned();
    for part in parts {
        let (character, rest) = match part.strip_prefix("2F") {
            Some(rest) => ('/', rest),
            None => ('%', part.strip_prefix("25")?),
        };
        lock.push(character);
        lock.push_str(rest);
    }
    Some(lock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owners_of_one_lock_are_not_among_those_of_another() {
        let names = KeyNames::new("/locks");
        let queue = |lock: &str| names.queue(&Key::from(lock));
        assert_eq!(queue("a"), "/locks/a/");
        assert_eq!(queue("a/b"), "/locks/a%2Fb/");
        assert_eq!(queue("a%2Fb"), "/locks/a%252Fb/");
        assert_eq!(KeyNames::new("").queue(&Key::from("a")), "a/");
        let (from, to) = names.range(&Key::from("a"));
        assert_eq!((from.as_slice(), to.as_slice()), (&b"/locks/a/"[..], &b"/locks/a0"[..]));
        for lock in ["a", "a/b", "a%2Fb", "%lease/x"] {
            let (lock, owner) = (Key::from(lock), Owner::from_text([b'7'; 32]));
            let key = names.of_owner(&lock, &owner);
            assert_eq!(names.lock_of(&key), Some(lock.clone()));
            let (from, to) = names.starting_with(lock.as_str());
            assert!(from < key && key < to && key < KeyNames::behind(&key));
        }
        assert_eq!(names.lock_of(&names.of_lease(0x2a)), None);
        assert_eq!(names.lock_of(&names.of_fence(&Key::from("a"))), None);
        assert_eq!(names.of_lease(0x2a), b"/locks/%lease/000000000000002a");
    }
}
