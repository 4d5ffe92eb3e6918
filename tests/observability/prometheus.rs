//! The example `dashboard`, scraped by a real Prometheus with the alert rules of the example.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use lock_tests::folder::new_folder;
use lock_tests::prelude::*;
use lock_tests::prometheus::promtool;
use lock_tests::{PrometheusServer, RedisServer, Worker, eventually_async, example};
use serde_json::Value;
use tempfile::TempDir;

use crate::grafana::{queries, series_of, variables};
use crate::guide::{exported_metrics, exported_series};

/// What Prometheus adds to each target.
const ADDED: [&str; 5] = [
    "up",
    "scrape_duration_seconds",
    "scrape_samples_scraped",
    "scrape_samples_post_metric_relabeling",
    "scrape_series_added",
];

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/dashboard").join(name)
}

fn read(name: &str) -> String {
    fs::read_to_string(file(name)).unwrap()
}

/// The example at work on a store, and a Prometheus that has scraped it several times meanwhile.
struct Scraped {
    prometheus: PrometheusServer,
    store: RedisServer,
    _example: Worker,
    _folder: TempDir,
}

impl Scraped {
    async fn start() -> Self {
        let store = RedisServer::start();
        let example = Worker::start(&example("dashboard"), &[&store.url(), "0"]);
        let line = example.wait_for_line(DEADLINE, |line| line.starts_with("scrape http://"));
        let address = line.trim_start_matches("scrape http://").trim_end_matches("/metrics");
        // The configuration of the example, but for its port, and more often.
        let configuration = read("prometheus.yml");
        let (port, interval) = ("127.0.0.1:8080", "_interval: 5s");
        assert!(configuration.contains(port) && configuration.matches(interval).count() == 2);
        let configuration =
            configuration.replace(port, address).replace(interval, "_interval: 200ms");
        let folder = new_folder();
        let path = folder.path().join("prometheus.yml");
        fs::write(&path, configuration).unwrap();
        fs::write(folder.path().join("alerts.yml"), read("alerts.yml")).unwrap();
        let prometheus = PrometheusServer::start(&path).await;
        let scraped = Self { prometheus, store, _example: example, _folder: folder };
        // Rates need the values of several scrapes.
        scraped.until_more_are_granted(5.0).await;
        scraped
    }

    async fn until_more_are_granted(&self, count: f64) {
        let granted = r#"sum(lock_attempts{outcome="acquired"})"#;
        let mut first = None;
        eventually_async(2 * DEADLINE, "calls are granted", async || {
            // No faster than the scrapes.
            tokio::time::sleep(ms(100)).await;
            let now = self.prometheus.query(granted).await.first().map(value);
            first = first.or(now);
            now > first.map(|first| first + count)
        })
        .await;
    }

