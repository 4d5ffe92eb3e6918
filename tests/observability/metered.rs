//! The metrics of locks and stores, by the recorder of this program.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use lock_runtime::backend::FailureKind;
use lock_runtime::testing::{Fault, FaultyBackend, Operation, open_backend};
use lock_runtime::{ErrorKind, LockError, LockPool, OnLost, distributed_lock};
use lock_tests::prelude::*;
use lock_tests::runtimes::current_thread;
use lock_tests::{RedisServer, eventually_async, in_own_process};
use metrics::{
    Counter, Gauge, Histogram, Key, KeyName, Label, Metadata, Recorder, SharedString, Unit,
};
use metrics_util::registry::{AtomicStorage, Registry};

use crate::faulty::faulty_pool;
use crate::guide::{names, rows};

/// The metrics of this process.
pub(crate) static RECORDED: LazyLock<Arc<Recorded>> = LazyLock::new(|| {
    let recorded = Arc::<Recorded>::default();
    metrics::set_global_recorder(KeepAll(recorded.clone())).unwrap();
    recorded
});

pub(crate) struct Recorded {
    registry: Registry<Key, AtomicStorage>,
    units: Mutex<BTreeMap<String, Unit>>,
}

impl Default for Recorded {
    fn default() -> Self {
        Self { registry: Registry::new(AtomicStorage), units: Mutex::default() }
    }
}

impl Recorded {
    /// The sum of all counters of this name.
    pub(crate) fn total(&self, name: &str) -> u64 {
        let mut total = 0;
        self.registry.visit_counters(|key, counter| {
            if key.name() == name {
                total += counter.load(Ordering::SeqCst);
            }
        });
        total
    }
}

/// Keeps the values of all metrics.
pub(crate) struct KeepAll(pub(crate) Arc<Recorded>);

impl KeepAll {
    fn describe(&self, name: &KeyName, unit: Option<Unit>, text: &SharedString) {
        assert!(!text.is_empty());
        self.0.units.lock().unwrap().insert(name.as_str().to_owned(), unit.unwrap());
    }
}

impl Recorder for KeepAll {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe(&name, unit, &text);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe(&name, unit, &text);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe(&name, unit, &text);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        self.0.registry.get_or_create_counter(key, |counter| counter.clone().into())
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        self.0.registry.get_or_create_gauge(key, |gauge| gauge.clone().into())
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.0.registry.get_or_create_histogram(key, |histogram| histogram.clone().into())
    }
}

/// One series.
#[derive(Clone, Debug)]
struct Measured {
    kind: &'static str,
    unit: Unit,
    labels: BTreeMap<String, String>,
    /// Of a histogram the number of its values.
    value: f64,
    values: Vec<f64>,
}

/// All metrics of the runtime so far.
#[allow(clippy::cast_precision_loss)]
fn measured() -> Vec<(String, Measured)> {
    let units = RECORDED.units.lock().unwrap();
    let mut all = Vec::new();
    let mut add = |kind, key: &Key, value, values| {
        let text = |label: &Label| (label.key().to_owned(), label.value().to_owned());
        let labels = key.labels().map(text).collect();
        let unit = units[key.name()];
        all.push((key.name().to_owned(), Measured { kind, unit, labels, value, values }));
    };
    let registry = &RECORDED.registry;
    registry.visit_counters(|key, counter| {
        add("counter", key, counter.load(Ordering::SeqCst) as f64, Vec::new());
    });
    registry.visit_gauges(|key, gauge| {
        add("gauge", key, f64::from_bits(gauge.load(Ordering::SeqCst)), Vec::new());
    });
    registry.visit_histograms(|key, histogram| {
        let values = histogram.data();
        add("histogram", key, values.len() as f64, values);
    });
    all
}

/// The metric `name` with all of `labels`. Of several the sum.
#[track_caller]
pub(crate) fn value(name: &str, labels: &[(&str, &str)]) -> f64 {
    let all = measured();
    let fits = |it: &&(String, Measured)| {
        it.0 == name
            && labels
                .iter()
                .all(|(label, value)| it.1.labels.get(*label).is_some_and(|is| is == value))
    };
    let found: Vec<_> = all.iter().filter(fits).collect();
    assert!(!found.is_empty(), "{name} {labels:?} in {all:#?}");
    found.iter().map(|(_, it)| it.value).sum()
}

