//! Different arguments never give the same key.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lock_runtime::__private::{KeyPart, Location, LockOptions, Site, literal, template};
use lock_runtime::{ErrorKind, Key, LockError, LockPool, distributed_lock};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// A template as the attribute expands it; `texts[i]` is the literal text behind placeholder `i`.
struct Template {
    site: Site,
    head: &'static str,
    texts: &'static [&'static str],
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

impl Template {
    const fn new(
        template: &'static str,
        head: &'static str,
        texts: &'static [&'static str],
    ) -> Self {
        let location = Location { module: "keys", function: "f", file: file!(), line: line!() };
        Self { site: Site::new(location, template, LockOptions::new()), head, texts }
    }

    fn render<S: AsRef<str>>(&'static self, values: &[S]) -> Result<Key, LockError> {
        assert_eq!(values.len(), self.texts.len());
        let values: Vec<&str> = values.iter().map(AsRef::as_ref).collect();
        let parts = values.iter().zip(self.texts).zip(NAMES);
        let parts: Vec<_> =
            parts.map(|((value, &text), name)| (name, value as &dyn KeyPart, text)).collect();
        template(&self.site, self.head, &parts)
    }

    /// The result of a plain format string.
    fn render_naively(&self, values: &[String]) -> String {
        let parts = values.iter().zip(self.texts).map(|(value, text)| format!("{value}{text}"));
        [self.head.to_owned()].into_iter().chain(parts).collect()
    }
}

static TEMPLATES: [Template; 8] = [
    Template::new("order:<a>", "order:", &[""]),
    Template::new("t:<a>:<b>", "t:", &[":", ""]),
    Template::new("<a>-<b>:<c>", "", &["-", ":", ""]),
    Template::new("{<a>}/<b>[<c>]:<d>", "{", &["}/", "[", "]:", ""]),
    Template::new("<a> <b>", "", &[" ", ""]),
    Template::new("<a>:x:<b>", "", &[":x:", ""]),
    Template::new("<a>ü<b>.<c>", "", &["ü", ".", ""]),
    Template::new("lock/<a>::<b>~<c>", "lock/", &["::", "~", ""]),
];

/// Separators, escapes, and the characters of escapes.
const ALPHABET: [&str; 32] = [
    ":", "-", "/", ".", "~", " ", "ü", "::", ":x:", "}/", "]:", "{", "}", "[", "]", "<", ">", "%",
    "%", "2", "3", "5", "A", "a", "%3A", "%3a", "%25", "%7D", "x", "\0", "\r\n", "\u{301}",
];

/// All ways to read `text` as values of `template`, were they not escaped; and its cuts in as many
/// parts without a separator in between.
fn readings(template: &Template, text: &[&str]) -> Vec<Vec<String>> {
    let separators = template.texts.split_last().map_or(&[][..], |(_, separators)| separators);
    let mut readings = Vec::new();
    read(text, separators, &mut Vec::new(), &mut readings);
    readings
}

fn read(text: &[&str], separators: &[&str], so_far: &mut Vec<String>, all: &mut Vec<Vec<String>>) {
    let Some((separator, separators)) = separators.split_first() else {
        if !text.is_empty() {
            all.push([so_far.as_slice(), &[text.concat()]].concat());
        }
        return;
    };
    for at in 1..text.len() {
        so_far.push(text[..at].concat());
        read(&text[at..], separators, so_far, all);
        if text[at] == *separator {
            read(&text[at + 1..], separators, so_far, all);
        }
        so_far.pop();
    }
}

/// `values`, and once with each of them written as if it were escaped already.
fn with_twins(values: &[String]) -> Vec<Vec<String>> {
    let escaped = |value: &str| {
        let escape = |c: char| match c {
            'a'..='z' | 'A'..='Z' | '0'..='9' => c.to_string(),
            _ => c.to_string().bytes().map(|byte| format!("%{byte:02X}")).collect(),
        };
        value.chars().map(escape).collect::<String>()
    };
    let mut twins = vec![values.to_vec()];
    for at in 0..values.len() {
        let mut twin = values.to_vec();
        twin[at] = escaped(&twin[at]);
        twins.push(twin);
    }
    twins
}

