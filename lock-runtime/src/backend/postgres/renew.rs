//! Renewals and reads on one connection.

use std::collections::{HashMap, HashSet};

use tokio_postgres::types::Type;

use crate::backend::postgres::batch::Batch;
use crate::backend::postgres::schema::{Parameters, Sql};
use crate::backend::postgres::server_error::is_lock_timeout;
use crate::backend::postgres::session::get;
use crate::backend::sql::job::{Reads, answer};
use crate::backend::sql::renewal_queue::{LeaseId, QueuedRenewal, id_of};
use crate::backend::sql::tables::micros;
use crate::backend::{BackendError, LeaseRef, LeaseStatus};

/// The keys of several leases, as columns with one element for each key.
#[derive(Default)]
struct AskedKeys<'a> {
    /// The place of the lease.
    numbers: Vec<i64>,
    keys: Vec<&'a [u8]>,
    owners: Vec<&'a [u8]>,
}

impl<'a> AskedKeys<'a> {
    fn of(leases: impl Iterator<Item = &'a LeaseRef>) -> Self {
        let mut asked = Self::default();
        for (number, lease) in (0..).zip(leases) {
            for key in lease.keys.iter() {
                asked.numbers.push(number);
                asked.keys.push(key.as_str().as_bytes());
                asked.owners.push(lease.owner.as_bytes());
            }
        }
        asked
    }
}

impl Batch<'_> {
    pub(super) async fn renew(&self, renewals: Vec<QueuedRenewal>) {
        let mut held = HashSet::new();
        // First what is not locked, so that a lock delays no other renewal.
        let leases: Vec<_> = renewals.iter().map(|renewal| &renewal.lease).collect();
        let first = self.renew_together(&self.statements.renew, &leases, &mut held).await;
        let left: Vec<_> =
            leases.into_iter().filter(|lease| !held.contains(&id_of(lease))).collect();
        let second = match first {
            Ok(()) if left.is_empty() => Ok(()),
            Ok(()) => self.renew_together(&self.statements.renew_rest, &left, &mut held).await,
            Err(error) => Err(error),
        };
        // The rows of some may be locked. Nothing is known about the others yet.
        let lost = match &second {
            Err(error) if is_lock_timeout(error) => self.not_held(&left).await,
            _ => HashSet::new(),
        };
        for renewal in renewals {
            let lease = id_of(&renewal.lease);
            renewal.answer(&match &second {
                _ if held.contains(&lease) => Ok(LeaseStatus::Held),
                _ if lost.contains(&lease) => Ok(LeaseStatus::NotHeld),
                Ok(()) => Ok(LeaseStatus::NotHeld),
                Err(error) => Err(error.clone()),
            });
        }
    }

    /// Renews by this statement, and adds what is held.
    async fn renew_together(
        &self,
        statement: &Sql,
        leases: &[&LeaseRef],
        held: &mut HashSet<LeaseId>,
    ) -> Result<(), BackendError> {
        let AskedKeys { numbers, keys, owners } = AskedKeys::of(leases.iter().copied());
        let (mut kept, mut counts) = (Vec::new(), Vec::new());
        for lease in leases {
            for _ in lease.keys.iter() {
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
        for row in &self.query(statement, &parameters).await? {
            let number = usize::try_from(get::<i64>(row, 0)?).unwrap_or(usize::MAX);
            if let Some(lease) = leases.get(number) {
                held.insert(id_of(lease));
            }
            if get(row, 2)?
                && let Ok(key) = std::str::from_utf8(get(row, 1)?)
            {
                self.events.contended(key);
            }
        }
        Ok(())
    }

    /// Reads by one statement which leases are held. Renewals that arrive meanwhile do not wait for several statements.
    pub(super) async fn are_held(&self, reads: Reads) {
        let leases: Vec<_> = reads.iter().map(|(lease, _)| lease).collect();
        let counts = self.count_held(&leases).await;
        for (number, (lease, reply)) in reads.into_iter().enumerate() {
            let status = |counts: &HashMap<usize, usize>| {
                LeaseStatus::of(counts.get(&number) == Some(&lease.keys.len()))
            };
            answer(reply, counts.as_ref().map(status).map_err(Clone::clone));
        }
    }

    /// Which of the leases are known not to be held. Reads by one statement, which waits for no row.
    async fn not_held(&self, leases: &[&LeaseRef]) -> HashSet<LeaseId> {
        let Ok(counts) = self.count_held(leases).await else { return HashSet::new() };
        let leases = leases.iter().enumerate();
        let lost = leases.filter(|(number, lease)| counts.get(number) != Some(&lease.keys.len()));
        lost.map(|(_, lease)| id_of(lease)).collect()
    }

    /// How many keys each lease has that are its owner's. A lease is named by its place in `leases`.
    async fn count_held(
        &self,
        leases: &[&LeaseRef],
    ) -> Result<HashMap<usize, usize>, BackendError> {
        let AskedKeys { numbers, keys, owners } = AskedKeys::of(leases.iter().copied());
        let parameters: Parameters<'_> = vec![
            (&numbers, Type::INT8_ARRAY),
            (&keys, Type::BYTEA_ARRAY),
            (&owners, Type::BYTEA_ARRAY),
        ];
        let mut counts = HashMap::new();
        for row in &self.query(&self.statements.is_held, &parameters).await? {
            let number = usize::try_from(get::<i64>(row, 0)?).unwrap_or(usize::MAX);
            counts.insert(number, usize::try_from(get::<i64>(row, 1)?).unwrap_or_default());
        }
        Ok(counts)
    }
}
