//! Looks at what this process waits for, in place of notifications.

use std::collections::HashMap;
use std::time::Duration;

use crate::backend::mysql::batch::MysqlBatch;
use crate::backend::mysql::packet::BYTES_IN_LISTS;
use crate::backend::mysql::script::{ByteList, Literal, SqlScript};
use crate::backend::mysql::watch_list::{Found, Place};
use crate::base::clock::Instant;
use crate::base::key::Key;

/// How many places one statement looks at.
const PLACES: usize = 500;

/// When to look next.
pub(crate) struct Looks {
    last: Instant,
    /// How long the last look took. A busy server is looked at less often.
    took: Duration,
}

impl Looks {
    pub(crate) fn new(now: Instant) -> Self {
        Self { last: now, took: Duration::ZERO }
    }

    /// When the next look is due, if looks are `interval` apart.
    pub(crate) fn due(&self, interval: Duration) -> Instant {
        self.last + interval.max(self.took)
    }

    /// Looks at everything that this process waits for. A failure does not matter: the next look finds the same.
    pub(super) async fn run(&mut self, batch: &mut MysqlBatch<'_>) {
        let began = batch.now();
        let (places, looks_at_held) = {
            let mut watch_list = batch.state.watch_list();
            (watch_list.places(began), watch_list.looks_at_held() && !batch.channel.is_empty())
        };
        for places in places.chunks(batch.session.parts(PLACES, BYTES_IN_LISTS)) {
            // Renewals wait behind a look.
            if !look_at_queues(batch, places).await {
                break;
            }
        }
        if looks_at_held {
            look_at_held(batch).await;
        }
        self.last = batch.now();
        self.took = self.last.since(began);
    }
}

/// Whether the server has answered.
async fn look_at_queues(batch: &mut MysqlBatch<'_>, places: &[Place]) -> bool {
    let mut waiters = ByteList::default();
    for (key, owner) in places {
        waiters.push(&[key.as_str().as_bytes(), owner.as_bytes()]);
    }
    let keys = ByteList::of_keys(places.iter().map(|(key, _)| key));
    let statements = batch.statements();
    let values = [("keys", keys.as_literal()), ("waiters", waiters.as_literal())];
    let script = SqlScript::of(&statements.clock, &[]).then(&statements.look, &values);
    let Ok(answered) = batch.execute(&script, usize::MAX).await else { return false };
    let mut found = HashMap::new();
    for row in answered.sets.iter().flatten() {
        let (Some(key), Some(owner)) = (row.text(0), row.owner(1)) else { continue };
        let state = if row.is_true(2) {
            Found::Granted
        } else {
            let left = u64::try_from(row.number(4).unwrap_or_default()).unwrap_or_default();
            // A key without a row is free.
            let is_free = row.number(3).is_none_or(|is_free| is_free != 0);
            let free_in = is_free.then(|| Duration::from_micros(left));
            Found::Queued { rank: row.number(5).unwrap_or_default(), free_in }
        };
        let place = (Key::from(key), owner);
        // A grant may be found beside an entry that was read before.
        if found.get(&place) != Some(&Found::Granted) {
            found.insert(place, state);
        }
    }
    for place in places {
        let state = found.get(place).copied().unwrap_or(Found::Missing);
        let told = batch.state.watch_list().found(place, state, batch.now());
        if let Some(available_in) = told {
            batch.state.events.head_of_queue(place.0.as_str(), place.1, available_in);
        }
    }
    true
}

async fn look_at_held(batch: &mut MysqlBatch<'_>) {
    let statements = batch.statements();
    let channel = Literal::Bytes(batch.channel.as_bytes());
    let script =
        SqlScript::of(&statements.clock, &[]).then(&statements.contended, &[("channel", channel)]);
    let Ok(answered) = batch.execute(&script, usize::MAX).await else { return };
    for row in answered.sets.iter().flatten() {
        let Some(key) = row.text(0).map(Key::from) else { continue };
        if batch.state.watch_list().contended(&key) {
            batch.state.events.contended(key.as_str());
        }
    }
}
