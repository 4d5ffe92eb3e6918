//! Renewals and reads on one connection.

use tokio_postgres::types::Type;

use crate::backend::postgres::acquire::texts;
use crate::backend::postgres::batch::{Batch, Parameters, micros};
use crate::backend::postgres::job::{Pending, answer, fail_all};
use crate::backend::postgres::server_error::failure;
use crate::backend::postgres::session::get;
use crate::backend::{BackendError, LeaseRef, LeaseStatus};

/// How many leases one statement renews. It locks their rows until its flush.
const TOGETHER: usize = 1_000;

type Renewals = Vec<Pending<LeaseRef, LeaseStatus>>;

impl Batch<'_> {
    pub(super) async fn renew(&self, mut renewals: Renewals) {
        while !renewals.is_empty() {
            let rest = renewals.split_off(renewals.len().min(TOGETHER));
            match self.renew_together(&renewals).await {
                Ok(statuses) => {
                    for ((_, reply), status) in renewals.into_iter().zip(statuses) {
                        answer(reply, Ok(status));
                    }
                }
                Err(error) => fail_all(renewals, &error),
            }
            renewals = rest;
        }
    }

    async fn renew_together(&self, renewals: &Renewals) -> Result<Vec<LeaseStatus>, BackendError> {
        let (mut numbers, mut keys, mut owners) = (Vec::new(), Vec::new(), Vec::new());
        let (mut kept, mut counts) = (Vec::new(), Vec::new());
        for (number, (lease, _)) in renewals.iter().enumerate() {
            for key in lease.keys.iter() {
                numbers.push(i64::try_from(number).unwrap_or(i64::MAX));
                keys.push(key.as_str().as_bytes());
                owners.push(lease.owner.as_bytes());
                kept.push(micros(lease.kept_for()));
                counts.push(i64::try_from(lease.keys.len()).unwrap_or(i64::MAX));
            }
        }
        let parameters: Parameters<'_> = vec![
            (&numbers, Type::INT8_ARRAY),
            (&keys, Type::BYTEA_ARRAY),
            (&owners, Type::BYTEA_ARRAY),
            (&kept, Type::INT8_ARRAY),
            (&counts, Type::INT8_ARRAY),
            self.channel(),
        ];
        let rows = self.query(&self.statements.renew, &parameters).await.map_err(failure)?;
        let mut statuses = vec![LeaseStatus::NotHeld; renewals.len()];
        for row in &rows {
            let number = usize::try_from(get::<i64>(row, 0)?).unwrap_or(usize::MAX);
            if let Some(status) = statuses.get_mut(number) {
                *status = LeaseStatus::Held;
            }
            if get(row, 2)?
                && let Ok(key) = std::str::from_utf8(get(row, 1)?)
            {
                self.events.contended(key);
            }
        }
        Ok(statuses)
    }

    pub(super) async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let (keys, owner) = (texts(&lease.keys), lease.owner.as_bytes());
        let parameters: Parameters<'_> = vec![(&keys, Type::BYTEA_ARRAY), (&owner, Type::BYTEA)];
        let rows = self.query(&self.statements.is_held, &parameters).await.map_err(failure)?;
        let held: i64 = rows.first().map_or(Ok(0), |row| get(row, 0))?;
        let is_held = usize::try_from(held).is_ok_and(|held| held == lease.keys.len());
        Ok(if is_held { LeaseStatus::Held } else { LeaseStatus::NotHeld })
    }
}
