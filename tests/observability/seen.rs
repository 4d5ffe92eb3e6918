//! The subscriber of this program: keeps all events and spans of the runtime, and the spans of the tests.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, LazyLock, Mutex};

use lock_tests::eventually_async;
use lock_tests::prelude::DEADLINE;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

pub(crate) type Fields = BTreeMap<&'static str, String>;

/// An event of the runtime.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) level: Level,
    /// All fields of the metadata, recorded or not.
    pub(crate) declared: Vec<&'static str>,
    pub(crate) fields: Fields,
    /// The spans around it, innermost first, by their numbers.
    pub(crate) scope: Vec<u64>,
}

/// A span of any target.
#[derive(Clone, Debug)]
pub(crate) struct SeenSpan {
    pub(crate) id: u64,
    pub(crate) name: &'static str,
    pub(crate) target: &'static str,
    pub(crate) level: Level,
    /// All fields of the metadata, recorded or not.
    pub(crate) declared: Vec<&'static str>,
    pub(crate) fields: Fields,
    pub(crate) parent: Option<u64>,
    pub(crate) is_closed: bool,
}

#[derive(Debug, Default)]
struct All {
    events: Vec<Seen>,
    spans: Vec<SeenSpan>,
}

static ALL: LazyLock<Mutex<All>> = LazyLock::new(|| {
    let subscriber = tracing_subscriber::registry().with(Collect);
    tracing::subscriber::set_global_default(subscriber).unwrap();
    Mutex::default()
});

/// While it is set, the subscriber blocks in each event.
static BLOCKED: AtomicBool = AtomicBool::new(false);
static UNBLOCKED: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
/// It blocks in an event now.
static BLOCKS: AtomicBool = AtomicBool::new(false);

pub(crate) fn block(is_blocked: bool) {
    let _lock = UNBLOCKED.0.lock().unwrap();
    BLOCKED.store(is_blocked, Ordering::SeqCst);
    UNBLOCKED.1.notify_all();
}

pub(crate) async fn blocked_in_an_event() {
    eventually_async(DEADLINE, "an event blocks", async || BLOCKS.load(Ordering::SeqCst)).await;
}

/// Installs the subscriber.
pub(crate) fn watch() {
    LazyLock::force(&ALL);
}

pub(crate) fn all_events() -> Vec<Seen> {
    ALL.lock().unwrap().events.clone()
}

pub(crate) fn all_spans() -> Vec<SeenSpan> {
    ALL.lock().unwrap().spans.clone()
}

/// The number that spans have here. The registry uses its own again.
#[derive(Clone, Copy)]
struct Number(u64);

struct Collect;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collect {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let metadata = attributes.metadata();
        let span = context.span(id).unwrap();
        let number_of = |span: &Id| {
            context.span(span).and_then(|span| span.extensions().get::<Number>().map(|it| it.0))
        };
        let parent = span.parent().and_then(|parent| number_of(&parent.id()));
        let mut all = ALL.lock().unwrap();
        let number = all.spans.len() as u64;
        span.extensions_mut().insert(Number(number));
        let mut fields = Text::default();
        attributes.record(&mut fields);
        all.spans.push(SeenSpan {
            id: number,
            name: metadata.name(),
            target: metadata.target(),
            level: *metadata.level(),
            declared: metadata.fields().iter().map(|field| field.name()).collect(),
            fields: fields.0,
            parent,
            is_closed: false,
        });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let mut fields = Text::default();
        values.record(&mut fields);
        change(id, &context, |span| span.fields.extend(fields.0));
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        change(&id, &context, |span| span.is_closed = true);
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        if event.metadata().target() != "lock_runtime" {
            return;
        }
        let mut blocked = UNBLOCKED.0.lock().unwrap();
        while BLOCKED.load(Ordering::SeqCst) {
            BLOCKS.store(true, Ordering::SeqCst);
            blocked = UNBLOCKED.1.wait(blocked).unwrap();
        }
        BLOCKS.store(false, Ordering::SeqCst);
        drop(blocked);
        let scope = context.event_scope(event).into_iter().flatten();
        let scope = scope.filter_map(|span| span.extensions().get::<Number>().map(|it| it.0));
        let scope = scope.collect();
        let mut fields = Text::default();
        event.record(&mut fields);
        let metadata = event.metadata();
        let declared = metadata.fields().iter().map(|field| field.name()).collect();
        let seen = Seen { level: *metadata.level(), declared, fields: fields.0, scope };
        ALL.lock().unwrap().events.push(seen);
    }
}

