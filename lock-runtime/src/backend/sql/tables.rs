//! Names of tables, and times that both databases keep.

use std::time::Duration;

use crate::backend::AcquireRequest;

/// How long rows of free locks stay, unless the URL says otherwise. A row in place makes the next grant cheaper, and its
/// fence exceeds the former one whatever the server's clock did.
pub(crate) const FORGET_AFTER: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Whether a store keeps the fence of each grant in a table of its own, for pins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pins {
    #[default]
    Off,
    On,
}

impl Pins {
    /// How many fences to reserve after that of the grant. None with pins: the fence of the holder is that of the row.
    pub(crate) fn further_fences(self, request: &AcquireRequest) -> u32 {
        if request.fencing && self == Self::Off { request.extra_fences } else { 0 }
    }
}

/// Whether statements name the column `info` of the leases, for a text about the owner. Tables of an older version lack it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InfoColumn {
    Named,
    LeftOut,
}

/// What makes the statements of a store from the files in `sql/`: the names of its tables, and what they have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableNames<'a> {
    /// What the names start with, with a schema in front if there is one.
    pub(crate) prefix: &'a str,
    pub(crate) quote: char,
    pub(crate) pins: Pins,
    pub(crate) info: InfoColumn,
}

impl TableNames<'_> {
    /// The same names, for leases without the column `info`.
    pub(crate) fn without_info(self) -> Self {
        Self { info: InfoColumn::LeftOut, ..self }
    }

    /// `text` with the names of the tables, each part in quotes, so that it may be a keyword of SQL. Comments are left out. Text
    /// between `/*pin` and `pin*/` is there only with pins, and text between `/*info` and `info*/` only with that column.
    pub(crate) fn apply(self, text: &str) -> String {
        let lines = text.lines().filter(|line| !line.trim_start().starts_with("--"));
        let text = lines.collect::<Vec<_>>().join("\n");
        let text = optional(&text, ("/*pin", "pin*/"), self.pins == Pins::On);
        let text = optional(&text, ("/*info", "info*/"), self.info == InfoColumn::Named);
        // One pass: the name of one table may contain that of another.
        let mut named = String::with_capacity(text.len());
        let mut rest = &*text;
        while let Some(at) = rest.find("lock_") {
            let (before, behind) = rest.split_at(at);
            named.push_str(before);
            let table = ["_lease", "_queue", "_fence"]
                .into_iter()
                .find(|suffix| behind["lock".len()..].starts_with(suffix));
            let taken = match table {
                Some(suffix) => {
                    named.push_str(&self.quoted(suffix));
                    "lock".len() + suffix.len()
                }
                None => {
                    named.push_str("lock_");
                    "lock_".len()
                }
            };
            rest = &behind[taken..];
        }
        named.push_str(rest);
        named
    }

    /// The name of the table with this end.
    pub(crate) fn quoted(self, suffix: &str) -> String {
        let (quote, prefix) = (self.quote, self.prefix);
        let dot = format!("{quote}.{quote}");
        format!("{quote}{}{suffix}{quote}", prefix.replace('.', &dot))
    }
}

/// `text` with the parts between these marks, or without them.
fn optional(text: &str, (start, end): (&str, &str), is_there: bool) -> String {
    if is_there {
        return text.replace(start, "").replace(end, "");
    }
    let mut parts = text.split(start);
    let first = parts.next().unwrap_or_default().to_owned();
    let behind = parts.filter_map(|part| part.split_once(end).map(|(_, rest)| rest));
    behind.fold(first, |text, rest| text + rest)
}

/// Whether `name` can stand in a statement without quotes, as a table or a schema and a table.
pub(crate) fn is_identifier(name: &str) -> bool {
    let is_word = |word: &str| {
        word.starts_with(|first: char| first.is_ascii_lowercase() || first == '_')
            && word.chars().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '_')
    };
    name.len() <= 48 && name.split('.').count() <= 2 && name.split('.').all(is_word)
}

pub(crate) fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

pub(crate) fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_may_have_any_name() {
        let text = "-- of lock_lease\nlock_lease lock_queue lock_";
        for (prefix, named) in [
            ("lock", "`lock_lease` `lock_queue` lock_"),
            ("app.lock_queue", "`app`.`lock_queue_lease` `app`.`lock_queue_queue` lock_"),
            ("user.lock_lease", "`user`.`lock_lease_lease` `user`.`lock_lease_queue` lock_"),
        ] {
            let info = InfoColumn::Named;
            let names = TableNames { prefix, quote: '`', pins: Pins::Off, info };
            assert_eq!(names.apply(text), named);
        }
    }

    #[test]
    fn parts_of_statements_are_there_with_what_they_are_for() {
        let text = "a /*pin, lock_fence\n-- x\npin*/ b /*pin c pin*/ /*info , info info*/";
        let names = |pins| TableNames { prefix: "l", quote: '"', pins, info: InfoColumn::Named };
        assert_eq!(names(Pins::Off).apply(text), "a  b   , info ");
        assert_eq!(names(Pins::Off).without_info().apply(text), "a  b  ");
        assert_eq!(names(Pins::On).without_info().apply(text), "a , \"l_fence\"\n b  c  ");
    }
}