    /// The labels of all series of the example, with the name as one of them.
    async fn series(&self) -> Vec<BTreeMap<String, String>> {
        let data = self.prometheus.data("series", &[("match[]", r#"{job="locks"}"#)]).await;
        let series: Vec<BTreeMap<String, String>> = serde_json::from_value(data).unwrap();
        let is_own = |labels: &BTreeMap<_, _>| !ADDED.contains(&name_of(labels));
        series.into_iter().filter(is_own).collect()
    }

    /// The active alert of this name.
    async fn alert(&self, name: &str) -> Option<Value> {
        let mut alerts = self.prometheus.data("alerts", &[]).await;
        let mut alerts = alerts["alerts"].as_array_mut().unwrap().drain(..);
        alerts.find(|alert| alert["labels"]["alertname"] == name)
    }
}

fn name_of(labels: &BTreeMap<String, String>) -> &str {
    &labels["__name__"]
}

/// The value of one series in the result of a query.
fn value(series: &Value) -> f64 {
    series["value"][1].as_str().and_then(|text| text.parse().ok()).unwrap()
}

#[tokio::test]
async fn every_metric_of_the_guide_is_scraped_and_no_other() {
    let scraped = Scraped::start().await;
    let series = scraped.series().await;
    let mut found = BTreeMap::new();
    let mut values = BTreeMap::<_, BTreeSet<_>>::new();
    for labels in &series {
        let mut names: BTreeSet<_> = labels.keys().cloned().collect();
        for of_prometheus in ["__name__", "instance", "job"] {
            assert!(names.remove(of_prometheus));
        }
        let of_name = found.entry(name_of(labels).to_owned()).or_insert(names.clone());
        assert_eq!(*of_name, names, "{labels:?}");
        for (label, value) in labels {
            values.entry(label.as_str()).or_default().insert(value.as_str());
        }
    }
    assert_eq!(found, exported_series());
    assert_eq!(values["pool"], BTreeSet::from(["default"]));
    assert_eq!(values["template"], BTreeSet::from(["order:<id>", "report:daily"]));

    let metadata = scraped.prometheus.data("metadata", &[]).await;
    let mut types = BTreeMap::new();
    for (name, about) in metadata.as_object().unwrap() {
        assert!(!about[0]["help"].as_str().unwrap().is_empty(), "{name}");
        types.insert(name.clone(), about[0]["type"].as_str().unwrap().to_owned());
    }
    let documented = exported_metrics().into_iter().map(|(name, (kind, _))| (name, kind));
    assert_eq!(types, documented.collect::<BTreeMap<_, _>>());

    // 67 for each of two templates, and those of the store, as the guide says.
    assert_eq!(series.len(), 2 * 67 + 139);
    // Calls change values, and make no series.
    scraped.until_more_are_granted(10.0).await;
    assert_eq!(scraped.series().await.len(), series.len());
}

#[tokio::test]
async fn every_panel_of_the_dashboard_shows_a_value() {
    let scraped = Scraped::start().await;
    for query in queries() {
        let shown = scraped.prometheus.query(&query.expression).await;
        let (title, expression) = (&query.title, &query.expression);
        assert!(shown.iter().any(|it| value(it).is_finite()), "{title}: {expression}: {shown:?}");
        let labels = query.legend.split("{{").skip(1).map(|it| it.split("}}").next().unwrap());
        for label in labels {
            let is_there = |series: &Value| series["metric"].get(label).is_some();
            assert!(shown.iter().all(is_there), "{title}: {label} in {shown:?}");
        }
    }
    for (name, (selector, label)) in variables() {
        let path = format!("label/{label}/values");
        let offered = scraped.prometheus.data(&path, &[("match[]", &selector)]).await;
        assert!(!offered.as_array().unwrap().is_empty(), "{name}: {selector}");
    }
}

#[tokio::test]
async fn a_lost_lease_and_a_store_that_is_down_raise_alerts() {
    let scraped = Scraped::start().await;
    let mut rules = Vec::new();
    eventually_async(DEADLINE, "all rules are evaluated", async || {
        let data = scraped.prometheus.data("rules", &[]).await;
        rules = data["groups"][0]["rules"].as_array().unwrap().clone();
        assert!(rules.iter().all(|rule| rule["lastError"].is_null()), "{rules:#?}");
        rules.iter().all(|rule| rule["health"] == "ok")
    })
    .await;
    let (series, tests) = (exported_series(), read("alerts_test.yml"));
    for rule in &rules {
        let named = series_of(rule["query"].as_str().unwrap());
        assert!(!named.is_empty() && named.iter().all(|name| series.contains_key(name)), "{rule}");
        for text in ["summary", "description"] {
            assert!(
                rule["annotations"][text].as_str().is_some_and(|it| it.ends_with('.')),
                "{rule}"
            );
        }
        let name = rule["name"].as_str().unwrap();
        assert!(tests.contains(&format!("alertname=\"{name}\"")), "{name} has no test");
    }
    assert_eq!(rules.len(), read("alerts.yml").matches("- alert: ").count());

    assert_eq!(scraped.alert("LockLost").await, None);
    eventually_async(DEADLINE, "a key that is held is deleted", async || {
        scraped.store.cli(&["DEL", "report:daily"]) == "1"
    })
    .await;
    eventually_async(DEADLINE, "the loss is an alert", async || {
        let Some(alert) = scraped.alert("LockLost").await else { return false };
        assert_eq!(alert["labels"]["template"], "report:daily", "{alert}");
        let summary = alert["annotations"]["summary"].as_str().unwrap();
        assert!(summary.starts_with("A lease of report:daily was lost: "), "{alert}");
        alert["state"] == "firing"
    })
    .await;

    assert_eq!(scraped.alert("LockStoreDown").await, None);
    scraped.store.kill();
    eventually_async(DEADLINE, "the outage is an alert, pending until it lasts", async || {
        scraped.alert("LockStoreDown").await.is_some()
    })
    .await;
}

#[test]
fn promtool_accepts_the_configuration_and_the_rules_with_their_tests() {
    promtool(&["check", "config"], &file("prometheus.yml"));
    promtool(&["check", "rules"], &file("alerts.yml"));
    promtool(&["test", "rules"], &file("alerts_test.yml"));
}