fn change<S: Subscriber + for<'a> LookupSpan<'a>>(
    id: &Id,
    context: &Context<'_, S>,
    change: impl FnOnce(&mut SeenSpan),
) {
    let span = context.span(id).unwrap();
    let number = span.extensions().get::<Number>().unwrap().0;
    change(&mut ALL.lock().unwrap().spans[usize::try_from(number).unwrap()]);
}

#[derive(Default)]
struct Text(Fields);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.into());
    }
}

#[track_caller]
fn assert_fields(fields: &Fields, expected: &[(&str, &str)]) {
    for (name, value) in expected {
        assert_eq!(fields.get(name).map(String::as_str), Some(*value), "{name}: {fields:?}");
    }
}

impl Seen {
    pub(crate) fn message(&self) -> &str {
        &self.fields["message"]
    }

    #[track_caller]
    pub(crate) fn has(&self, fields: &[(&str, &str)]) {
        assert_fields(&self.fields, fields);
    }

    #[track_caller]
    pub(crate) fn number(&self, field: &str) -> u64 {
        self.fields[field].parse().unwrap()
    }
}

impl SeenSpan {
    #[track_caller]
    pub(crate) fn has(&self, fields: &[(&str, &str)]) {
        assert_fields(&self.fields, fields);
    }

    #[track_caller]
    pub(crate) fn number(&self, field: &str) -> u64 {
        self.fields[field].parse().unwrap()
    }
}

/// The calls of one pool, when `count` of them have ended: their spans, in the order of the calls.
pub(crate) async fn calls_of(pool: &str, count: usize) -> Vec<SeenSpan> {
    let mut calls = Vec::new();
    eventually_async(DEADLINE, "the spans of all calls are closed", async || {
        let of_pool = |span: &SeenSpan| {
            span.target == "lock_runtime" && span.fields.get("pool").is_some_and(|it| it == pool)
        };
        calls = all_spans().into_iter().filter(of_pool).collect();
        calls.len() >= count && calls.iter().all(|call| call.is_closed)
    })
    .await;
    assert_eq!(calls.len(), count, "{calls:#?}");
    calls
}

/// The events of one pool.
pub(crate) struct Traced {
    pool: String,
    pub(crate) events: Vec<Seen>,
}

impl Traced {
    pub(crate) fn of(pool: &str) -> Self {
        let of_pool = |seen: &Seen| seen.fields.get("pool").is_some_and(|it| it == pool);
        Self { pool: pool.to_owned(), events: all_events().into_iter().filter(of_pool).collect() }
    }

    pub(crate) async fn await_event(self, message: &str) -> Self {
        self.await_events(message, 1).await
    }

    pub(crate) async fn await_events(mut self, message: &str, count: usize) -> Self {
        eventually_async(DEADLINE, message, async || {
            self = Self::of(&self.pool);
            self.all(message).len() >= count
        })
        .await;
        self
    }

    pub(crate) fn all(&self, message: &str) -> Vec<&Seen> {
        self.events.iter().filter(|seen| seen.message() == message).collect()
    }

    #[track_caller]
    pub(crate) fn one(&self, message: &str) -> &Seen {
        let all = self.all(message);
        assert_eq!(all.len(), 1, "{message}: {:#?}", self.events);
        all[0]
    }
}
