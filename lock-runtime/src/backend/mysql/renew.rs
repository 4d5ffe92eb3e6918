//! Renewals and reads on one connection.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use tokio::time::sleep;

use crate::backend::mysql::batch::MysqlBatch;
use crate::backend::mysql::packet::{by_count_of_keys, bytes_in_lists};
use crate::backend::mysql::script::{ByteList, Literal, SqlScript};
use crate::backend::mysql::server_error::LONG_TRANSACTIONS;
use crate::backend::sql::job::{Reads, answer};
use crate::backend::sql::locked_rows::row_is_locked;
use crate::backend::sql::renewal_queue::{LeaseId, QueuedRenewal, RENEWALS, id_of};
use crate::backend::sql::tables::micros;
use crate::backend::{BackendError, LeaseRef, LeaseStatus, Owner};
use crate::base::clock::Instant;
use crate::base::key::Key;

/// What is known about leases that are renewed.
#[derive(Default)]
struct Renewed {
    held: HashSet<LeaseId>,
    /// Held by the owner, with rows that another session kept locked for the whole time.
    locked: HashSet<LeaseId>,
}

impl MysqlBatch<'_> {
    pub(super) async fn renew(&mut self, renewals: Vec<QueuedRenewal>) {
        let keys = renewals.iter().flat_map(|renewal| renewal.lease.keys.iter());
        let longest = keys.map(|key| key.as_str().len()).max().unwrap_or_default();
        let together = self.session.parts(RENEWALS, bytes_in_lists(longest));
        // One time limit for all parts: the callers wait for the last part.
        let deadline = self.now() + self.state.connector.limits.request / 4;
        for renewals in by_count_of_keys(renewals, |it| it.lease.keys.len(), together) {
            let leases = renewals.iter().map(|renewal| &renewal.lease).collect();
            let mut renewed = Renewed::default();
            let done = self.renew_together(leases, deadline, &mut renewed).await;
            for renewal in renewals {
                let lease = id_of(&renewal.lease);
                renewal.answer(&match &done {
                    _ if renewed.held.contains(&lease) => Ok(LeaseStatus::Held),
                    Ok(()) if renewed.locked.contains(&lease) => {
                        Err(row_is_locked(LONG_TRANSACTIONS))
                    }
                    Ok(()) => Ok(LeaseStatus::NotHeld),
                    Err(error) => Err(error.clone()),
                });
            }
        }
    }

    /// Renews what no transaction has locked, so that a lock delays no other renewal. Tries the rest again until `deadline`.
    async fn renew_together(
        &mut self,
        leases: Vec<&LeaseRef>,
        deadline: Instant,
        renewed: &mut Renewed,
    ) -> Result<(), BackendError> {
        const PAUSE: Duration = Duration::from_millis(10);
        let mut left = leases;
        loop {
            let unlocked = self.unlocked(&left).await?;
            let (ready, others): (Vec<_>, Vec<_>) = left.into_iter().partition(|lease| {
                lease.keys.iter().all(|key| unlocked.get(key) == Some(&lease.owner))
            });
            self.extend(&ready, renewed).await?;
            left = others;
            if left.is_empty() {
                return Ok(());
            }
            let held = self.held(&left).await?;
            left.retain(|lease| is_complete(lease, &held));
            if left.is_empty() {
                return Ok(());
            }
            if self.now() >= deadline {
                renewed.locked.extend(left.iter().copied().map(id_of));
                return Ok(());
            }
            sleep(PAUSE).await;
        }
    }

    /// The held keys whose rows no transaction has locked, and their owners.
    async fn unlocked(
        &mut self,
        leases: &[&LeaseRef],
    ) -> Result<HashMap<Key, Owner>, BackendError> {
        let asked: HashMap<&[u8], &Key> = leases
            .iter()
            .flat_map(|lease| lease.keys.iter())
            .map(|key| (key.as_str().as_bytes(), key))
            .collect();
        let keys = ByteList::of_keys(asked.values().copied());
        let script = SqlScript::of(&self.statements().unlocked, &[("keys", keys.as_literal())]);
        let answered = self.execute(&script, usize::MAX).await?;
        let mut found = HashMap::new();
        for row in answered.sets.iter().flatten() {
            let key = row.bytes(0).and_then(|key| asked.get(key));
            let (Some(key), Some(owner)) = (key, row.owner(1)) else { continue };
            if row.is_true(2) && self.state.watch_list().contended(key) {
                self.state.events.contended(key.as_str());
            }
            found.insert((*key).clone(), owner);
        }
        Ok(found)
    }

    /// Extends leases of the same length by one statement, and adds those that are held.
    async fn extend(
        &mut self,
        leases: &[&LeaseRef],
        renewed: &mut Renewed,
    ) -> Result<(), BackendError> {
        let mut by_length: BTreeMap<i64, Vec<&LeaseRef>> = BTreeMap::new();
        for lease in leases {
            by_length.entry(micros(lease.kept_for())).or_default().push(lease);
        }
        let statements = self.statements();
        let is_one = by_length.len() == 1;
        let mut script = if is_one { SqlScript::default() } else { self.begin() };
        if !is_one {
            // The statements below each have an order of their own.
            let keys = ByteList::of_keys(leases.iter().flat_map(|lease| lease.keys.iter()));
            script.add(&statements.lock_rows, &[("keys", keys.as_literal())]);
        }
        for (kept, leases) in &by_length {
            let (keys, pairs) = lists(leases);
            let values = [
                ("keys", keys.as_literal()),
                ("leases", pairs.as_literal()),
                ("kept", Literal::Number(*kept)),
                ("channel", Literal::Bytes(self.channel.as_bytes())),
            ];
            script.add(&statements.renew, &values);
        }
        let asked: usize = leases.iter().map(|lease| lease.keys.len()).sum();
        let until_from = self.now();
        let all_matched = match by_length.len() {
            0 => return Ok(()),
            1 => self.execute(&script, 0).await?.matched == asked as u64,
            _ => {
                self.in_transaction(script).await?;
                false
            }
        };
        let held = if all_matched { HashSet::new() } else { self.held(leases).await? };
        let mut watch_list = self.state.watch_list();
        for lease in leases.iter().filter(|lease| all_matched || is_complete(lease, &held)) {
            renewed.held.insert(id_of(lease));
            for key in lease.keys.iter() {
                watch_list.renewed(key, lease.owner, until_from + lease.kept_for());
            }
        }
        Ok(())
    }

    /// Which keys are held by their owner, as keys with owners.
    async fn held(&mut self, leases: &[&LeaseRef]) -> Result<HashSet<Vec<u8>>, BackendError> {
        let (keys, pairs) = lists(leases);
        let values = [("keys", keys.as_literal()), ("leases", pairs.as_literal())];
        let script = SqlScript::of(&self.statements().held, &values);
        let answered = self.execute(&script, 0).await?;
        let pair = |row: &crate::backend::mysql::session::Fields| {
            Some([row.bytes(0)?, row.bytes(1)?].concat())
        };
        Ok(answered.sets.iter().flatten().filter_map(pair).collect())
    }

    /// Reads by one statement which leases are held. Renewals that arrive meanwhile do not wait for several statements.
    pub(super) async fn are_held(&mut self, reads: Reads) {
        let leases: Vec<_> = reads.iter().map(|(lease, _)| lease).collect();
        let held = self.held(&leases).await;
        for (lease, reply) in reads {
            let status = |held| LeaseStatus::of(is_complete(&lease, held));
            answer(reply, held.as_ref().map(status).map_err(Clone::clone));
        }
    }
}

/// The keys of the leases, and keys with owners.
fn lists(leases: &[&LeaseRef]) -> (ByteList, ByteList) {
    let (mut keys, mut pairs) = (ByteList::default(), ByteList::default());
    for lease in leases {
        for key in lease.keys.iter() {
            let key = key.as_str().as_bytes();
            keys.push(&[key]);
            pairs.push(&[key, lease.owner.as_bytes()]);
        }
    }
    (keys, pairs)
}

fn is_complete(lease: &LeaseRef, held: &HashSet<Vec<u8>>) -> bool {
    let is_held =
        |key: &Key| held.contains(&[key.as_str().as_bytes(), lease.owner.as_bytes()].concat());
    lease.keys.iter().all(is_held)
}
