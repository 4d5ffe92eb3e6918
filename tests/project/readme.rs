//! The README in two languages, and the links of all documents.

use std::fs;
use std::path::{Path, PathBuf};

const REPOSITORY: &str = "https://github.com/distributed-lock-rs/distributed-lock/blob/main/";
const IMAGES: &str = "https://raw.githubusercontent.com/distributed-lock-rs/distributed-lock/main/";
/// The address of the README's own pages in the documentation of the last release.
const PAGES: &str = "https://docs.rs/lock-runtime/latest/lock_runtime/";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// What two translations of a document have in common.
#[derive(Debug, Default, PartialEq)]
struct Structure {
    /// The level of each heading.
    headings: Vec<usize>,
    /// Each code block, with its language.
    code: Vec<String>,
    /// The rows of each table.
    tables: Vec<usize>,
}

impl Structure {
    fn of(text: &str) -> Self {
        let mut structure = Self::default();
        let (mut in_code, mut in_table) = (false, false);
        for line in text.lines() {
            let is_fence = line.starts_with("```");
            if is_fence && !in_code {
                structure.code.push(String::new());
            }
            if is_fence || in_code {
                let block = structure.code.last_mut().unwrap();
                block.push_str(line);
                block.push('\n');
                in_code ^= is_fence;
                continue;
            }
            let level = line.chars().take_while(|character| *character == '#').count();
            if level > 0 {
                structure.headings.push(level);
            }
            match (line.starts_with('|'), in_table) {
                (true, false) => structure.tables.push(1),
                (true, true) => *structure.tables.last_mut().unwrap() += 1,
                (false, _) => {}
            }
            in_table = line.starts_with('|');
        }
        structure
    }
}

/// The targets of the links and images in a document, without its code.
fn links(text: &str) -> Vec<String> {
    let mut links = Vec::new();
    for (at, part) in text.split("```").enumerate() {
        if at % 2 == 0 {
            let targets = part.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            links.extend(targets.map(str::to_owned));
        }
    }
    links
}

/// The documents that link to files.
fn documents() -> Vec<String> {
    let mut documents: Vec<String> = [
        "README.md",
        "README.zh-CN.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "lock-macros/README.md",
    ]
    .map(str::to_owned)
    .into();
    for entry in fs::read_dir(root().join("docs")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".md") {
            documents.push(format!("docs/{name}"));
        }
    }
    documents
}

/// The file that `link` in `document` means, if it means one of this repository.
fn file_of(document: &str, link: &str) -> Option<PathBuf> {
    let link = link.split('#').next().unwrap();
    let here = link.strip_prefix(REPOSITORY).or_else(|| link.strip_prefix(IMAGES));
    match here {
        Some(path) => Some(root().join(path)),
        None if link.is_empty() || link.contains("://") => None,
        None => Some(root().join(document).parent().unwrap().join(link)),
    }
}

#[test]
fn the_readme_fits_on_a_few_screens() {
    let lines = read("README.md").lines().count();
    assert!(lines <= 220, "README.md has {lines} lines, of 220 at most: move text to docs/");
}

#[test]
fn the_chinese_readme_has_the_structure_of_the_english_one() {
    let (english, chinese) =
        (Structure::of(&read("README.md")), Structure::of(&read("README.zh-CN.md")));
    assert_eq!(chinese.headings, english.headings, "levels of the headings");
    assert_eq!(chinese.code.len(), english.code.len(), "number of code blocks");
    for (chinese, english) in chinese.code.iter().zip(&english.code) {
        assert_eq!(chinese, english, "code blocks are the same in both languages");
    }
    assert_eq!(chinese.tables, english.tables, "rows of the tables");
    assert!(english.headings.len() > 5 && english.code.len() > 3 && english.tables.len() > 3);
}

#[test]
fn links_lead_to_files_that_exist() {
    let mut count = 0;
    for document in documents() {
        for link in links(&read(&document)) {
            if let Some(file) = file_of(&document, &link) {
                assert!(file.exists(), "{document} links to {link}, which is not there");
                count += 1;
            }
        }
    }
    assert!(count > 30, "only {count} links were checked");
}

