//! Releases on one connection.

use std::collections::HashMap;

use crate::backend::mysql::acquire::recheck_interval;
use crate::backend::mysql::batch::MysqlBatch;
use crate::backend::mysql::packet::{BYTES_IN_LISTS, BYTES_OF_TRANSITION};
use crate::backend::mysql::script::{ByteList, Literal};
use crate::backend::sql::job::{Releases, answer, fail_all};
use crate::backend::sql::queued::successor;
use crate::backend::sql::tables::micros;
use crate::backend::{BackendError, ReleaseOutcome, ReleaseRequest};
use crate::base::jitter;
use crate::base::key::Key;

/// How many keys one transaction hands off. Their rows are locked until its flush.
const HANDED_OFF_TOGETHER: usize = 32;

/// How many keys one statement frees. It locks their rows until its flush.
const FREED_TOGETHER: usize = 1_024;

/// What became of the keys of a release, by the positions of request and key.
type Ends = HashMap<(usize, usize), Ended>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// Free, kept for a while, or the successor's.
    Freed,
    HandedOff,
    NotHeld,
}

impl MysqlBatch<'_> {
    /// Ends leases with different keys: those without a wait queue together, by one statement.
    pub(super) async fn release(&mut self, requests: Releases) {
        let mut requests = self.without_locked(requests, |request| &request.lease.keys).await;
        while !requests.is_empty() {
            let mut ends = Ends::new();
            let ended = self.end_all(&requests, &mut ends).await;
            requests = match ended {
                Ok(()) => {
                    self.answer_ended(requests, &ends);
                    Vec::new()
                }
                Err(error) => self.answer_failed(requests, &ends, error).await,
            };
        }
    }

    async fn end_all(&mut self, requests: &Releases, ends: &mut Ends) -> Result<(), BackendError> {
        self.free(requests, ends).await?;
        let mut open = places(requests, |_| true);
        open.retain(|(_, place)| !ends.contains_key(place));
        open.sort_by_key(|(key, _)| *key);
        for open in open.chunks(self.session.parts(HANDED_OFF_TOGETHER, BYTES_OF_TRANSITION)) {
            self.hand_off(requests, open, ends).await?;
        }
        Ok(())
    }

    /// Ends leases without a wait queue, and adds their keys.
    async fn free(&mut self, requests: &Releases, ends: &mut Ends) -> Result<(), BackendError> {
        let is_plain = |request: &ReleaseRequest| {
            request.free_after.is_zero()
                && request.barging_window.is_zero()
                && successor(request).is_none()
        };
        let open = places(requests, is_plain);
        for open in open.chunks(self.session.parts(FREED_TOGETHER, BYTES_IN_LISTS)) {
            self.free_together(requests, open, ends).await?;
        }
        Ok(())
    }

    async fn free_together(
        &mut self,
        requests: &Releases,
        open: &[(&Key, (usize, usize))],
        ends: &mut Ends,
    ) -> Result<(), BackendError> {
        let (mut keys, mut leases) = (ByteList::default(), ByteList::default());
        let mut asked = HashMap::new();
        for (key, place) in open {
            let key = key.as_str().as_bytes();
            keys.push(&[key]);
            leases.push(&[key, requests[place.0].0.lease.owner.as_bytes()]);
            asked.insert(key, *place);
        }
        let values = [("keys", keys.as_literal()), ("leases", leases.as_literal())];
        let script = self.begin().then(&self.statements().release, &values);
        let answered = self.in_transaction(script).await?;
        for row in answered.sets.iter().flatten().filter(|row| row.is_true(1)) {
            if let Some(place) = row.bytes(0).and_then(|key| asked.get(key)) {
                ends.insert(*place, Ended::Freed);
            }
        }
        Ok(())
    }

    /// Ends what is left: leases with a wait queue, and places of owners in one.
    async fn hand_off(
        &mut self,
        requests: &Releases,
        open: &[(&Key, (usize, usize))],
        ends: &mut Ends,
    ) -> Result<(), BackendError> {
        let statements = self.statements();
        let mut script = self.begin();
        for (number, (key, (at, _))) in (0..).zip(open) {
            let request = &requests[*at].0;
            let next = successor(request);
            let values = [
                ("number", Literal::Number(number)),
                ("key", Literal::Bytes(key.as_str().as_bytes())),
                ("owner", Literal::Bytes(request.lease.owner.as_bytes())),
                ("reservation", Literal::Number(micros(request.lease.reservation_time()))),
                ("successor", Literal::Bytes(next.map_or(&[], |next| next.owner.as_bytes()))),
                ("kept", Literal::Number(next.map_or(0, |next| micros(next.ttl)))),
                ("window", Literal::Number(micros(request.barging_window))),
                ("free_after", Literal::Number(micros(request.free_after))),
                ("channel", Literal::Bytes(self.channel.as_bytes())),
                ("server", Literal::Bytes(self.session.identity.server.as_bytes())),
            ];
            script.add(&statements.hand_off, &values);
        }
        let answered = self.in_transaction(script).await?;
        for row in answered.sets.iter().flatten() {
            let place = row.number(0).and_then(|number| open.get(usize::try_from(number).ok()?));
            let Some((_, place)) = place else { continue };
            let ended = match (row.is_true(1), row.is_true(2)) {
                (true, true) => Ended::HandedOff,
                (true, false) => Ended::Freed,
                (false, _) => Ended::NotHeld,
            };
            ends.insert(*place, ended);
        }
        Ok(())
    }

    fn answer_ended(&mut self, requests: Releases, ends: &Ends) {
        for (at, (request, reply)) in requests.into_iter().enumerate() {
            let ended: Vec<_> = (0..request.lease.keys.len())
                .filter_map(|number| ends.get(&(at, number)))
                .collect();
            let is_held = ended.len() == request.lease.keys.len()
                && ended.iter().all(|ended| **ended != Ended::NotHeld);
            let next = successor(&request).filter(|_| request.free_after.is_zero());
            let mut watch_list = self.state.watch_list();
            for key in request.lease.keys.iter() {
                watch_list.ended(key, request.lease.owner);
            }
            let outcome = match (&*request.lease.keys, next) {
                _ if !is_held => ReleaseOutcome::NotHeld,
                ([key], Some(next)) if *ended[0] == Ended::HandedOff => {
                    watch_list.queued(key, next.owner, 1, self.state.clock.now());
                    self.state.watched.notify_one();
                    ReleaseOutcome::successor_queued(jitter::below(recheck_interval(1)))
                }
                ([_], Some(_)) => ReleaseOutcome::SuccessorGranted,
                _ => ReleaseOutcome::Freed,
            };
            drop(watch_list);
            answer(reply, Ok(outcome));
        }
    }

    /// After a failure: answers what has ended, and returns what has to be sent again.
    async fn answer_failed(
        &mut self,
        requests: Releases,
        ends: &Ends,
        error: BackendError,
    ) -> Releases {
        let (mut complete, mut partial, mut untouched) = (Vec::new(), Vec::new(), Vec::new());
        for (at, pending) in requests.into_iter().enumerate() {
            let keys = pending.0.lease.keys.len();
            match (0..keys).filter(|number| ends.contains_key(&(at, *number))).count() {
                0 => untouched.push(pending),
                count if count == keys => complete.push((at, pending)),
                _ => partial.push(pending),
            }
        }
        for (at, pending) in complete {
            let ends = (0..pending.0.lease.keys.len())
                .filter_map(|number| Some(((0, number), *ends.get(&(at, number))?)))
                .collect();
            self.answer_ended(vec![pending], &ends);
        }
        fail_all(partial, &error.clone().after_a_part());
        self.others(untouched, |request| &request.lease.keys, error).await
    }
}

/// The keys of these requests, and their positions.
fn places(
    requests: &Releases,
    is_meant: impl Fn(&ReleaseRequest) -> bool,
) -> Vec<(&Key, (usize, usize))> {
    let mut places = Vec::new();
    for (at, (request, _)) in requests.iter().enumerate().filter(|(_, (it, _))| is_meant(it)) {
        let keys = request.lease.keys.iter().enumerate();
        places.extend(keys.map(|(number, key)| (key, (at, number))));
    }
    places
}
