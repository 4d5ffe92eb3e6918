//! Deletes rows that are no longer needed, a few at a time.

use std::collections::HashSet;

use crate::backend::mysql::batch::MysqlBatch;
use crate::backend::mysql::packet::BYTES_IN_LISTS;
use crate::backend::mysql::script::{ByteList, Literal, SqlScript};
use crate::backend::sql::sweep::{RowSweep, SWEPT_ROWS};
use crate::backend::sql::tables::micros;

/// Sweeps the next part of `walk`. A failure does not matter: the next walk finds the same rows.
pub(super) async fn sweep(walk: &mut RowSweep, batch: &mut MysqlBatch<'_>) {
    let last = part(walk, batch).await;
    walk.swept_to(last, batch.now());
}

/// The last key that was read; `None` at the end of the table.
async fn part(walk: &RowSweep, batch: &mut MysqlBatch<'_>) -> Option<Vec<u8>> {
    let statements = batch.statements();
    let age = Literal::Number(micros(walk.forget_after));
    let rows = batch.session.parts(usize::from(SWEPT_ROWS), BYTES_IN_LISTS);
    let rows = Literal::Number(i64::try_from(rows).unwrap_or(1));
    let values = [("last", Literal::Bytes(&walk.last)), ("age", age), ("rows", rows)];
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
