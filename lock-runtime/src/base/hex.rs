//! Text of hexadecimal digits.

/// The bytes that `digits` stand for. `None` for other text.
pub(crate) fn bytes(digits: &[u8]) -> Option<Vec<u8>> {
    let digit = |digit: u8| char::from(digit).to_digit(16).and_then(|it| u8::try_from(it).ok());
    let pairs = digits.chunks(2).map(|pair| match *pair {
        [high, low] => Some(digit(high)? << 4 | digit(low)?),
        _ => None,
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn pairs_of_digits_are_bytes() {
        assert_eq!(super::bytes(b"00ff2A"), Some(vec![0, 255, 42]));
        assert_eq!(super::bytes(b""), Some(Vec::new()));
        for other in ["0", "00f", "0g", "+1"] {
            assert_eq!(super::bytes(other.as_bytes()), None, "{other}");
        }
    }
}
