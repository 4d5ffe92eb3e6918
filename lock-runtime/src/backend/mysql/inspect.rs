//! Reads of the holder of a key and its wait queue.

use crate::backend::mysql::batch::{MysqlBatch, incomplete};
use crate::backend::mysql::script::{Literal, SqlScript};
use crate::backend::sql::inspected_rows::InspectedRows;
use crate::backend::{BackendError, Inspection};
use crate::base::key::Key;

impl MysqlBatch<'_> {
    pub(super) async fn inspect(&mut self, key: &Key) -> Result<Inspection, BackendError> {
        let most = i64::try_from(Inspection::MAX_WAITERS).unwrap_or(i64::MAX);
        let values = [
            ("key", Literal::Bytes(key.as_str().as_bytes())),
            ("most", Literal::Number(most)),
            ("server", Literal::Bytes(self.session.identity.server.as_bytes())),
        ];
        let statements = self.statements();
        let script = SqlScript::of(&statements.clock, &[]).then(&statements.inspect, &values);
        let answered = self.execute(&script, usize::MAX).await?;
        let mut found = InspectedRows::default();
        for row in answered.sets.iter().flatten() {
            let (Some(position), Some(owner)) = (row.number(0), row.bytes(1)) else {
                return Err(incomplete());
            };
            match position {
                0 => found.add_holder(
                    owner,
                    row.number(2).unwrap_or_default(),
                    row.number(3).unwrap_or_default(),
                    // The last column is there with the one of the table.
                    row.bytes(5),
                ),
                _ => found.add_waiter(owner, row.number(4).unwrap_or_default()),
            }
        }
        Ok(found.into_inspection())
    }
}
