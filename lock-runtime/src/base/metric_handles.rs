//! The metrics of the facade crate `metrics`: names, labels, units, and the handles that record them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use metrics::{
    Counter, Gauge, Histogram, SharedString, Unit, counter, describe_counter, describe_gauge,
    describe_histogram, gauge, histogram,
};
use once_cell::sync::OnceCell;

use crate::base::error::ErrorKind;
use crate::base::loss::Loss;
use crate::base::measurement::{
    Measurement, ReleaseResult, RenewalResult, StoreOperation, StoreResult,
};
use crate::base::outcome::Outcome;

/// Runs code of the program's recorder. A panic in it ends one measurement.
pub(crate) fn contained<T: Default>(code: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(code)).unwrap_or_default()
}

/// The outcomes that an attempt can have.
const OUTCOMES: [Outcome; 12] = [
    Outcome::Acquired,
    Outcome::Passed,
    Outcome::Cancelled,
    Outcome::Unclaimed,
    Outcome::Failed(ErrorKind::Conflict),
    Outcome::Failed(ErrorKind::Backend),
    Outcome::Failed(ErrorKind::QueueFull),
    Outcome::Failed(ErrorKind::PoolClosed),
    Outcome::Failed(ErrorKind::WouldDeadlock),
    Outcome::Failed(ErrorKind::InvalidKey),
    Outcome::Failed(ErrorKind::Config),
    Outcome::Failed(ErrorKind::Lost),
];

/// The position of an outcome in [`OUTCOMES`], if an attempt can have it. All outcomes are here, so that a new one has to be
/// decided on.
const fn position(outcome: Outcome) -> Option<usize> {
    let position = match outcome {
        Outcome::Acquired => 0,
        Outcome::Passed => 1,
        Outcome::Cancelled => 2,
        Outcome::Unclaimed => 3,
        Outcome::Failed(ErrorKind::Conflict) => 4,
        Outcome::Failed(ErrorKind::Backend) => 5,
        Outcome::Failed(ErrorKind::QueueFull) => 6,
        Outcome::Failed(ErrorKind::PoolClosed) => 7,
        Outcome::Failed(ErrorKind::WouldDeadlock) => 8,
        Outcome::Failed(ErrorKind::InvalidKey) => 9,
        Outcome::Failed(ErrorKind::Config) => 10,
        Outcome::Failed(ErrorKind::Lost) => 11,
        Outcome::Released
        | Outcome::Unconfirmed
        | Outcome::Panicked
        | Outcome::Failed(ErrorKind::PoolNotFound | ErrorKind::Released) => return None,
    };
    Some(position)
}

const _: () = {
    let mut at = 0;
    while at < OUTCOMES.len() {
        assert!(matches!(position(OUTCOMES[at]), Some(found) if found == at));
        at += 1;
    }
};

fn label(pool: Option<&Arc<str>>) -> SharedString {
    pool.map_or(SharedString::const_str("unnamed"), |pool| pool.clone().into())
}

/// The handles of one template. All of them exist from the first call on, at zero.
pub(crate) struct LockHandles {
    attempts: [Counter; OUTCOMES.len()],
    wait: Histogram,
    hold: Histogram,
    waiting: Gauge,
    held: Gauge,
    hand_offs: Counter,
    renewals: [Counter; RenewalResult::ALL.len()],
    losses: [Counter; Loss::ALL.len()],
    releases: [Counter; ReleaseResult::ALL.len()],
}

impl LockHandles {
    pub(crate) fn new(pool: Option<&Arc<str>>, template: &'static str) -> Self {
        describe_locks();
        let pool = || label(pool);
        macro_rules! counters {
            ($name:literal, $label:literal, $values:expr) => {
                $values.map(|value| {
                    counter!($name, "pool" => pool(), "template" => template, $label => value)
                })
            };
        }
        Self {
            attempts: counters!("lock.attempts", "outcome", OUTCOMES.map(Outcome::as_str)),
            wait: histogram!("lock.wait.duration", "pool" => pool(), "template" => template),
            hold: histogram!("lock.hold.duration", "pool" => pool(), "template" => template),
            waiting: gauge!("lock.waiting", "pool" => pool(), "template" => template),
            held: gauge!("lock.held", "pool" => pool(), "template" => template),
            hand_offs: counter!("lock.handoffs", "pool" => pool(), "template" => template),
            renewals: counters!(
                "lock.renewals",
                "outcome",
                RenewalResult::ALL.map(RenewalResult::as_str)
            ),
            losses: counters!("lock.losses", "reason", Loss::ALL.map(Loss::as_str)),
            releases: counters!(
                "lock.releases",
                "outcome",
                ReleaseResult::ALL.map(ReleaseResult::as_str)
            ),
        }
    }

    pub(crate) fn record(&self, measurement: Measurement) {
        match measurement {
            Measurement::WaitBegan => self.waiting.increment(1.0),
            Measurement::WaitEnded(outcome) => {
                self.waiting.decrement(1.0);
                if let Some(at) = position(outcome) {
                    self.attempts[at].increment(1);
                }
            }
            Measurement::Waited(waited) => self.wait.record(waited),
            Measurement::Granted => self.held.increment(1.0),
            Measurement::HoldEnded(held) => {
                self.held.decrement(1.0);
                self.hold.record(held);
            }
            Measurement::HandedOff => self.hand_offs.increment(1),
            Measurement::Renewal(result) => self.renewals[result as usize].increment(1),
            Measurement::Lost(loss) => self.losses[loss as usize].increment(1),
            Measurement::Release(result) => self.releases[result as usize].increment(1),
        }
    }
}

