//! Requests that one statement may serve.

use std::collections::HashSet;
use std::sync::Arc;

use crate::base::key::Key;

/// Splits `requests` so that no two requests of a part share a key. For each key the order is kept.
pub(crate) fn by_distinct_keys<T>(
    requests: Vec<T>,
    keys: impl Fn(&T) -> &Arc<[Key]>,
) -> Vec<Vec<T>> {
    let mut parts: Vec<(HashSet<Key>, Vec<T>)> = Vec::new();
    for request in requests {
        let wanted = keys(&request).clone();
        let behind =
            parts.iter().rposition(|(taken, _)| wanted.iter().any(|key| taken.contains(key)));
        let at = behind.map_or(0, |last| last + 1);
        if at == parts.len() {
            parts.push((HashSet::new(), Vec::new()));
        }
        parts[at].0.extend(wanted.iter().cloned());
        parts[at].1.push(request);
    }
    parts.into_iter().map(|(_, requests)| requests).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_for_one_key_go_in_different_statements_and_in_order() {
        let request = |number: u32, keys: &[&str]| -> (u32, Arc<[Key]>) {
            (number, keys.iter().copied().map(Key::from).collect())
        };
        let requests = vec![
            request(1, &["a"]),
            request(2, &["b"]),
            request(3, &["a", "b"]),
            request(4, &["c"]),
            request(5, &["a"]),
        ];
        let parts = by_distinct_keys(requests, |(_, keys)| keys);
        let numbers: Vec<Vec<u32>> =
            parts.iter().map(|part| part.iter().map(|(number, _)| *number).collect()).collect();
        assert_eq!(numbers, [vec![1, 2, 4], vec![3], vec![5]]);
    }
}
