//! Facts that must agree between files, and that no compiler checks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

fn setting(manifest: &str, name: &str) -> String {
    let line = manifest.lines().find(|line| line.starts_with(&format!("{name} = "))).unwrap();
    line.split('"').nth(1).unwrap().to_owned()
}

fn cargo() -> Command {
    Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()))
}

fn stdout(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The dependencies of a program that uses these features of the runtime on this platform, in the versions of `Cargo.lock`.
///
/// The workspace itself depends on more: packages of the benchmarks and of other platforms, which a machine that
/// runs the tests has not downloaded.
fn metadata_of_a_user(features: &[&str]) -> serde_json::Value {
    let folder = tempfile::tempdir().unwrap();
    let runtime = root().join("lock-runtime");
    let manifest = format!(
        "workspace = {{}}\n\
         package = {{ name = \"user\", edition = \"2024\" }}\n\
         lib = {{ path = \"lib.rs\" }}\n\
         dependencies.lock-runtime = {{ path = {runtime:?}, features = {features:?} }}\n"
    );
    fs::write(folder.path().join("Cargo.toml"), manifest).unwrap();
    fs::write(folder.path().join("lib.rs"), "").unwrap();
    fs::copy(root().join("Cargo.lock"), folder.path().join("Cargo.lock")).unwrap();
    let version = stdout(cargo().arg("-vV"));
    let platform = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    let metadata = stdout(
        cargo()
            .args(["metadata", "--format-version=1", "--filter-platform", platform])
            // The toolchain and the registries of the workspace.
            .current_dir(root())
            .arg("--manifest-path")
            .arg(folder.path().join("Cargo.toml")),
    );
    serde_json::from_str(&metadata).unwrap()
}

/// An expansion names what its own release of the runtime has.
#[test]
fn the_runtime_wants_exactly_its_own_macros() {
    let manifest = read("Cargo.toml");
    let version = setting(&manifest, "version");
    assert!(
        manifest.contains(&format!(
            r#"lock-macros = {{ path = "lock-macros", version = "={version}" }}"#
        ))
    );
}

#[test]
fn the_stated_rust_version_is_the_same_everywhere() {
    let stated = setting(&read("Cargo.toml"), "rust-version");
    assert_eq!(setting(&read("clippy.toml"), "msrv"), stated);
    assert!(read("README.md").contains(&format!("Rust {stated} or newer.")));
    assert!(read("README.zh-CN.md").contains(&format!("最低 Rust {stated}；")));
}

/// What users build must build with the Rust that is promised.
#[test]
fn no_dependency_needs_a_newer_rust() {
    let metadata = metadata_of_a_user(&["rediss", "testing"]);
    let stated = setting(&read("Cargo.toml"), "rust-version");
    let parse = |version: &str| -> Vec<u32> {
        version.split('.').map(|part| part.parse().unwrap()).collect()
    };
    let nodes = metadata["resolve"]["nodes"].as_array().unwrap();
    let package = |id: &serde_json::Value| {
        metadata["packages"]
            .as_array()
            .unwrap()
            .iter()
            .find(|package| package["id"] == *id)
            .unwrap()
    };
    let start = nodes.iter().find(|node| package(&node["id"])["name"] == "lock-runtime").unwrap();
    let (mut seen, mut todo) = (vec![start["id"].clone()], vec![start]);
    while let Some(node) = todo.pop() {
        for dependency in node["deps"].as_array().unwrap() {
            let normal = dependency["dep_kinds"]
                .as_array()
                .unwrap()
                .iter()
                .any(|kind| kind["kind"].is_null());
            if normal && !seen.contains(&dependency["pkg"]) {
                seen.push(dependency["pkg"].clone());
                todo.push(nodes.iter().find(|node| node["id"] == dependency["pkg"]).unwrap());
            }
        }
    }
    assert!(seen.len() > 20, "only {} packages were looked at", seen.len());
    for id in &seen {
        let package = package(id);
        if let Some(needs) = package["rust_version"].as_str() {
            assert!(parse(needs) <= parse(&stated), "{} needs Rust {needs}", package["name"]);
        }
    }
}

/// The default features bring the client of Redis alone.
#[test]
fn a_default_build_has_no_web_framework_and_no_other_store() {
    let names = |features: &[&str]| -> Vec<String> {
        let metadata = metadata_of_a_user(features);
        let packages = metadata["packages"].as_array().unwrap();
        packages.iter().map(|package| package["name"].as_str().unwrap().to_owned()).collect()
    };
    let (default, web) =
        (names(&[]), names(&["actix", "axum", "etcd", "lockctl", "mysql", "postgres"]));
    for package in [
        "actix-web",
        "anstream",
        "axum",
        "clap",
        "clap_complete",
        "h2",
        "http",
        "mysql_async",
        "serde_json",
        "tokio-postgres",
        "tower-layer",
    ] {
        assert!(!default.iter().any(|name| name == package), "{package} in a default build");
        assert!(web.iter().any(|name| name == package), "{package} is spelled in another way");
    }
    for package in ["lock-macros", "redis", "tokio"] {
        assert!(default.iter().any(|name| name == package), "{package}: {default:?}");
    }
}

/// The README's table is the reference; an argument that is not in it does not exist for users.
#[test]
fn every_argument_is_documented_and_in_use() {
    let (readme, docs) = (read("README.md"), read("lock-runtime/src/lib.rs"));
    let names = read("lock-macros/src/argument_names.rs");
    let list = names.split("const ARGUMENTS: ").nth(1).unwrap().split("];").next().unwrap();
    let listed = list.lines().filter_map(|line| line.trim().strip_prefix("(\"")?.split('"').next());
    let arguments: Vec<_> = listed.chain(["crate"]).collect();
    assert!(arguments.len() > 20, "{arguments:?}");
    let programs = fs::read_dir(root().join("tests/ui/pass")).unwrap();
    let programs: String =
        programs.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap()).collect();
    for argument in arguments {
        let is_used = ["(", " "].iter().any(|of| programs.contains(&format!("{of}{argument} = ")));
        assert!(is_used, "{argument} is in no program of `ui`");
        let cell = format!("`{argument}`");
        let row = |text: &str, start: &str| {
            text.lines().any(|line| {
                line.strip_prefix(start)
                    .is_some_and(|row| row.split('|').next().unwrap().contains(&cell))
            })
        };
        assert!(row(&readme, "|"), "{argument} is not in the README");
        assert!(row(&docs, "/// |"), "{argument} is not in the attribute's documentation");
    }
}