/// The handles of a store.
pub(crate) struct StoreHandles {
    requests: [[Counter; StoreResult::ALL.len()]; StoreOperation::ALL.len()],
    durations: [Histogram; StoreOperation::ALL.len()],
    /// `None` for a pool without a name: several stores would have one gauge.
    up: Option<Gauge>,
}

impl StoreHandles {
    pub(crate) fn new(name: Option<&Arc<str>>) -> Self {
        describe_stores();
        let pool = || label(name);
        let operations = StoreOperation::ALL.map(StoreOperation::as_str);
        let results = StoreResult::ALL.map(StoreResult::as_str);
        let requests = operations.map(|operation| {
            results.map(|result| {
                counter!("lock.store.requests", "pool" => pool(), "operation" => operation, "outcome" => result)
            })
        });
        let durations = operations.map(|operation| {
            histogram!("lock.store.request.duration", "pool" => pool(), "operation" => operation)
        });
        let up = name.map(|_| gauge!("lock.store.up", "pool" => pool()));
        Self { requests, durations, up }
    }

    pub(crate) fn call(&self, operation: StoreOperation, result: StoreResult, taken: Duration) {
        self.requests[operation as usize][result as usize].increment(1);
        self.durations[operation as usize].record(taken);
    }

    pub(crate) fn set_up(&self, is_up: bool) {
        if let Some(up) = &self.up {
            up.set(f64::from(u8::from(is_up)));
        }
    }
}

/// The handles of one pool, made once and found without a lock.
pub(crate) struct PoolHandles {
    /// By a number of the template.
    locks: [OnceCell<Box<Templated>>; 64],
    store: OnceCell<StoreHandles>,
}

/// The handles of a template, and the handles of the next template with its number.
struct Templated {
    template: &'static str,
    handles: Arc<LockHandles>,
    next: OnceCell<Box<Self>>,
}

impl Default for PoolHandles {
    fn default() -> Self {
        Self { locks: [const { OnceCell::new() }; 64], store: OnceCell::new() }
    }
}

impl PoolHandles {
    pub(crate) fn of(
        &self,
        template: &'static str,
        make: impl Fn() -> Arc<LockHandles>,
    ) -> Arc<LockHandles> {
        let mut made = None;
        let mut cell = &self.locks[number(template) % self.locks.len()];
        loop {
            let found = match cell.get() {
                Some(found) => found,
                None => {
                    let handles = made.take().unwrap_or_else(&make);
                    let next = OnceCell::new();
                    match cell.try_insert(Box::new(Templated { template, handles, next })) {
                        Ok(inserted) => inserted,
                        Err((found, refused)) => {
                            made = Some(refused.handles);
                            found
                        }
                    }
                }
            };
            if found.template == template {
                return found.handles.clone();
            }
            cell = &found.next;
        }
    }

    /// The handles of the store, and whether they are new.
    pub(crate) fn store(&self, make: impl FnOnce() -> StoreHandles) -> (&StoreHandles, bool) {
        match self.store.get() {
            Some(store) => (store, false),
            None => match self.store.try_insert(make()) {
                Ok(store) => (store, true),
                Err((store, _)) => (store, false),
            },
        }
    }
}

/// FNV-1a of the last bytes, where templates of one program differ.
fn number(template: &str) -> usize {
    let hash = template
        .bytes()
        .rev()
        .take(16)
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (hash ^ (hash >> 16)) as usize
}

fn describe_locks() {
    describe_counter!("lock.attempts", Unit::Count, "Calls for a lock, by their outcome");
    describe_histogram!(
        "lock.wait.duration",
        Unit::Seconds,
        "From the call to the start of the hold"
    );
    describe_histogram!(
        "lock.hold.duration",
        Unit::Seconds,
        "From the start of the hold to its end"
    );
    describe_gauge!("lock.waiting", Unit::Count, "Calls that wait for a lock or an answer");
    describe_gauge!("lock.held", Unit::Count, "Leases that are held now");
    describe_counter!("lock.handoffs", Unit::Count, "Locks given to a task of the process");
    describe_counter!("lock.renewals", Unit::Count, "Renewals of leases, by their outcome");
    describe_counter!("lock.losses", Unit::Count, "Leases that were lost, by the reason");
    describe_counter!("lock.releases", Unit::Count, "Releases at the store, by their outcome");
}

fn describe_stores() {
    describe_counter!("lock.store.requests", Unit::Count, "Calls to the store");
    describe_histogram!("lock.store.request.duration", Unit::Seconds, "Times of these calls");
    describe_gauge!("lock.store.up", Unit::Count, "1 while the store answers, 0 while it does not");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_made_once_for_each_template() {
        let pool = PoolHandles::default();
        let templates: Vec<&'static str> =
            (0..200).map(|id| &*format!("order:<id{id}>").leak()).collect();
        let handles = |template| pool.of(template, || Arc::new(LockHandles::new(None, template)));
        let first: Vec<_> = templates.iter().map(|template| handles(template)).collect();
        for (template, first) in templates.iter().zip(&first) {
            // The same text at another address.
            let again = handles(template.to_string().leak());
            assert!(Arc::ptr_eq(first, &again), "{template}");
        }
        assert!(!Arc::ptr_eq(&first[0], &first[1]));
    }
}