async fn installed(name: &str, pool: LockPool) -> LockPool {
    lock_runtime::install(name, pool.clone()).unwrap();
    pool
}

#[distributed_lock(key = "metered:<id>", pool = pool, ttl = "3s")]
async fn settle(pool: &LockPool, id: &str, takes: Duration) -> Result<(), LockError> {
    if !takes.is_zero() {
        tokio::time::sleep(takes).await;
    }
    Ok(())
}

#[tokio::test]
async fn attempts_holds_and_waits_are_counted() {
    LazyLock::force(&RECORDED);
    let memory = LockPool::builder("memory://").max_waiters(1).connect().await.unwrap();
    let pool = installed("metered", memory).await;
    let of = |name, label: &str, is: &str| {
        value(name, &[("pool", "metered"), ("template", "metered:<id>"), (label, is)])
    };
    let all = |name| value(name, &[("pool", "metered"), ("template", "metered:<id>")]);
    settle(&pool, "7", ms(20)).await.unwrap();
    assert_eq!(of("lock.attempts", "outcome", "acquired"), 1.0);
    assert_eq!((all("lock.held"), all("lock.waiting")), (0.0, 0.0));
    // Exists at zero.
    for outcome in ["conflict", "queue_full", "cancelled", "backend"] {
        assert_eq!(of("lock.attempts", "outcome", outcome), 0.0);
    }
    {
        let mut held = pin!(settle(&pool, "8", DEADLINE));
        assert!(poll_once(held.as_mut()).await.is_none());
        assert_eq!((all("lock.held"), all("lock.waiting")), (1.0, 0.0));
        let waits = pool.lock("metered:8").template("metered:<id>").wait(DEADLINE);
        let mut waits = pin!(waits.acquire());
        assert!(poll_once(waits.as_mut()).await.is_none());
        assert_eq!((all("lock.held"), all("lock.waiting")), (1.0, 1.0));
        let full = settle(&pool, "8", Duration::ZERO).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::QueueFull);
    }
    // Both were dropped: one in its wait, one in its body.
    eventually_async(DEADLINE, "nothing is held", async || all("lock.held") == 0.0).await;
    assert_eq!(all("lock.waiting"), 0.0);
    for (outcome, count) in [("acquired", 2.0), ("cancelled", 1.0), ("queue_full", 1.0)] {
        assert_eq!(of("lock.attempts", "outcome", outcome), count, "{outcome}");
    }
    assert_eq!(settle(&pool, "", Duration::ZERO).await.unwrap_err().kind(), ErrorKind::InvalidKey);
    assert_eq!(of("lock.attempts", "outcome", "invalid_key"), 1.0);
    // A hand-off in the process.
    let (one, two) = tokio::join!(settle(&pool, "9", ms(60)), settle(&pool, "9", ms(20)));
    one.and(two).unwrap();
    assert_eq!(all("lock.handoffs"), 1.0);
    assert_eq!((all("lock.held"), all("lock.wait.duration")), (0.0, 4.0));
    assert_eq!((all("lock.hold.duration"), of("lock.releases", "outcome", "released")), (4.0, 3.0));
    let spans = |name: &str| {
        let of_pool = |it: &(String, Measured)| it.0 == name && it.1.labels["pool"] == "metered";
        measured().into_iter().find(of_pool).unwrap().1.values
    };
    let (waits, holds) = (spans("lock.wait.duration"), spans("lock.hold.duration"));
    // Less than the hold of the other: this thread may have rested between the two calls.
    assert!(waits.iter().any(|wait| (0.01..20.0).contains(wait)), "in seconds: {waits:?}");
    assert!(holds.iter().filter(|hold| (0.02..20.0).contains(*hold)).count() >= 3, "{holds:?}");
}

