//! Patterns of keys, and lists of the keys that match.

use crate::base::key::Key;

/// A pattern for the keys of one pool: `*` stands for any characters, `?` for one, and everything else for itself.
///
/// ```
/// use lock_runtime::backend::KeyPattern;
///
/// let pattern = KeyPattern::new("app:", "order:*");
/// assert_eq!(pattern.key_of("app:order:42"), Some("order:42"));
/// assert_eq!(pattern.key_of("order:42"), None);
/// assert_eq!(pattern.start(), "app:order:");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPattern {
    prefix: String,
    pattern: String,
}

/// Keys of locks that are held, or waited for, as a store lists them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyList {
    /// The keys, sorted.
    pub keys: Vec<Key>,
    /// Whether these are all. `false` if there are more than requested, or if the store has too much else to look through.
    pub is_complete: bool,
}

impl KeyPattern {
    /// The keys that `pattern` matches after `prefix`, the prefix of a pool.
    #[must_use]
    pub fn new(prefix: impl Into<String>, pattern: impl Into<String>) -> Self {
        Self { prefix: prefix.into(), pattern: pattern.into() }
    }

    /// The key without the prefix, if the stored key matches.
    #[must_use]
    pub fn key_of<'a>(&self, stored: &'a str) -> Option<&'a str> {
        stored.strip_prefix(&*self.prefix).filter(|key| is_match(&self.pattern, key))
    }

    /// What all matching keys start with in the store.
    #[must_use]
    pub fn start(&self) -> String {
        let literal = self.pattern.split(['*', '?']).next().unwrap_or_default();
        format!("{}{literal}", self.prefix)
    }

    /// As a glob of Redis that matches at least the same keys. Redis has more special characters, and its `?` stands for one
    /// byte.
    #[cfg(feature = "redis")]
    pub(crate) fn as_glob(&self) -> String {
        let mut glob = String::with_capacity(self.prefix.len() + self.pattern.len());
        let pattern = self.pattern.replace('?', "*");
        let texts = [
            (&self.prefix, &['*', '?', '[', ']', '^', '\\'][..]),
            (&pattern, &['[', ']', '^', '\\']),
        ];
        for (text, special) in texts {
            for character in text.chars() {
                if special.contains(&character) {
                    glob.push('\\');
                }
                glob.push(character);
            }
        }
        glob
    }
}

impl KeyList {
    /// A list of at most `limit` keys, as the store has them.
    #[must_use]
    pub fn new(mut keys: Vec<Key>, is_complete: bool, limit: usize) -> Self {
        keys.sort();
        keys.dedup();
        let is_complete = is_complete && keys.len() <= limit;
        keys.truncate(limit);
        Self { keys, is_complete }
    }
}

/// Whether all of `text` matches. Time is bounded by the product of the lengths.
fn is_match(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), text.chars().collect());
    let (mut at, mut from) = (0, 0);
    // The position after the last star, and where its match ends so far.
    let mut star = None;
    while from < text.len() {
        match pattern.get(at) {
            Some('*') => {
                at += 1;
                star = Some((at, from));
            }
            Some(expected) if *expected == '?' || *expected == text[from] => {
                at += 1;
                from += 1;
            }
            _ => match star {
                Some((behind, end)) => {
                    at = behind;
                    from = end + 1;
                    star = Some((behind, from));
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|rest| *rest == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_and_question_marks_match() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("*", "order:1", true),
            ("order:*", "order:1", true),
            ("order:*", "orders:1", false),
            ("*:1", "a:1:1", true),
            ("*:1", "a:1:2", false),
            ("a*b*c", "a-b-b-c", true),
            ("a?c", "aäc", true),
            ("a?c", "ac", false),
            ("", "", true),
            ("", "a", false),
            ("a[b]", "a[b]", true),
            ("a[b]", "ab", false),
        ] {
            assert_eq!(is_match(pattern, text), expected, "{pattern} {text}");
        }
        let long = "a".repeat(5_000);
        assert!(!is_match(&format!("{}b", "a*".repeat(20)), &long));
    }

    #[test]
    fn a_list_says_whether_it_has_all() {
        let keys = || ["b", "a", "b"].map(Key::from).to_vec();
        let list = KeyList::new(keys(), true, 2);
        assert_eq!(list.keys, ["a", "b"].map(Key::from));
        assert!(list.is_complete && !KeyList::new(keys(), false, 2).is_complete);
        let short = KeyList::new(keys(), true, 1);
        assert!(short.keys.len() == 1 && !short.is_complete);
    }

    #[cfg(feature = "redis")]
    #[test]
    fn a_glob_has_the_characters_of_the_prefix() {
        let pattern = KeyPattern::new("a*[1]:", "b[*]?");
        assert_eq!(pattern.as_glob(), "a\\*\\[1\\]:b\\[*\\]*");
        assert_eq!(pattern.start(), "a*[1]:b[");
    }
}
