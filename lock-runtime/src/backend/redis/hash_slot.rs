//! Hash slots of a Redis Cluster: the slot of a key, and hash tags that place a key in a given slot.

use once_cell::sync::Lazy;

use crate::base::key::Key;

/// The number of slots of a cluster.
pub(crate) const SLOTS: u16 = 16_384;

/// The slot of `key`: the hash of the part in its first braces, or of the whole key if there is none.
pub(crate) fn slot_of(key: &str) -> u16 {
    crc16(tagged(key).unwrap_or(key).as_bytes()) % SLOTS
}

/// The slot of all of `keys`.
///
/// # Errors
///
/// The first key, and the first key in another slot, if there is one.
pub(crate) fn common_slot(keys: &[Key]) -> Result<u16, (&str, &str)> {
    let Some((first, others)) = keys.split_first() else { return Ok(0) };
    let first = first.as_str();
    let shared = slot_of(first);
    match others.iter().find(|other| slot_of(other.as_str()) != shared) {
        Some(other) => Err((first, other.as_str())),
        None => Ok(shared),
    }
}

/// The hash tag of `slot`: the least number that, in braces in front of a key, places the key in the slot. All
/// processes must compute the same tag.
pub(crate) fn tag(slot: u16) -> u32 {
    static TAGS: Lazy<Vec<u32>> = Lazy::new(|| {
        let mut tags = vec![u32::MAX; usize::from(SLOTS)];
        let mut missing = tags.len();
        let mut number = 0;
        while missing > 0 {
            let tag = &mut tags[usize::from(crc16(number.to_string().as_bytes()) % SLOTS)];
            if *tag == u32::MAX {
                *tag = number;
                missing -= 1;
            }
            number += 1;
        }
        tags
    });
    TAGS[usize::from(slot % SLOTS)]
}

fn tagged(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    static TABLE: Lazy<[u16; 256]> = Lazy::new(|| {
        let step = |crc: u16| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        std::array::from_fn(|byte| (0..8).fold((byte as u16) << 8, |crc, _| step(crc)))
    });
    bytes.iter().fold(0, |crc, byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_in_the_slot_that_servers_compute() {
        // From `CLUSTER KEYSLOT` of Redis 7.0.
        for (key, expected) in [
            ("123456789", 12_739),
            ("foo", 12_182),
            ("bar", 5_061),
            ("{user1000}.following", 3_443),
            ("foo{}{bar}", 8_363),
            ("foo{{bar}}zap", 4_015),
            ("foo{bar}{zap}", 5_061),
            ("", 0),
        ] {
            assert_eq!(slot_of(key), expected, "{key}");
        }
    }

    #[test]
    fn a_tag_in_front_places_any_key_in_its_slot() {
        for wanted in 0..SLOTS {
            let tag = tag(wanted);
            assert_eq!(slot_of(&format!("{{{tag}}}order:{{7}}")), wanted);
        }
    }

    #[test]
    fn keys_in_different_slots_are_named() {
        let keys = ["a{7}", "b{7}", "c"].map(Key::from);
        assert_eq!(common_slot(&keys[..2]), Ok(slot_of("7")));
        assert_eq!(common_slot(&keys), Err(("a{7}", "c")));
    }
}