/// Renders all of `tuples`. Returns how many different ones collided without the escapes.
fn check_injective(template: &'static Template, tuples: Vec<Vec<String>>) -> usize {
    let mut keys = HashMap::new();
    let mut naive = HashMap::new();
    let mut near = 0;
    for values in tuples {
        let key = template.render(&values).unwrap();
        assert!(key.as_str().len() <= 512, "{key:?}");
        assert!(!key.as_str().contains(char::is_control), "{key:?} cannot be read in a log");
        let others =
            naive.entry(template.render_naively(&values)).or_insert_with(|| values.clone());
        near += usize::from(*others != values);
        if let Some(other) = keys.insert(key.clone(), values.clone()) {
            assert_eq!(other, values, "both give {key:?}");
        }
    }
    near
}

fn runner(cases: u32) -> TestRunner {
    TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() })
}

/// `LOCK_KEY_TUPLES` sets their number.
#[test]
fn tuples_made_to_collide_do_not() {
    let rendered = std::env::var("LOCK_KEY_TUPLES").map(|count| count.parse().expect("a number"));
    let wanted: usize = rendered.unwrap_or(200_000);
    let check = |template: &'static Template| {
        let (mut rendered, mut near) = (0, 0);
        let separators = template.texts.iter().filter(|text| !text.is_empty());
        let bias = separators.flat_map(|&text| [text; 8]);
        let tokens: Vec<_> = ALPHABET.into_iter().chain(bias).collect();
        let text = prop::collection::vec(prop::sample::select(tokens), 1..=9);
        while rendered < wanted / TEMPLATES.len() {
            let (now, near_now) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
            runner(1000)
                .run(&text, |text| {
                    let tuples = readings(template, &text)
                        .into_iter()
                        .flat_map(|values| with_twins(&values));
                    let tuples: Vec<_> = tuples.collect();
                    now.set(now.get() + tuples.len());
                    near_now.set(near_now.get() + check_injective(template, tuples));
                    Ok(())
                })
                .unwrap();
            rendered += now.get();
            near += near_now.get();
        }
        (rendered, near)
    };
    let (rendered, near) = std::thread::scope(|scope| {
        let checks: Vec<_> = TEMPLATES.iter().map(|it| scope.spawn(move || check(it))).collect();
        let sums = checks.into_iter().map(|check| check.join().unwrap());
        sums.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    });
    println!("{rendered} rendered, {near} of them would collide without escapes");
    assert!(rendered >= wanted, "{rendered}");
    assert!(near > wanted / 100, "only {near} tuples were made to collide");
}

/// The named ones, and some that read alike.
fn hostile_values() -> Vec<String> {
    let long = "ä".repeat(400);
    [
        "1:paid", "1", "paid", "a}b{c", "a", "A", "b{c", " ", "\0", "\r\n", "\n", "*", "../x",
        "%2F", "/", "%2f", "%", "%25", "é", "e\u{301}", "É", "<b>", ":", "\u{a0}", "\u{2028}",
        "😀",
    ]
    .map(str::to_owned)
    .into_iter()
    .chain([
        format!("{long}1"),
        format!("{long}2"),
        "x".repeat(511),
        "x".repeat(512),
        "x".repeat(513),
    ])
    .collect()
}

#[test]
fn hostile_values_give_as_many_keys_as_there_are_values() {
    let values = hostile_values();
    for template in &TEMPLATES {
        let mut keys = HashMap::new();
        for one in &values {
            for two in &values {
                let mut tuple: Vec<&str> = vec![one, two, "1", "1"];
                tuple.truncate(template.texts.len());
                let key = template.render(&tuple).unwrap();
                assert!(key.as_str().len() <= 512);
                if let Some(other) = keys.insert(key, tuple.clone()) {
                    assert_eq!(other, tuple);
                }
            }
        }
        let expected = if template.texts.len() == 1 { values.len() } else { values.len().pow(2) };
        assert_eq!(keys.len(), expected);
    }
}

#[test]
fn values_of_a_megabyte_are_served() {
    let megabyte = "m".repeat(1 << 20);
    let (one, two) = (format!("{megabyte}1"), format!("{megabyte}2"));
    let tuples = [[&one, "b"], [&two, "b"], [&one, "c"], ["b", &one], ["b", &two]];
    let key = |tuple: &[&str; 2]| TEMPLATES[1].render(tuple).unwrap();
    let keys: HashSet<Key> = tuples.iter().map(key).collect();
    assert_eq!(keys.len(), tuples.len());
    assert!(keys.iter().all(|key| key.as_str().len() <= 512));
}

