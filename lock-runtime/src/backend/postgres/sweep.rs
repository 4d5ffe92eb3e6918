//! Deletes rows that are no longer needed, a few at a time.

use std::time::Duration;

use tokio_postgres::types::Type;

use crate::backend::postgres::batch::Batch;
use crate::backend::postgres::schema::Parameters;
use crate::backend::postgres::session::get;
use crate::backend::postgres::url::Database;
use crate::base::clock::Instant;
use crate::base::jitter;

/// Between two walks through the table.
const INTERVAL: Duration = Duration::from_secs(20 * 60);

/// Between two parts of one walk.
const PAUSE: Duration = Duration::from_millis(200);

/// How many rows one statement reads.
const ROWS: i64 = 500;

/// Walks through the keys in their order.
pub(crate) struct Sweep {
    forget_after: Duration,
    /// The last key that was read; empty at the beginning.
    last: Vec<u8>,
    due: Instant,
}

impl Sweep {
    pub(crate) fn new(database: &Database, now: Instant) -> Self {
        let due = now + jitter::below(INTERVAL.min(database.params.forget_after));
        Self { forget_after: database.params.forget_after, last: Vec::new(), due }
    }

    /// When the next part is due.
    pub(crate) fn due(&self) -> Instant {
        self.due
    }

    /// Sweeps the next part. A failure does not matter: the next walk finds the same rows.
    pub(super) async fn run(&mut self, batch: &Batch<'_>) {
        let seconds = i64::try_from(self.forget_after.as_secs()).unwrap_or(i64::MAX);
        let parameters: Parameters<'_> =
            vec![(&self.last, Type::BYTEA), (&seconds, Type::INT8), (&ROWS, Type::INT8)];
        let rows = batch.query(&batch.statements.sweep, &parameters).await;
        let last: Option<Vec<u8>> = rows.ok().and_then(|rows| get(rows.first()?, 0).ok()).flatten();
        let pause = match &last {
            Some(_) => PAUSE,
            None => jitter::below(INTERVAL.min(self.forget_after)),
        };
        self.last = last.unwrap_or_default();
        self.due = batch.clock.now() + pause;
    }
}
