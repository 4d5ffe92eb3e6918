//! Figures as a table and as lines of JSON.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use crate::stats::median;

/// The target of a figure.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bar {
    AtLeast(f64),
    AtMost(f64),
    None,
}

impl Bar {
    fn verdict(self, value: f64) -> String {
        let (sign, bar, met) = match self {
            Self::AtLeast(bar) => (">=", bar, value >= bar),
            Self::AtMost(bar) => ("<=", bar, value <= bar),
            Self::None => return String::new(),
        };
        format!("{sign} {:<10} {}", number(bar), if met { "met" } else { "MISSED" })
    }
}

/// A median, for the chart.
#[derive(Debug)]
pub(crate) struct Figure {
    pub(crate) scenario: &'static str,
    pub(crate) what: String,
    pub(crate) value: f64,
}

#[derive(Debug)]
pub(crate) struct Report {
    lines: File,
    pub(crate) figures: Vec<Figure>,
    scenario: &'static str,
}

impl Report {
    pub(crate) fn create() -> Self {
        let folder = target().join("bench");
        fs::create_dir_all(&folder).expect("the target folder can be written");
        let path = folder.join("results.jsonl");
        let lines = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .expect("the results can be written");
        println!("every run: {}", path.display());
        Self { lines, figures: Vec::new(), scenario: "" }
    }

    pub(crate) fn begin(&mut self, scenario: &'static str, says: &str) {
        self.scenario = scenario;
        println!("\n== {scenario}: {says}");
    }

    pub(crate) fn note(&self, text: &str) {
        println!("   {text}");
    }

    /// The median of `runs`, against `bar`.
    pub(crate) fn figure(&mut self, what: &str, unit: &str, runs: &[f64], bar: Bar) -> f64 {
        for (run, value) in runs.iter().enumerate() {
            let line = serde_json::json!({
                "scenario": self.scenario, "what": what, "run": run, "value": value, "unit": unit,
            });
            writeln!(self.lines, "{line}").expect("the results can be written");
        }
        let value = median(runs.to_vec());
        println!("   {what:<58} {:>12} {unit:<10} {}", number(value), bar.verdict(value));
        self.figures.push(Figure { scenario: self.scenario, what: what.to_owned(), value });
        value
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        _ if value.is_nan() => "-".to_owned(),
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

fn target() -> PathBuf {
    let fallback = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target"));
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(fallback, PathBuf::from)
}