/// So long that the tail is hashed, with the difference in the head, the tail or the length.
#[test]
fn long_values_stay_different() {
    let text = prop::collection::vec(prop::sample::select(&ALPHABET[..]), 2..=5);
    for template in &TEMPLATES {
        runner(200)
            .run(&(text.clone(), 440..520_usize), |(text, length)| {
                let padding = "p".repeat(length);
                let pad = |values: Vec<String>, at: usize| {
                    let front = |value: &String| format!("{padding}{value}");
                    let back = |value: &String| format!("{value}{padding}");
                    let padded = [front(&values[at]), back(&values[at])];
                    padded.map(|padded| [&values[..at], &[padded], &values[at + 1..]].concat())
                };
                let tuples =
                    readings(template, &text).into_iter().flat_map(|values| with_twins(&values));
                let tuples = tuples.flat_map(|values| {
                    let all: Vec<_> = (0..values.len()).map(|at| pad(values.clone(), at)).collect();
                    all.into_iter().flatten()
                });
                check_injective(template, tuples.take(40).collect());
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn an_empty_value_is_an_error_that_names_its_placeholder() {
    for template in &TEMPLATES {
        for (at, name) in NAMES.iter().enumerate().take(template.texts.len()) {
            let mut values = vec!["1"; template.texts.len()];
            values[at] = "";
            let error = template.render(&values).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidKey);
            assert!(error.to_string().contains(&format!("`<{name}>`")), "{error}");
            assert!(
                error.template().is_some_and(|it| it.contains(&format!("<{name}>"))),
                "{error}"
            );
        }
    }
    assert_eq!(literal("").unwrap_err().kind(), ErrorKind::InvalidKey);
}

#[distributed_lock(key = "{<a>}/<b>[<c>]:<d>", pool = pool, guard = held)]
async fn key_of_four(
    pool: &LockPool,
    a: &str,
    b: &str,
    c: &str,
    d: &str,
) -> Result<Key, LockError> {
    Ok(held.key().clone())
}

#[distributed_lock(key = "t:<a>:<b>", pool = pool, guard = held)]
async fn key_of_two(pool: &LockPool, a: &str, b: &str) -> Result<Key, LockError> {
    Ok(held.key().clone())
}

#[tokio::test]
async fn the_attribute_renders_like_the_table_above() {
    let pool = LockPool::connect("memory://").await.unwrap();
    for value in &hostile_values() {
        let key = key_of_two(&pool, value, "b").await.unwrap();
        assert_eq!(key, TEMPLATES[1].render(&[value, "b"]).unwrap());
        let key = key_of_four(&pool, "a", value, value, "d").await.unwrap();
        assert_eq!(key, TEMPLATES[3].render(&["a", value, value, "d"]).unwrap());
    }
}

/// A value that is behind a mutex, and one that is found by an index and has no size.
struct Job {
    label: Mutex<Label>,
    tags: Tags,
}

struct Label(String, Duration);

impl Label {
    const fn ms(&self) -> Duration {
        self.1
    }
}

struct Tags(&'static str);

impl std::ops::Index<usize> for Tags {
    type Output = str;

    fn index(&self, at: usize) -> &str {
        &self.0[at..]
    }
}

impl Job {
    fn new(label: &str) -> Self {
        let label = Label(label.to_owned(), Duration::from_millis(10));
        Self { label: Mutex::new(label), tags: Tags("tag") }
    }

    fn label(&self) -> MutexGuard<'_, Label> {
        self.label.try_lock().expect("no other guard lives")
    }
}

#[distributed_lock(key = "<job.label().0>:<job.label().0>:<job.tags[from]>", wait = job.label().ms(), pool = pool, guard = held)]
async fn key_of_guards(pool: &LockPool, job: &Job, from: usize) -> Result<Key, LockError> {
    drop(job.label());
    Ok(held.key().clone())
}

#[distributed_lock(key = "<job.label().0>", wait = job.label().ms(), pool = pool, guard = held)]
async fn key_of_a_guard(pool: &LockPool, job: &Job) -> Result<Key, LockError> {
    drop(job.label());
    Ok(held.key().clone())
}

#[distributed_lock(keys = [job.label().0.clone(), "tag:<job.tags[0]>", format!("2:{}", job.label().0)], wait = job.label().ms(), ttl = job.label().ms() * 100, pool = pool, guard = held)]
async fn computed_keys_of_guards(pool: &LockPool, job: &Job) -> Result<Vec<Key>, LockError> {
    drop(job.label());
    Ok(held.keys().to_vec())
}

#[distributed_lock(keys = ["1:<job.label().0>", "2:<job.label().0>"], wait = job.label().ms(), pool = pool, guard = held)]
async fn keys_of_guards(pool: &LockPool, job: &Job) -> Result<Vec<Key>, LockError> {
    drop(job.label());
    Ok(held.keys().to_vec())
}

#[tokio::test]
async fn a_guard_in_a_key_ends_before_the_next_value_and_the_body() {
    let pool = LockPool::connect("memory://").await.unwrap();
    let job = Job::new("a");
    assert_eq!(key_of_guards(&pool, &job, 1).await.unwrap().as_str(), "a:a:ag");
    assert_eq!(key_of_a_guard(&pool, &job).await.unwrap().as_str(), "a");
    let keys = keys_of_guards(&pool, &job).await.unwrap();
    assert_eq!(keys, [Key::from("1:a"), Key::from("2:a")]);
    let keys = computed_keys_of_guards(&pool, &job).await.unwrap();
    assert_eq!(keys, ["2:a", "a", "tag:tag"].map(Key::from));
}

static RUNS: AtomicUsize = AtomicUsize::new(0);

#[distributed_lock(key = "tenant:<tenant>:<id>", pool = pool)]
async fn counts(pool: &LockPool, tenant: &str, id: u64) -> Result<usize, LockError> {
    Ok(RUNS.fetch_add(1, Ordering::SeqCst))
}

#[tokio::test]
async fn an_empty_argument_ends_the_call_before_the_body() {
    let pool = LockPool::connect("memory://").await.unwrap();
    let error = counts(&pool, "", 7).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey);
    assert_eq!(error.template(), Some("tenant:<tenant>:<id>"));
    assert!(error.to_string().contains("`<tenant>`"), "{error}");
    assert_eq!(RUNS.load(Ordering::SeqCst), 0);
    assert_eq!(counts(&pool, "t", 7).await.unwrap(), 0, "the same call with a value runs");
    let error = pool.lock("").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey);
    let error = pool.lock_all(["a", ""]).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey);
}

