//! Reads of the holder of a key and its wait queue, and of the keys that are held.

use tokio_postgres::types::Type;

use crate::backend::postgres::batch::Batch;
use crate::backend::postgres::schema::Parameters;
use crate::backend::postgres::session::get;
use crate::backend::sql::inspected_rows::InspectedRows;
use crate::backend::sql::listed_keys::{ListedRow, PAGE};
use crate::backend::{BackendError, Inspection};
use crate::base::key::Key;

impl Batch<'_> {
    pub(super) async fn inspect(&self, key: &Key) -> Result<Inspection, BackendError> {
        const INFO: usize = 5;
        let key = key.as_str().as_bytes();
        let most = i64::try_from(Inspection::MAX_WAITERS).unwrap_or(i64::MAX);
        let parameters: Parameters<'_> = vec![(&key, Type::BYTEA), (&most, Type::INT8)];
        let mut found = InspectedRows::default();
        for row in &self.query(&self.statements.inspect, &parameters).await? {
            match get::<i64>(row, 0)? {
                0 => {
                    // The last column is there if the table has its column for it.
                    let info = if row.len() > INFO { get(row, INFO)? } else { None };
                    found.add_holder(get(row, 1)?, get(row, 2)?, get(row, 3)?, info);
                }
                _ => found.add_waiter(get(row, 1)?, get(row, 4)?),
            }
        }
        Ok(found.into_inspection())
    }

    /// A page of keys, starting at `from`.
    pub(super) async fn list(&self, from: &[u8]) -> Result<Vec<ListedRow>, BackendError> {
        let most = i64::try_from(PAGE).unwrap_or(i64::MAX);
        let parameters: Parameters<'_> = vec![(&from, Type::BYTEA), (&most, Type::INT8)];
        let rows = self.query(&self.statements.list, &parameters).await?;
        let listed = |row| -> Result<ListedRow, BackendError> {
            Ok(ListedRow { key: get::<&[u8]>(row, 0)?.to_vec(), is_held: get(row, 1)? })
        };
        rows.iter().map(listed).collect()
    }
}