/// What is left behind by a future that is dropped is part of its contract.
#[test]
fn every_public_async_function_documents_its_cancellation() {
    let mut folders = vec![root().join("lock-runtime/src")];
    let mut checked = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let mut docs = String::new();
            for line in fs::read_to_string(&path).unwrap().lines().map(str::trim_start) {
                if line.starts_with("pub async fn ") {
                    let says =
                        ["Cancel safe", "ancel safe as", "cancel safe.", "dropped", "Dropping"];
                    let is_documented = says.iter().any(|words| docs.contains(words));
                    assert!(is_documented, "{}: {line}", path.display());
                    checked += 1;
                }
                match line.strip_prefix("///") {
                    Some(text) => docs += text,
                    None if line.starts_with("#[") => {}
                    None => docs.clear(),
                }
            }
        }
    }
    assert!(checked > 20, "{checked}");
}

/// The compiler refuses what the runtime would refuse at the first call.
#[test]
fn the_attribute_and_the_runtime_have_the_same_limits() {
    let value = |file: &str, name: &str| {
        let text = read(file);
        let begin = format!("const {name}: ");
        let line = text.lines().find_map(|line| line.split_once(&begin)).unwrap().1;
        line.split_once(" = ").unwrap().1.to_owned()
    };
    let file = |name: &str| format!("lock-runtime/src/base/{name}.rs");
    let (ttl, policy, rules) = (file("ttl"), file("policy"), file("key_rules"));
    for (ours, file, theirs) in [
        ("SHORTEST_TTL", &ttl, "MIN"),
        ("LONGEST_TTL", &ttl, "MAX"),
        ("LONGEST_DELAY", &ttl, "MAX_DELAY"),
        ("LONGEST_DELAY", &policy, "LONGEST_LINGER"),
        ("SHORTEST_INTERVAL", &policy, "SHORTEST_INTERVAL"),
        ("RESERVED", &rules, "RESERVED"),
    ] {
        assert_eq!(value("lock-macros/src/check.rs", ours), value(file, theirs), "{ours} {theirs}");
    }
}

/// The table of the crate's documentation has all features that are for users, and says which are the default.
#[test]
fn every_feature_is_documented() {
    let (manifest, docs) = (read("lock-runtime/Cargo.toml"), read("lock-runtime/src/lib.rs"));
    let section = manifest.split("[features]\n").nth(1).unwrap().split("\n[").next().unwrap();
    let mut features: Vec<&str> = section
        .lines()
        .filter_map(|line| line.split_once(" = ").map(|(name, _)| name))
        .filter(|name| !name.starts_with(['#', '_']) && *name != "default")
        .collect();
    let defaults = section.lines().find_map(|line| line.strip_prefix("default = ")).unwrap();
    let table = docs.split("//! # Features\n").nth(1).unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("//! | `"));
    let mut documented = Vec::new();
    for row in rows {
        let (name, rest) = row.split_once("` | ").unwrap();
        let (default, says) = rest.split_once('|').unwrap();
        assert_eq!(default.trim() == "yes", defaults.contains(&format!("\"{name}\"")), "{name}");
        assert!(says.trim_matches([' ', '|']).len() > 10, "{name} is not explained");
        documented.push(name);
    }
    features.sort_unstable();
    documented.sort_unstable();
    assert_eq!(features, documented);
    assert!(features.len() >= 18, "{features:?}");
}