#[test]
fn text_of_every_type_is_a_key() {
    let text = String::from("order:7");
    let keys = [
        Key::from(text.as_str()),
        Key::from(&text.as_str()),
        Key::from(&text),
        Key::from(text.clone()),
        Key::from(text.clone().into_boxed_str()),
        Key::from(Arc::<str>::from(text.as_str())),
        Key::from(Cow::Borrowed(text.as_str())),
        Key::from(Cow::<'static, str>::Owned(text.clone())),
    ];
    assert!(keys.iter().all(|key| key.as_str() == text), "{keys:?}");
}

#[test]
fn a_literal_key_allocates_nothing() {
    let literal = allocation_counter::measure(|| {
        let key = literal("jobs:nightly").unwrap();
        let copy = key.clone();
        assert_eq!((key.as_str(), copy), ("jobs:nightly", key.clone()));
    });
    assert_eq!(literal.count_total, 0);
    // The counter counts.
    let copied = allocation_counter::measure(|| drop(Key::from("jobs:nightly")));
    assert_eq!(copied.count_total, 1);
}

/// Names of auxiliary keys are no locks, in any store and by any template.
#[tokio::test]
async fn names_of_what_is_kept_beside_locks_are_refused() {
    let server = lock_tests::RedisServer::start();
    for url in ["memory://", &server.url()] {
        let pool = LockPool::builder(url).key_prefix("lock_").connect().await.unwrap();
        for key in ["app:lock_runtime:fence", "runtime:fence", "order:7:lock_runtime:line"] {
            let error = pool.lock_all(["a", key]).acquire().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidKey, "{key}");
            assert!(error.to_string().contains("`lock_runtime:`"), "{error}");
        }
        pool.lock("order:7").acquire().await.unwrap().release().await.unwrap();
        let error = LockPool::builder(url).key_prefix("lock_runtime:").connect().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
}