#[tokio::test]
async fn losses_and_failures_are_counted() {
    LazyLock::force(&RECORDED);
    let (pool, faults) = faulty_pool("metered-failures").await;
    let of =
        |name, label: &str, is: &str| value(name, &[("pool", "metered-failures"), (label, is)]);
    faults.plan(Operation::Renew, Fault::Fail(FailureKind::NotApplied));
    faults.plan(Operation::Release, Fault::Fail(FailureKind::NotApplied));
    let guard = pool.lock("order:7").ttl(ms(3_000)).acquire().await.unwrap();
    eventually_async(DEADLINE, "renewed after a failure", async || {
        of("lock.renewals", "outcome", "renewed") >= 1.0
    })
    .await;
    assert_eq!(of("lock.renewals", "outcome", "failed"), 1.0);
    guard.release().await.unwrap();
    assert_eq!(of("lock.releases", "outcome", "failed"), 1.0);
    assert_eq!(of("lock.releases", "outcome", "released"), 1.0);
    assert_eq!(of("lock.store.requests", "operation", "release"), 2.0);
    let short = pool.lock("order:8").ttl(ms(50)).renew(false);
    assert_eq!(short.run(std::future::pending::<()>()).await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(of("lock.losses", "reason", "ttl_over"), 1.0);
    assert_eq!(value("lock.losses", &[("pool", "metered-failures")]), 1.0);
    eventually_async(DEADLINE, "its release", async || {
        value("lock.releases", &[("pool", "metered-failures")]) == 3.0
    })
    .await;
    // The loss ended the hold, and the release did not end it again.
    assert_eq!(value("lock.held", &[("pool", "metered-failures")]), 0.0);
    assert_eq!(value("lock.hold.duration", &[("pool", "metered-failures")]), 2.0);
    faults.plan(Operation::Acquire, Fault::Fail(FailureKind::Rejected));
    assert!(pool.lock("order:9").acquire().await.unwrap_err().is_backend());
    assert_eq!(of("lock.attempts", "outcome", "backend"), 1.0);
}

#[tokio::test]
async fn calls_to_a_store_are_measured_and_an_outage_shows() {
    LazyLock::force(&RECORDED);
    let server = RedisServer::start();
    let pool = installed("metered-store", LockPool::connect(&server.url()).await.unwrap()).await;
    let up = || value("lock.store.up", &[("pool", "metered-store")]);
    assert_eq!(up(), 1.0, "before the first call");
    let calls = |operation: &str, outcome: &str| {
        let of_pool = ("pool", "metered-store");
        value("lock.store.requests", &[of_pool, ("operation", operation), ("outcome", outcome)])
    };
    pool.lock("order:7").acquire().await.unwrap().release().await.unwrap();
    assert_eq!((calls("acquire", "answered"), calls("release", "answered")), (1.0, 1.0));
    pool.health().await.unwrap();
    assert_eq!(calls("health", "answered"), 1.0);
    server.kill();
    eventually_async(DEADLINE, "the store is down", async || up() == 0.0).await;
    server.restart();
    eventually_async(DEADLINE, "the store is up", async || up() == 1.0).await;
    assert!(calls("probe", "failed") + calls("probe", "unanswered") >= 1.0);
    // A store that is down as its pool ends is not down for ever.
    server.kill();
    eventually_async(DEADLINE, "the store is down again", async || up() == 0.0).await;
    pool.shutdown(Duration::ZERO).await;
    assert_eq!(up(), 1.0);
    // Pools without a name would share the gauge.
    let of_no_name =
        |it: &(String, Measured)| it.0 == "lock.store.up" && it.1.labels["pool"] == "unnamed";
    server.restart();
    let unnamed = LockPool::connect(&server.url()).await.unwrap();
    unnamed.lock("order:7").acquire().await.unwrap().release().await.unwrap();
    assert!(value("lock.store.requests", &[("pool", "unnamed")]) >= 2.0);
    assert!(!measured().iter().any(of_no_name));
    let spans = measured();
    let spans = spans.iter().find(|(name, it)| {
        name == "lock.store.request.duration"
            && it.labels["pool"] == "metered-store"
            && it.labels["operation"] == "acquire"
    });
    let span = spans.unwrap().1.values[0];
    assert!((0.0..10.0).contains(&span) && span > 0.0, "{span}");
}

/// However many keys there are.
#[test]
fn a_hundred_thousand_keys_are_a_series_for_each_template() {
    let name = concat!(module_path!(), "::a_hundred_thousand_keys_are_a_series_for_each_template");
    // Without the subscriber of other tests.
    in_own_process(name, || current_thread().block_on(a_hundred_thousand_keys()));
}

async fn a_hundred_thousand_keys() {
    LazyLock::force(&RECORDED);
    let pool = installed("metered-keys", memory().await).await;
    settle(&pool, "first", Duration::ZERO).await.unwrap();
    pool.lock("first").acquire().await.unwrap().release().await.unwrap();
    let before = measured().len();
    for id in 0..50_000 {
        settle(&pool, &format!("canary-{id}"), Duration::ZERO).await.unwrap();
        let guard = pool.lock(format!("canary-{}", 50_000 + id)).acquire().await.unwrap();
        guard.release().await.unwrap();
    }
    assert_eq!(measured().len(), before);
    let of_pool = [("pool", "metered-keys")];
    assert_eq!(value("lock.wait.duration", &of_pool), 100_002.0);
    assert_eq!(value("lock.held", &of_pool), 0.0);
    for (_, mut measured) in measured() {
        measured.values.clear();
        assert!(!format!("{measured:?}").contains("canary"));
    }
}

/// Makes each metric change, with each value of its labels.
#[allow(clippy::too_many_lines)]
async fn all_of_it() {
    LazyLock::force(&RECORDED);
    let server = RedisServer::start();
    let (backend, faults) = FaultyBackend::new(open_backend(&server.url()).await.unwrap());
    let pool = LockPool::with_backend(backend).max_waiters(1).request_timeout(ms(1_000));
    let pool = installed("all", pool.connect().await.unwrap()).await;
    // With a fence, a hand-off needs one in reserve.
    let forever = || pool.lock("a").ttl(ms(600_000)).fencing(false);
    // Acquired, passed, would deadlock.
    let inside = async {
        pool.lock("a").reentrant(true).run(async {}).await.unwrap();
        assert!(pool.lock("a").acquire().await.is_err());
    };
    forever().run(inside).await.unwrap();
    // Passing through a lock that is lost: its ttl is over.
    let inside = async {
        eventually_async(DEADLINE, "the lock is lost", async || {
            let again = pool.lock("b").reentrant(true).run(async {}).await;
            again.is_err_and(|error| error.is_lost())
        })
        .await;
    };
    let outer = pool.lock("b").ttl(ms(1_500)).renew(false).on_lost(OnLost::Notify);
    outer.run(inside).await.unwrap();
    // Other losses.
    let capped = pool.lock("c").max_hold(ms(1_000)).acquire().await.unwrap();
    assert!(capped.lost().await.is_lost());
    drop(capped);
    let taken = pool.lock("d").ttl(ms(1_000)).acquire().await.unwrap();
    server.cli(&["DEL", "d"]);
    assert!(taken.lost().await.is_lost());
    drop(taken);
    let found = forever().acquire().await.unwrap();
    server.cli(&["DEL", "a"]);
    assert!(found.release().await.unwrap_err().is_lost());
    let expires = pool.lock("e").ttl(ms(2_000)).acquire().await.unwrap();
    let renewed = || value("lock.renewals", &[("pool", "all"), ("outcome", "renewed")]);
    eventually_async(DEADLINE, "a renewal", async || renewed() >= 1.0).await;
    for _ in 0..1_000 {
        faults.plan(Operation::Renew, Fault::Fail(FailureKind::NotApplied));
    }
    assert!(expires.lost().await.is_lost());
    drop(expires);
    // A conflict, a full queue, a wait that is given up.
    let held = forever().acquire().await.unwrap();
    assert!(pool.lock("a").wait(ms(20)).acquire().await.unwrap_err().is_conflict());
    {
        let mut waiter = pin!(pool.lock("a").wait(DEADLINE).acquire());
        assert!(poll_once(waiter.as_mut()).await.is_none());
        assert_eq!(pool.lock("a").acquire().await.unwrap_err().kind(), ErrorKind::QueueFull);
    }
    held.verify().await.unwrap();
    // A hand-off, and a grant that is not picked up in time.
    let mut next = pin!(forever().acquire());
    assert!(poll_once(next.as_mut()).await.is_none());
    held.release().await.unwrap();
    let held = next.await.unwrap();
    let all = |name: &str| value(name, &[("pool", "all")]);
    let grants = all("lock.wait.duration");
    // The lease ends before the wait does, on a busy machine too.
    let mut late = Box::pin(pool.lock("a").ttl(ms(300)).wait(2 * DEADLINE).acquire());
    assert!(poll_once(late.as_mut()).await.is_none());
    let ends = || all("lock.releases") + all("lock.losses");
    let before = ends();
    held.release().await.unwrap();
    // That release, and the late grant: its renewals fail too.
    eventually_async(DEADLINE, "the grant has ended", async || ends() >= before + 2.0).await;
    assert!(late.await.unwrap_err().is_lost());
    assert_eq!(all("lock.wait.duration"), grants, "of calls that had the lock");
    // Refused calls.
    assert!(pool.lock("").acquire().await.is_err());
    let config = pool.lock("a").reentrant(true).max_hold(ms(1_000)).acquire().await.unwrap_err();
    assert_eq!(config.kind(), ErrorKind::Config);
    faults.plan(Operation::Acquire, Fault::Fail(FailureKind::Rejected));
    assert!(pool.lock("a").acquire().await.unwrap_err().is_backend());
    // Requests without an answer, and releases that fail.
    faults.plan(Operation::Acquire, Fault::LoseReply);
    let guard = pool.lock("g").wait(DEADLINE).acquire().await.unwrap();
    faults.plan(Operation::Release, Fault::Fail(FailureKind::NotApplied));
    guard.release().await.unwrap();
    pool.health().await.unwrap();
    let held = forever().acquire().await.unwrap();
    server.kill();
    let probes = || value("lock.store.requests", &[("pool", "all"), ("operation", "probe")]);
    eventually_async(DEADLINE, "a probe", async || probes() >= 1.0).await;
    pool.shutdown(Duration::ZERO).await;
    drop(held);
    assert_eq!(pool.lock("a").acquire().await.unwrap_err().kind(), ErrorKind::PoolClosed);
}

#[test]
fn the_guide_names_every_metric_with_its_unit_and_labels() {
    let name = concat!(module_path!(), "::the_guide_names_every_metric_with_its_unit_and_labels");
    in_own_process(name, || {
        current_thread().block_on(all_of_it());
        // Each has changed, and not only been made.
        let unchanged: Vec<_> = measured()
            .into_iter()
            .filter(|(name, it)| {
                it.kind == "counter" && name != "lock.store.requests" && it.value == 0.0
            })
            .collect();
        assert!(unchanged.is_empty(), "{unchanged:#?}");
        for label in ["operation", "outcome"] {
            let mut sums = BTreeMap::<_, f64>::new();
            for (name, it) in measured() {
                if name == "lock.store.requests" {
                    *sums.entry(it.labels[label].clone()).or_default() += it.value;
                }
            }
            assert!(sums.values().all(|sum| *sum > 0.0), "{sums:?}");
        }
        for gauge in ["lock.held", "lock.waiting"] {
            assert_eq!(value(gauge, &[("pool", "all")]), 0.0, "{gauge}");
        }
        compare_metrics();
    });
}

fn compare_metrics() {
    let mut seen = BTreeMap::new();
    let mut values: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for (name, measured) in measured() {
        let kind = measured.kind.to_owned();
        let unit = format!("{:?}", measured.unit).to_lowercase();
        let labels: BTreeSet<_> = measured.labels.keys().cloned().collect();
        let (of_kind, of_unit, of_labels) =
            seen.entry(name.clone()).or_insert((kind.clone(), unit.clone(), labels.clone()));
        assert_eq!((&*of_kind, &*of_unit, &*of_labels), (&kind, &unit, &labels), "{name}");
        for (label, value) in measured.labels {
            values.entry((name.clone(), label)).or_default().insert(value);
        }
    }
    let documented: BTreeMap<_, _> = rows(&["metric"])
        .into_iter()
        .map(|row| {
            let labels = names(&row.cells[3]);
            (row.code(), (row.cells[1].clone(), row.cells[2].clone(), labels))
        })
        .collect();
    assert_eq!(seen, documented);
    // The values of the labels.
    let row = |table, name: &str| {
        let row = rows(&[table]).into_iter().find(|row| row.code() == name).unwrap();
        names(row.cells.last().unwrap())
    };
    let of = |name: &str, label: &str| values[&(name.to_owned(), label.to_owned())].clone();
    let mut outcomes = row("label", "outcome");
    outcomes.remove("lock.attempts");
    assert_eq!(of("lock.attempts", "outcome"), outcomes);
    assert_eq!(of("lock.store.requests", "operation"), row("label", "operation"));
    for name in ["lock.renewals", "lock.releases", "lock.store.requests"] {
        assert_eq!(of(name, "outcome"), row("metric", name), "{name}");
    }
    let reasons = rows(&["field"]).into_iter().find(|row| row.code() == "reason").unwrap();
    let reasons = names(&reasons.cells[1].replace("`renew = false`", ""));
    assert_eq!(of("lock.losses", "reason"), reasons);
}
