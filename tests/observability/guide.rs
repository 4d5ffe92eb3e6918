//! The tables of the guide.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A row of the table whose first column has one of the headings.
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) cells: Vec<String>,
}

/// The rows of all tables with a first heading of `headings`.
pub(crate) fn rows(headings: &[&str]) -> Vec<Row> {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/observability.md");
    let guide = fs::read_to_string(guide).unwrap();
    let mut rows = Vec::new();
    let mut heading = None;
    for line in guide.lines() {
        let Some(row) = line.strip_prefix("| ") else {
            if !line.starts_with("|---") {
                heading = None;
            }
            continue;
        };
        let cells: Vec<_> = row.trim_end_matches('|').split(" | ").map(str::trim).collect();
        match heading {
            None => heading = Some(cells[0].to_owned()),
            Some(ref heading) if headings.contains(&heading.as_str()) => {
                let cells = cells.into_iter().map(str::to_owned).collect::<Vec<_>>();
                rows.push(Row { name: cells[0].clone(), cells });
            }
            Some(_) => {}
        }
    }
    assert!(!rows.is_empty(), "no table with {headings:?}");
    rows
}

/// Type and labels of each metric, by the name that an exporter for Prometheus gives it.
pub(crate) fn exported_metrics() -> BTreeMap<String, (String, BTreeSet<String>)> {
    let exported =
        |row: Row| (row.code().replace('.', "_"), (row.cells[1].clone(), names(&row.cells[3])));
    rows(&["metric"]).into_iter().map(exported).collect()
}

/// The labels of each exported series, by its name: a histogram has several.
pub(crate) fn exported_series() -> BTreeMap<String, BTreeSet<String>> {
    let mut series = BTreeMap::new();
    for (name, (kind, mut labels)) in exported_metrics() {
        if kind != "histogram" {
            series.insert(name, labels);
            continue;
        }
        for part in ["sum", "count"] {
            series.insert(format!("{name}_{part}"), labels.clone());
        }
        labels.insert("le".to_owned());
        series.insert(format!("{name}_bucket"), labels);
    }
    series
}

/// The names in backticks.
pub(crate) fn names(cell: &str) -> BTreeSet<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

impl Row {
    /// The name of the row, without its backticks.
    pub(crate) fn code(&self) -> String {
        self.name.trim_matches('`').to_owned()
    }
}
