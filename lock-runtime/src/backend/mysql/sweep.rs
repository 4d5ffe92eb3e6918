//! Deletes rows that are no longer needed, a few at a time.

use std::collections::HashSet;
use std::time::Duration;

use crate::backend::mysql::batch::MysqlBatch;
use crate::backend::mysql::packet::BYTES_IN_LISTS;
use crate::backend::mysql::script::{ByteList, Literal, SqlScript};
use crate::backend::sql::tables::micros;
use crate::base::clock::Instant;
use crate::base::jitter;

/// Between two walks through the table.
const INTERVAL: Duration = Duration::from_secs(20 * 60);

/// Between two parts of one walk.
const PAUSE: Duration = Duration::from_millis(200);

/// How many rows one statement reads.
const ROWS: usize = 500;

/// Walks through the keys in their order.
pub(crate) struct RowSweep {
    forget_after: Duration,
    /// The last key that was read; empty at the beginning.
    last: Vec<u8>,
    due: Instant,
}

impl RowSweep {
    pub(crate) fn new(forget_after: Duration, now: Instant) -> Self {
        Self {
            forget_after,
            last: Vec::new(),
            due: now + jitter::below(INTERVAL.min(forget_after)),
        }
    }

    /// When the next part is due.
    pub(crate) fn due(&self) -> Instant {
        self.due
    }

    /// Sweeps the next part. A failure does not matter: the next walk finds the same rows.
    pub(super) async fn run(&mut self, batch: &mut MysqlBatch<'_>) {
        let last = self.part(batch).await;
        let pause = match &last {
            Some(_) => PAUSE,
            None => jitter::below(INTERVAL.min(self.forget_after)),
        };
        self.last = last.unwrap_or_default();
        self.due = batch.now() + pause;
    }

    /// The last key that was read; `None` at the end of the table.
    async fn part(&self, batch: &mut MysqlBatch<'_>) -> Option<Vec<u8>> {
        let statements = batch.statements();
        let age = Literal::Number(micros(self.forget_after));
        let rows = batch.session.parts(ROWS, BYTES_IN_LISTS);
        let rows = Literal::Number(i64::try_from(rows).unwrap_or(1));
        let values = [("last", Literal::Bytes(&self.last)), ("age", age), ("rows", rows)];
        let script = SqlScript::of(&statements.clock, &[])
            .then(&statements.sweep, &values)
            .then(&statements.abandoned, &values);
        let answered = batch.execute(&script, usize::MAX).await.ok()?;
        let [read, abandoned] = answered.sets.as_slice() else { return None };
        let mut old = ByteList::default();
        let is_any_old = read.iter().any(|row| row.is_true(1));
        for key in read.iter().filter(|row| row.is_true(1)).filter_map(|row| row.bytes(0)) {
            old.push(&[key]);
        }
        if is_any_old {
            delete_unlocked(batch, &old, age).await;
        }
        if !abandoned.is_empty() {
            let mut script = batch.begin();
            for row in abandoned {
                let (Some(key), Some(owner)) = (row.bytes(0), row.bytes(1)) else { continue };
                let values = [("key", Literal::Bytes(key)), ("owner", Literal::Bytes(owner))];
                script.add(&statements.sweep_queue, &values);
            }
            let _ = batch.in_transaction(script).await;
        }
        Some(read.last()?.bytes(0)?.to_vec())
    }
}

/// Deletes the rows of these keys that no transaction has locked.
async fn delete_unlocked(batch: &mut MysqlBatch<'_>, old: &ByteList, age: Literal<'_>) {
    let statements = batch.statements();
    let script = SqlScript::of(&statements.free_rows, &[("keys", old.as_literal())]);
    let Ok(answered) = batch.execute(&script, usize::MAX).await else { return };
    let free: HashSet<&[u8]> =
        answered.sets.iter().take(1).flatten().filter_map(|row| row.bytes(0)).collect();
    if free.is_empty() {
        return;
    }
    let mut keys = ByteList::default();
    for key in free {
        keys.push(&[key]);
    }
    let values = [("keys", keys.as_literal()), ("age", age)];
    let script = SqlScript::of(&statements.clock, &[]).then(&statements.sweep_rows, &values);
    let _ = batch.execute(&script, usize::MAX).await;
}
