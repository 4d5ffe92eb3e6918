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

/// `span` in whole milliseconds, as serialized values have it.
#[cfg(feature = "serde")]
pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
