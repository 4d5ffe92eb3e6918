//! Deletes rows that are no longer needed, a few at a time.

use tokio_postgres::types::Type;

use crate::backend::postgres::batch::Batch;
use crate::backend::postgres::schema::Parameters;
use crate::backend::postgres::session::get;
use crate::backend::sql::sweep::{RowSweep, SWEPT_ROWS};

/// Sweeps the next part of `walk`. A failure does not matter: the next walk finds the same rows.
pub(super) async fn sweep(walk: &mut RowSweep, batch: &Batch<'_>) {
    let seconds = i64::try_from(walk.forget_after.as_secs()).unwrap_or(i64::MAX);
    let rows = i64::from(SWEPT_ROWS);
    let parameters: Parameters<'_> =
        vec![(&walk.last, Type::BYTEA), (&seconds, Type::INT8), (&rows, Type::INT8)];
    let rows = batch.query(&batch.statements.sweep, &parameters).await;
    let last: Option<Vec<u8>> = rows.ok().and_then(|rows| get(rows.first()?, 0).ok()).flatten();
    walk.swept_to(last, batch.clock.now());
}
