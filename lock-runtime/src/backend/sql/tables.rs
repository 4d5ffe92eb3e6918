//! Names of tables, and times that both databases keep.

use std::time::Duration;

/// How long rows of free locks stay, unless the URL says otherwise. A row in place makes the next grant cheaper, and its
/// fence exceeds the former one whatever the server's clock did.
pub(crate) const FORGET_AFTER: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// `text` with `lock_lease` and `lock_queue` replaced by the names of the tables that start with `table`, each part in
/// `quote`s, so that it may be a word of SQL. Comments are left out.
pub(crate) fn with_tables(text: &str, table: &str, quote: char) -> String {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("--"));
    let text = lines.collect::<Vec<_>>().join("\n");
    // One pass: the name of one table may contain that of the other.
    let (lease, queue) = (quoted(table, "_lease", quote), quoted(table, "_queue", quote));
    let parts = text.split("lock_lease").map(|part| part.replace("lock_queue", &queue));
    parts.collect::<Vec<_>>().join(&lease)
}

fn quoted(table: &str, suffix: &str, quote: char) -> String {
    let dot = format!("{quote}.{quote}");
    format!("{quote}{}{suffix}{quote}", table.replace('.', &dot))
}

/// Whether `name` can stand in a statement without quotes, as a table or a schema and a table.
pub(crate) fn is_identifier(name: &str) -> bool {
    let is_word = |word: &str| {
        word.starts_with(|first: char| first.is_ascii_lowercase() || first == '_')
            && word.chars().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '_')
    };
    name.len() <= 48 && name.split('.').count() <= 2 && name.split('.').all(is_word)
}

/// How long a release of a lease of `ttl` reserves the key for the head of the queue: the longest time for which a process that
/// is frozen at that moment delays the other waiters.
pub(crate) fn reservation_time(ttl: Duration) -> Duration {
    (ttl / 10).clamp(Duration::from_millis(100), Duration::from_secs(1)).min(ttl)
}

pub(crate) fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_may_have_any_name() {
        let text = "-- of lock_lease\nlock_lease lock_queue";
        for (table, named) in [
            ("lock", "`lock_lease` `lock_queue`"),
            ("app.lock_queue", "`app`.`lock_queue_lease` `app`.`lock_queue_queue`"),
            ("user.lock_lease", "`user`.`lock_lease_lease` `user`.`lock_lease_queue`"),
        ] {
            assert_eq!(with_tables(text, table, '`'), named);
        }
    }
}
