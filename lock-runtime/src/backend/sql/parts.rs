//! Requests that one statement may serve.

use std::collections::HashMap;
use std::sync::Arc;

use crate::base::key::Key;

/// Splits `requests` so that no two requests of a part share a key, and no part has more than `most`. For each key the order is
/// kept.
pub(crate) fn by_distinct_keys<T>(
    requests: Vec<T>,
    most: usize,
    keys: impl Fn(&T) -> &Arc<[Key]>,
) -> Vec<Vec<T>> {
    let mut parts: Vec<Vec<T>> = Vec::new();
    // The first part that comes after all requests for a key.
    let mut next: HashMap<Key, usize> = HashMap::new();
    for request in requests {
        let wanted = keys(&request).clone();
        let mut at = wanted.iter().filter_map(|key| next.get(key)).max().copied().unwrap_or(0);
        while parts.get(at).is_some_and(|part| part.len() >= most) {
            at += 1;
        }
        if at == parts.len() {
            parts.push(Vec::new());
        }
        parts[at].push(request);
        next.extend(wanted.iter().map(|key| (key.clone(), at + 1)));
    }
    parts
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
        for (most, expected) in [
            (4, vec![vec![1, 2, 4], vec![3], vec![5]]),
            (2, vec![vec![1, 2], vec![3, 4], vec![5]]),
            (1, vec![vec![1], vec![2], vec![3], vec![4], vec![5]]),
        ] {
            let parts = by_distinct_keys(requests.clone(), most, |(_, keys)| keys);
            let numbers: Vec<Vec<u32>> =
                parts.iter().map(|part| part.iter().map(|(number, _)| *number).collect()).collect();
            assert_eq!(numbers, expected, "{most}");
        }
    }
}
