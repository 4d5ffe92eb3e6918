//! Reads of the holder of a key and its wait queue, and of the keys that are held.

use crate::backend::mysql::batch::{MysqlBatch, incomplete};
use crate::backend::mysql::schema::MysqlStatements;
use crate::backend::mysql::script::{Literal, SqlScript};
use crate::backend::sql::inspected_rows::InspectedRows;
use crate::backend::sql::listed_keys::{ListedRow, PAGE};
use crate::backend::{BackendError, Inspection};
use crate::base::key::Key;

impl MysqlBatch<'_> {
    pub(super) async fn inspect(&mut self, key: &Key) -> Result<Inspection, BackendError> {
        let most = i64::try_from(Inspection::MAX_WAITERS).unwrap_or(i64::MAX);
        let server = self.session.identity.server.clone();
        let values = [
            ("key", Literal::Bytes(key.as_str().as_bytes())),
            ("most", Literal::Number(most)),
            ("server", Literal::Bytes(server.as_bytes())),
        ];
        let script = |statements: &MysqlStatements| {
            SqlScript::of(&statements.clock, &[]).then(&statements.inspect, &values)
        };
        let mut answered = self.execute(&script(self.statements()), usize::MAX).await;
        if answered.as_ref().is_err_and(|error| self.give_up_info_after(error)) {
            answered = self.execute(&script(self.statements()), usize::MAX).await;
        }
        let answered = answered?;
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
                    // The last column is there if the table has its column for it.
                    row.bytes(5),
                ),
                _ => found.add_waiter(owner, row.number(4).unwrap_or_default()),
            }
        }
        Ok(found.into_inspection())
    }

    /// A page of keys, starting at `from`.
    pub(super) async fn list(&mut self, from: &[u8]) -> Result<Vec<ListedRow>, BackendError> {
        let most = i64::try_from(PAGE).unwrap_or(i64::MAX);
        let values = [("from", Literal::Bytes(from)), ("most", Literal::Number(most))];
        let statements = self.statements();
        let script = SqlScript::of(&statements.clock, &[]).then(&statements.list, &values);
        let answered = self.execute(&script, usize::MAX).await?;
        let mut page = Vec::new();
        for row in answered.sets.iter().flatten() {
            let (Some(key), Some(is_held)) = (row.bytes(0), row.number(1)) else {
                return Err(incomplete());
            };
            page.push(ListedRow { key: key.to_vec(), is_held: is_held != 0 });
        }
        Ok(page)
    }
}
