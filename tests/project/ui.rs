//! Functions that the attribute accepts, and the diagnostics for others.
//!
//! Each case is a crate of its own. rustc checks it against the libraries that this test program was built from, so that
//! no dependency is built again. A case that names lints of clippy is checked by clippy. A file `.stderr` beside a refused case has its diagnostics. `LOCK_UI=overwrite` rewrites
//! these files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::compiled_units::CompiledUnits;

/// What a case may import.
const LIBRARIES: [&str; 7] =
    ["actix_web", "async_trait", "axum", "lock_runtime", "serde", "tokio", "tracing"];

/// The package of the tests, where all paths of cases begin.
const TESTS: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn the_attribute_accepts() {
    check_all("ui/pass", |_, diagnostics, accepted| {
        if accepted { Ok(()) } else { Err(format!("is refused:\n{diagnostics}")) }
    });
}

#[test]
fn the_attribute_refuses() {
    let overwrite = std::env::var_os("LOCK_UI").is_some_and(|mode| mode == "overwrite");
    check_all("ui/fail", |case, diagnostics, accepted| {
        if accepted {
            return Err("is accepted".to_owned());
        }
        let file = case.with_extension("stderr");
        if overwrite {
            fs::write(&file, diagnostics).expect("the diagnostics are written");
            return Ok(());
        }
        let expected = fs::read_to_string(&file).unwrap_or_default();
        if diagnostics == expected {
            return Ok(());
        }
        Err(format!("has other diagnostics than {}:\n{diagnostics}", file.display()))
    });
}

/// Checks each case below `folder`, as many at once as there are cores. `judge` gets its path, its diagnostics, and
/// whether it compiles.
#[track_caller]
fn check_all(folder: &str, judge: impl Fn(&Path, &str, bool) -> Result<(), String> + Sync) {
    let libraries = Libraries::of_this_program();
    let mut cases = Vec::new();
    find_cases(&Path::new(TESTS).join(folder), &mut cases);
    assert!(cases.len() > 20, "{} cases in {folder}", cases.len());

    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let output = libraries.check(case);
                    let diagnostics = normalized(&String::from_utf8_lossy(&output.stderr));
                    if let Err(reason) = judge(case, &diagnostics, output.status.success()) {
                        failures.lock().unwrap().push(format!("{} {reason}", case.display()));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

fn find_cases(folder: &Path, cases: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of cases") {
        let path = entry.expect("an entry of the folder").path();
        if path.is_dir() {
            find_cases(&path, cases);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            cases.push(path);
        }
    }
}

/// The compiled libraries of this test program.
struct Libraries {
    /// Name and file of each.
    files: Vec<(&'static str, PathBuf)>,
    /// For the metadata of the cases.
    output: tempfile::TempDir,
}

impl Libraries {
    fn of_this_program() -> Self {
        let units = CompiledUnits::of_this_program();
        Self {
            files: LIBRARIES.map(|name| (name, units.library(name))).into(),
            output: tempfile::tempdir().expect("a folder for metadata"),
        }
    }

    fn check(&self, case: &Path) -> Output {
        let source = fs::read_to_string(case).expect("a case can be read");
        // It is rustc with more lints. rustc itself takes their names without a word.
        let mut rustc = if source.contains("clippy::") {
            Command::new("clippy-driver")
        } else {
            Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        };
        rustc
            .current_dir(TESTS)
            .args(["--edition", "2024", "--crate-type", "bin", "--emit", "metadata"])
            .args(["--color", "never", "--diagnostic-width", "140", "--out-dir"])
            .arg(self.output.path());
        let mut folders: Vec<&Path> =
            self.files.iter().filter_map(|(_, file)| file.parent()).collect();
        folders.dedup();
        for folder in folders {
            rustc.arg("-L").arg(format!("dependency={}", folder.display()));
        }
        for (name, file) in &self.files {
            rustc.arg("--extern").arg(format!("{name}={}", file.display()));
        }
        let case = case.strip_prefix(TESTS).expect("a case of this package");
        // Two cases may have the same file name.
        let name = case.with_extension("").to_string_lossy().replace(['/', '\\'], "_");
        rustc.args(["--crate-name", &name]).arg(case).output().expect("rustc starts")
    }
}

/// `output` without summaries, and with line numbers as wide as the longest of the case: rustc takes the longest of all
/// files.
fn normalized(output: &str) -> String {
    let summaries = ["error: aborting due to", "For more information about", "Some errors have"];
    let lines = || {
        let is_summary = |line: &str| summaries.iter().any(|start| line.starts_with(start));
        output.lines().filter(move |line| !is_summary(line))
    };
    let width = lines().map(|line| gutter(line).map_or(0, |(number, _)| number.len())).max();
    let width = width.unwrap_or_default();
    let mut text = String::new();
    for line in lines() {
        let line = match gutter(line) {
            // A line number of another file changes with that file.
            Some((_, arrow)) if arrow.starts_with("--> ") && !arrow.starts_with("--> ui/") => {
                let file = arrow[4..].split(':').next().unwrap_or(arrow);
                format!("{:width$}--> {file}", "")
            }
            Some((_, arrow)) if arrow.starts_with("--> ") => format!("{:width$}{arrow}", ""),
            Some((number, rest)) => format!("{number:<width$} {rest}"),
            None => line.to_owned(),
        };
        text.push_str(line.trim_end());
        text.push('\n');
    }
    format!("{}\n", text.trim_end())
}

/// The line number in front of a line of source, or nothing in front of a note or a place, and the rest of the line.
fn gutter(line: &str) -> Option<(&str, &str)> {
    let start = line.trim_start();
    let digits = start.find(|c: char| !c.is_ascii_digit()).unwrap_or(start.len());
    let (number, rest) = start.split_at(digits);
    let rest = rest.trim_start();
    let is_source = rest.starts_with('|');
    let is_note = number.is_empty() && (rest.starts_with("= ") || rest.starts_with("--> "));
    (is_source || is_note).then_some((number, rest))
}
