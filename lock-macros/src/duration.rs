//! Durations such as `"5s"`, `"1m30s"`, `"250ms"`.

use std::time::Duration;

use crate::diagnostics::{Fault, closest};

/// Milliseconds per unit, in the order in which units are written.
const UNITS: [(&str, u64); 5] =
    [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// A hundred years: a limit that does not overflow any clock.
const LONGEST: u64 = 36_500 * UNITS[0].1;

const LONG_NAMES: [(&str, &[&str]); 5] = [
    ("d", &["day", "days"]),
    ("h", &["hr", "hrs", "hour", "hours"]),
    ("m", &["min", "mins", "minute", "minutes"]),
    ("s", &["sec", "secs", "second", "seconds"]),
    ("ms", &["msec", "msecs", "milli", "millis", "millisecond", "milliseconds"]),
];

const UNITS_ARE: &str = "the units are `ms`, `s`, `m`, `h` and `d`";

const FINER: [&str; 8] = ["us", "µs", "μs", "micros", "microseconds", "ns", "nanos", "nanoseconds"];

pub(crate) fn parse(text: &str) -> Result<Duration, Fault> {
    if text.is_empty() {
        return Err(Fault::new(0..0, "the duration is empty").help("for example `\"5s\"`"));
    }
    let mut total = 0_u64;
    let mut at = 0;
    let mut smallest = None;
    while at < text.len() {
        let digits = at + prefix(&text[at..], |c| c.is_ascii_digit());
        if digits == at {
            return Err(no_number(text, at));
        }
        let end = digits + prefix(&text[digits..], char::is_alphabetic);
        if end == digits {
            return Err(no_unit(text, at, digits));
        }
        let Some(unit) = UNITS.iter().position(|(name, _)| *name == &text[digits..end]) else {
            return Err(unknown_unit(text, at, digits, end));
        };
        if smallest.is_some_and(|smallest| unit <= smallest) {
            return Err(Fault::new(at..end, "larger units come first, and each at most once")
                .help("for example `\"1m30s\"`"));
        }
        smallest = Some(unit);
        let millis = text[at..digits].parse().ok().and_then(|n: u64| n.checked_mul(UNITS[unit].1));
        let Some(sum) = millis.and_then(|millis| total.checked_add(millis)) else {
            return Err(Fault::new(at..end, "the duration is too long"));
        };
        total = sum;
        at = end;
    }
    if total > LONGEST {
        return Err(Fault::new(0..text.len(), "the duration is too long"));
    }
    Ok(Duration::from_millis(total))
}

fn prefix(text: &str, of: impl Fn(char) -> bool) -> usize {
    text.find(|c| !of(c)).unwrap_or(text.len())
}

fn no_number(text: &str, at: usize) -> Fault {
    let rest = &text[at..];
    let first = rest.chars().next().map_or(0, char::len_utf8);
    if rest.starts_with(char::is_whitespace) {
        return Fault::new(at..at + first, "a duration contains no spaces")
            .help(spelled_right(text));
    }
    if rest.starts_with('-') {
        return Fault::new(at..at + first, "a duration cannot be negative");
    }
    if rest.starts_with('.') {
        return Fault::new(at..text.len(), "a duration starts with a whole number")
            .help("write `\"500ms\"` for half a second");
    }
    let word = prefix(rest, char::is_alphabetic);
    Fault::new(at..at + word.max(first), "a duration is a number and a unit")
        .help("for example `\"5s\"`; the units are `ms`, `s`, `m`, `h` and `d`")
}

fn no_unit(text: &str, at: usize, digits: usize) -> Fault {
    let number = &text[at..digits];
    let rest = &text[digits..];
    if rest.starts_with(['.', ',']) {
        return Fault::new(at..text.len(), "a duration contains whole numbers")
            .help("write `\"1s500ms\"` for one and a half seconds");
    }
    if rest.starts_with(char::is_whitespace) {
        return Fault::new(digits..digits + 1, "a duration contains no spaces")
            .help(spelled_right(text));
    }
    if rest.starts_with('_') {
        return Fault::new(digits..digits + 1, "a duration contains no digit separators");
    }
    if let Some(other) = rest.chars().next() {
        return Fault::new(digits..digits + other.len_utf8(), format!("`{number}` needs a unit"))
            .help(UNITS_ARE);
    }
    Fault::new(at..digits, format!("`{number}` needs a unit"))
        .help(format!("`\"{number}s\"` is seconds, `\"{number}ms\"` milliseconds"))
}

fn unknown_unit(text: &str, at: usize, digits: usize, end: usize) -> Fault {
    let number = &text[at..digits];
    let unit = &text[digits..end];
    let fault = Fault::new(digits..end, format!("unknown unit `{unit}`"));
    if FINER.contains(&unit.to_lowercase().as_str()) {
        return fault.help("the finest unit is `ms`; the others are `s`, `m`, `h` and `d`");
    }
    match (corrected(text), meant(unit)) {
        (Some(text), _) => fault.help(format!("did you mean `\"{text}\"`?")),
        (None, Some(unit)) => fault.help(format!("did you mean `\"{number}{unit}\"`?")),
        (None, None) => fault.help(UNITS_ARE),
    }
}

fn spelled_right(text: &str) -> String {
    match corrected(text) {
        Some(text) => format!("write `\"{text}\"`"),
        None => UNITS_ARE.to_owned(),
    }
}

/// `text` without spaces and with short units, if the result is a duration.
fn corrected(text: &str) -> Option<String> {
    let mut short = String::new();
    let dense: String = text.split_whitespace().collect();
    let mut rest = dense.as_str();
    while !rest.is_empty() {
        let digits = prefix(rest, |c| c.is_ascii_digit());
        let end = digits + prefix(&rest[digits..], char::is_alphabetic);
        if digits == 0 || end == digits {
            return None;
        }
        let unit = &rest[digits..end];
        let known = UNITS.iter().find(|(name, _)| *name == unit).map(|(name, _)| *name);
        short.push_str(&rest[..digits]);
        short.push_str(known.or_else(|| meant(unit))?);
        rest = &rest[end..];
    }
    parse(&short).is_ok().then_some(short)
}

/// The unit of a longer or misspelled name.
fn meant(unit: &str) -> Option<&'static str> {
    let lower = unit.to_lowercase();
    LONG_NAMES
        .iter()
        .find(|(name, long)| *name == lower || long.contains(&lower.as_str()))
        .or_else(|| {
            let long =
                closest(&lower, LONG_NAMES.iter().flat_map(|(_, long)| long.iter().copied()));
            LONG_NAMES.iter().find(|(_, names)| long.is_some_and(|long| names.contains(&long)))
        })
        .map(|(name, _)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile_input::hostile;

    fn millis(text: &str) -> Option<u128> {
        parse(text).ok().map(|duration| duration.as_millis())
    }

    fn help(text: &str) -> String {
        parse(text).unwrap_err().help.unwrap_or_default()
    }

    #[test]
    fn numbers_with_units_are_added() {
        assert_eq!(millis("5s"), Some(5_000));
        assert_eq!(millis("250ms"), Some(250));
        assert_eq!(millis("1m30s"), Some(90_000));
        assert_eq!(millis("1d2h3m4s5ms"), Some(93_784_005));
        assert_eq!(millis("0s"), Some(0));
        assert_eq!(millis("007s"), Some(7_000));
    }

    #[test]
    fn anything_else_is_rejected() {
        for text in ["", "5", "s", "5 s", " 5s", "5s ", "-5s", "1.5s", ".5s", "1_000ms", "5x", "5S"]
        {
            assert_eq!(millis(text), None, "{text:?}");
        }
        for text in [
            "30s1m",
            "1s1s",
            "5sm",
            "99999999999999999999s",
            "18446744073709551615d",
            "18446744073709551615ms",
        ] {
            assert_eq!(millis(text), None, "{text:?}");
        }
        assert_eq!(millis("36500d"), Some(3_153_600_000_000));
        assert_eq!(millis("36500d1ms"), None);
        assert_eq!(millis("٥s"), None);
    }

    #[test]
    fn the_intended_unit_is_suggested() {
        assert_eq!(help("5sec"), "did you mean `\"5s\"`?");
        assert_eq!(help("5S"), "did you mean `\"5s\"`?");
        assert_eq!(help("1m30secnds"), "did you mean `\"1m30s\"`?");
        assert_eq!(help("5 minutes"), "write `\"5m\"`");
        assert_eq!(help("5minutes"), "did you mean `\"5m\"`?");
        assert_eq!(help("1 hour 30 mins"), "write `\"1h30m\"`");
        assert!(help("5 fortnights").contains("units are"));
        assert!(help("30 seconds 1 minute").contains("units are"));
        assert_eq!(help("2min"), "did you mean `\"2m\"`?");
        assert!(help("5us").contains("finest"));
        assert!(help("5").contains("\"5s\""));
        assert!(help("5 s").contains("\"5s\""));
        assert!(help("5parsec").contains("units are"));
    }

    #[test]
    fn no_text_causes_a_panic_or_an_invalid_range() {
        for text in hostile(b"0123456789smhd ._-u\xc2\xb5") {
            if let Err(fault) = parse(&text) {
                assert!(text.get(fault.range.clone()).is_some(), "{text:?} {fault:?}");
            }
        }
    }
}