/// A relative link is dead on the crate page and in the API documentation.
#[test]
fn what_is_published_has_absolute_links() {
    for document in documents() {
        if matches!(document.as_str(), "CONTRIBUTING.md" | "CHANGELOG.md") {
            continue;
        }
        for link in links(&read(&document)) {
            let is_absolute = link.starts_with("https://") || link.starts_with('#');
            assert!(is_absolute, "{document} links to {link}: write {REPOSITORY}..");
        }
    }
}

/// Each chapter is a module of the documentation, and has a row in the README.
#[test]
fn every_chapter_is_documented_and_linked() {
    let (readme, library) = (read("README.md"), read("lock-runtime/src/lib.rs"));
    let mut chapters = 0;
    for document in documents().iter().filter(|document| document.starts_with("docs/")) {
        assert!(
            library.contains(&format!("include_str!(\"../{document}\")")),
            "{document} is not a module of the guide"
        );
        assert!(
            readme.contains(&format!("({REPOSITORY}{document})")),
            "{document} is not in the README"
        );
        chapters += 1;
    }
    assert!(chapters >= 9);
    assert!(readme.contains(&format!("{PAGES}guide/index.html")));
}

#[test]
fn both_packages_contain_their_licences_and_a_readme() {
    for package in ["lock-runtime", "lock-macros"] {
        for file in ["LICENSE-MIT", "LICENSE-APACHE", "README.md"] {
            let text = read(&format!("{package}/{file}"));
            assert!(
                text.lines().count() > 5,
                "{package}/{file} is not the file that it stands for"
            );
        }
    }
}

#[test]
fn a_different_structure_is_found() {
    let text = "# A\n\n```rust\n# not a heading\n```\n\n| a |\n|---|\n| b |\n\n## B\n";
    let structure = Structure::of(text);
    assert_eq!(structure.headings, [1, 2]);
    assert_eq!(structure.code, ["```rust\n# not a heading\n```\n"]);
    assert_eq!(structure.tables, [3]);
    for other in [
        text.replace("## B", "### B"),
        text.replace("not a heading", "other code"),
        text.replace("| b |\n", ""),
        text.replace("```rust", "```text"),
    ] {
        assert_ne!(Structure::of(&other), structure, "{other}");
    }
    assert_eq!(links("a [b](c.md) ![d](e#f)\n```\n[g](h)\n```\n[i](j)"), ["c.md", "e#f", "j"]);
}

/// A file in backticks exists: by its whole path, or somewhere by its last parts. In the table of interleavings these name one file
/// of the runtime.
#[test]
fn contributing_names_files_that_exist() {
    let mut files = Vec::new();
    collect_files(&root(), &mut files);
    let text = read("CONTRIBUTING.md");
    let ends = [".rs", ".lua", ".sql", ".md", ".sh", ".toml"];
    let is_file = |name: &&str| {
        !name.contains(' ') && !name.starts_with('.') && ends.iter().any(|end| name.ends_with(end))
    };
    let mut count = 0;
    for name in text.split('`').skip(1).step_by(2).filter(is_file) {
        let is_there = files.iter().any(|file| file.ends_with(name));
        assert!(is_there, "CONTRIBUTING.md names {name}, which is not there");
        count += 1;
    }
    assert!(count > 50, "only {count} names were checked");
    let (_, interleavings) = text.split_once("## Interleavings").unwrap();
    let sources = root().join("lock-runtime/src");
    for name in interleavings.split('`').skip(1).step_by(2).filter(is_file) {
        let named = |file: &&PathBuf| file.starts_with(&sources) && file.ends_with(name);
        let named: Vec<_> = files.iter().filter(named).collect();
        assert!(named.len() <= 1, "`{name}` is one of {named:#?}: write its folder, too");
    }
}

fn collect_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = entry.file_name();
        if entry.file_type().unwrap().is_dir() {
            if name != "target" && name != ".git" {
                collect_files(&entry.path(), files);
            }
        } else {
            files.push(entry.path());
        }
    }
}
