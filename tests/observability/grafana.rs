//! The dashboard for Grafana of the example `dashboard`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use lock_tests::foreign::installed;
use serde_json::Value;

use crate::guide::{exported_metrics, exported_series};

/// A query of a panel, or of a variable, with its variables replaced by all values.
pub(crate) struct Query {
    /// Its panel.
    pub(crate) title: String,
    pub(crate) expression: String,
    pub(crate) legend: String,
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/dashboard/grafana.json")
}

fn board() -> Value {
    serde_json::from_str(&std::fs::read_to_string(path()).unwrap()).unwrap()
}

fn panels(board: &Value) -> Vec<Value> {
    board["panels"].as_array().unwrap().clone()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}")).to_owned()
}

fn with_all_values(expression: &str) -> String {
    let values =
        [("$pool", ".*"), ("$template", ".*"), ("$__rate_interval", "1m"), ("$__range", "5m")];
    let replaced =
        values.iter().fold(expression.to_owned(), |text, (name, value)| text.replace(name, value));
    assert!(!replaced.contains('$'), "an unknown variable: {expression}");
    replaced
}

/// The queries of all panels.
pub(crate) fn queries() -> Vec<Query> {
    let mut queries = Vec::new();
    for panel in panels(&board()) {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = with_all_values(&text(&target["expr"]));
            let legend = text(&target["legendFormat"]);
            queries.push(Query { title: text(&panel["title"]), expression, legend });
        }
    }
    assert!(queries.len() > 20);
    queries
}

/// The selector and the label of each variable, by its name.
pub(crate) fn variables() -> BTreeMap<String, (String, String)> {
    let mut variables = BTreeMap::new();
    for variable in board()["templating"]["list"].as_array().unwrap() {
        if variable["type"] == "query" {
            let query = with_all_values(&text(&variable["query"]["query"]));
            let query = query.strip_prefix("label_values(").and_then(|it| it.strip_suffix(')'));
            let (selector, label) = query.unwrap().rsplit_once(", ").unwrap();
            let query = (selector.to_owned(), label.to_owned());
            variables.insert(text(&variable["name"]), query);
        }
    }
    variables
}

/// The series of this library that an expression names.
pub(crate) fn series_of(expression: &str) -> BTreeSet<String> {
    let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let words = expression.split(|character| !is_part(character));
    words.filter(|word| word.starts_with("lock_")).map(str::to_owned).collect()
}

#[test]
fn it_shows_every_metric_of_the_guide_and_no_other() {
    let shown: BTreeSet<_> =
        queries().iter().flat_map(|query| series_of(&query.expression)).collect();
    let series = exported_series();
    let unknown: Vec<_> = shown.iter().filter(|name| !series.contains_key(*name)).collect();
    assert!(unknown.is_empty(), "not in the guide: {unknown:?}");
    for metric in exported_metrics().into_keys() {
        let is_shown = shown.iter().any(|name| {
            let part = name.strip_prefix(&metric);
            part.is_some_and(|part| ["", "_bucket", "_sum", "_count"].contains(&part))
        });
        assert!(is_shown, "{metric} is in no panel");
    }
}

#[test]
fn each_panel_has_a_number_a_place_and_a_data_source_that_can_be_chosen() {
    let board = board();
    let variables = board["templating"]["list"].as_array().unwrap();
    let source = variables.iter().find(|variable| variable["type"] == "datasource").unwrap();
    let source = format!("${{{}}}", text(&source["name"]));
    assert_eq!(board["schemaVersion"], 39);
    // Grafana gives the numbers of dashboards; another one may have it.
    assert!(board["id"].is_null());
    assert!(text(&board["uid"]).len() <= 40);
    let (mut numbers, mut places) = (BTreeSet::new(), BTreeMap::new());
    for panel in panels(&board) {
        let title = text(&panel["title"]);
        assert!(numbers.insert(panel["id"].as_u64().unwrap()), "{title} has the id of another one");
        let place = |name: &str| panel["gridPos"][name].as_u64().unwrap();
        assert!(place("x") + place("w") <= 24, "{title} is wider than the grid");
        for x in place("x")..place("x") + place("w") {
            for y in place("y")..place("y") + place("h") {
                let other = places.insert((x, y), title.clone());
                assert!(other.is_none(), "{title} is on {other:?}");
            }
        }
        if panel["type"] == "row" {
            continue;
        }
        assert!(text(&panel["description"]).ends_with('.'), "{title} says what it shows");
        let targets = panel["targets"].as_array().unwrap();
        let names: BTreeSet<_> = targets.iter().map(|target| text(&target["refId"])).collect();
        assert!(!targets.is_empty() && names.len() == targets.len(), "{title}: {names:?}");
        for part in targets.iter().chain([&panel]) {
            assert_eq!(part["datasource"]["uid"], *source, "{title}");
            assert_eq!(part["datasource"]["type"], "prometheus", "{title}");
        }
    }
    for variable in variables.iter().filter(|variable| variable["type"] == "query") {
        assert_eq!(variable["datasource"]["uid"], *source);
    }
}

/// The schema is what Grafana publishes as a package, of the version in `tests/foreign/install.sh`.
#[test]
fn its_fields_are_those_of_the_schema_of_grafana() {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("foreign/grafana.mjs");
    let compared = |file: &Path| {
        let mut node = Command::new("node");
        node.arg(&program).arg(file).env("MODULES", installed("grafana"));
        let output = node.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    };
    let (is_valid, says) = compared(&path());
    assert!(is_valid && says.contains(" 0 errors"), "{says}");
    // Of a field that does not exist, and of a value that it cannot have.
    let folder = tempfile::tempdir().unwrap();
    let whole = std::fs::read_to_string(path()).unwrap();
    for (right, wrong) in [("\"gridPos\"", "\"gridpos\""), ("\"absolute\"", "\"relative\"")] {
        let file = folder.path().join("changed.json");
        assert!(whole.contains(right));
        std::fs::write(&file, whole.replacen(right, wrong, 1)).unwrap();
        let (is_valid, says) = compared(&file);
        assert!(!is_valid && says.contains(wrong), "{wrong}: {says}");
    }
}