/// Each is in the chapter on settings, and with `no` as its URL parameter it is refused in a URL.
#[test]
fn every_setting_of_a_pool_is_documented() {
    let chapter = read("docs/settings.md");
    let variables = read("lock-runtime/src/api/settings.rs");
    let settings = read("lock-runtime/src/base/pool_settings.rs");
    let (settings, _) = settings.split_once("];").expect("the settings that no URL has");
    let builder = read("lock-runtime/src/api/pool.rs");
    let methods: Vec<&str> = builder
        .lines()
        .zip(builder.lines().skip(1))
        .filter(|(line, next)| line.contains("(mut self") || next.trim() == "mut self,")
        .filter_map(|(line, _)| line.trim().strip_prefix("pub fn "))
        .map(|rest| rest.split(['(', '<']).next().unwrap())
        .collect();
    assert!(methods.len() >= 19, "{methods:?}");
    for method in methods {
        let cell = format!("`{method}`");
        let row = chapter
            .lines()
            .find(|line| line.split('|').nth(1).is_some_and(|first| first.contains(&cell)));
        let row = row.unwrap_or_else(|| panic!("{method} is not in docs/settings.md"));
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let variable = cells[2].trim_matches('`');
        let row = format!("`{variable}` |");
        let is_read = variables.lines().any(|line| {
            line.contains(&row) && line.contains(&format!("[`{method}`](Self::{method})"))
        });
        assert!(variable.is_empty() || is_read, "{method}: {variable}");
        assert_eq!(variable.is_empty(), !variables.contains(&format!("`{method}`](")), "{method}");
        // What a program passes as a function has no text form.
        let of_text = !["problem", "on_current_runtime"].contains(&method);
        let is_refused = settings.contains(&format!("PoolSetting::new(\"{method}\", "));
        assert_eq!(is_refused, cells[3] == "no" && of_text, "{method}");
    }
}

#[test]
fn the_changelog_has_a_place_for_what_comes() {
    assert!(read("CHANGELOG.md").contains("\n## Unreleased\n"));
}

#[test]
fn the_documented_tables_are_those_of_the_store() {
    for store in ["mysql", "postgres"] {
        let tables = read(&format!("lock-runtime/src/backend/{store}/sql/schema.sql"));
        let chapter = read(&format!("docs/{store}.md"));
        // The table for pins has a place of its own.
        let (tables, fences) = tables.split_once("/*pin").unwrap();
        for part in [tables, fences.split("pin*/").next().unwrap()] {
            let part = part.trim().trim_matches(';').trim();
            assert!(part.starts_with("CREATE TABLE") && chapter.contains(part), "{store}: {part}");
        }
    }
}

/// Doctests leave out what is for tests only.
#[test]
fn the_test_module_of_the_guide_is_one_that_runs() {
    let chapter = read("docs/testing.md");
    let (_, from) = chapter.split_once("```rust\n").expect("a block of code");
    let (shown, _) = from.split_once("```").expect("its end");
    let test = read("tests/api/guide_testing.rs");
    let (_, run) = test.split_once("\n\n").expect("a comment first");
    assert_eq!(run, shown);
}

/// Every example is named in the README and started by a test.
#[test]
fn every_example_is_shown() {
    let (readme, manifest) = (read("README.md"), read("examples/Cargo.toml"));
    let tests = [
        "engines/etcd/examples",
        "engines/postgres/examples",
        "observability/prometheus",
        "project/examples",
    ];
    let tests = tests.map(|file| read(&format!("tests/{file}.rs"))).concat();
    let mut count = 0;
    for entry in fs::read_dir(root().join("examples")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            assert!(
                readme.contains(&format!("/examples/{name}.rs)")),
                "{name} is not in the README"
            );
            assert!(
                manifest.contains(&format!("name = \"{name}\"")),
                "{name} is not in the manifest"
            );
            assert!(tests.contains(&format!("\"{name}\"")), "{name} is started by no test");
            count += 1;
        }
    }
    assert!(count >= 5);
}
