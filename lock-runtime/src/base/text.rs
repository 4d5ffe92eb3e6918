//! Values in texts of settings.

use std::time::Duration;

/// A whole number of `ms`, `s`, `m` or `h`.
pub(crate) fn duration(text: &str) -> Option<Duration> {
    let unit = text.find(|character: char| !character.is_ascii_digit())?;
    let (number, unit) = text.split_at(unit);
    let number: u64 = number.parse().ok()?;
    let seconds = |each: u64| number.checked_mul(each).map(Duration::from_secs);
    match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" => seconds(1),
        "m" => seconds(60),
        "h" => seconds(60 * 60),
        _ => None,
    }
}

/// `span`, a time limit or what is left of one, rounded up to the millisecond. So a text has no more digits than it needs.
pub(crate) fn rounded(span: Duration) -> Duration {
    const MILLISECOND: u32 = 1_000_000;
    let nanos = span.subsec_nanos().next_multiple_of(MILLISECOND);
    Duration::from_secs(span.as_secs()).saturating_add(Duration::from_nanos(nanos.into()))
}

/// `span` in whole milliseconds, as events and serialized values have it.
pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_limit_is_rounded_to_the_millisecond_above() {
        for (nanos, text) in [
            (0, "0ns"),
            (1, "1ms"),
            (4_999_999_412, "5s"),
            (250_000_000, "250ms"),
            (250_000_001, "251ms"),
        ] {
            assert_eq!(format!("{:?}", rounded(Duration::from_nanos(nanos))), text);
        }
    }
}
