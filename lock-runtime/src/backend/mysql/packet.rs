//! How much fits into one packet.

/// The smallest packet limit that servers can have.
pub(crate) const SHORTEST_PACKET: usize = 1_024;

/// The most bytes that a key of at most `longest` bytes takes in a list of keys and in one of leases, in hexadecimal digits. It
/// leaves room for a third list.
pub(crate) const fn bytes_in_lists(longest: usize) -> usize {
    // With a short key, the owner takes more room than the key.
    const SHORT: usize = 64;
    8 * if longest < SHORT { SHORT } else { longest }
}

/// [`bytes_in_lists`] for the longest keys.
pub(crate) const BYTES_IN_LISTS: usize = bytes_in_lists(512);

/// The most bytes that a transition of one key takes: its statements name the key up to sixteen times.
pub(crate) const BYTES_OF_TRANSITION: usize = 24 << 10;

/// Splits `requests` so that each part has at most `most` keys, or is a single request. The order is kept.
pub(crate) fn by_count_of_keys<T>(
    requests: Vec<T>,
    keys: impl Fn(&T) -> usize,
    most: usize,
) -> Vec<Vec<T>> {
    let mut parts: Vec<Vec<T>> = Vec::new();
    let mut room = 0;
    for request in requests {
        let count = keys(&request);
        match parts.last_mut().filter(|_| count <= room) {
            Some(part) => part.push(request),
            None => {
                parts.push(vec![request]);
                room = most;
            }
        }
        room = room.saturating_sub(count);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_no_more_keys_than_fit() {
        let split = |counts: &[usize]| by_count_of_keys(counts.to_vec(), |count| *count, 3);
        assert_eq!(split(&[1, 2, 1, 1]), [vec![1, 2], vec![1, 1]]);
        assert_eq!(split(&[9, 1, 3, 3]), [vec![9], vec![1], vec![3], vec![3]]);
        assert_eq!(split(&[]), Vec::<Vec<usize>>::new());
    }
}
