//! The structure of `lock-runtime/src`: which folder may import which, and no circle between its files.
//! Also the size of its files, names of types that stand twice, and the prose of comments in the whole project.
//!
//! Each check reads the files as text and returns complaints, each with the file, the line and the remedy. The tests
//! at the end apply the checks to the tree, all others to small samples that must fail.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

/// Folders of `lock-runtime/src` from bottom to top. Each may import itself and all before it.
const LAYERS: [&str; 9] =
    ["base", "exec", "backend", "queue", "lease", "lock", "api", "attribute", "web"];
/// Folders of `backend/redis` from bottom to top. Below them are its own files, above them its `mod.rs`.
const REDIS_LAYERS: [&str; 6] = ["net", "discovery", "conn", "protocol", "cluster", "quorum"];
/// What `testing` may import besides itself.
const BELOW_TESTING: [&str; 4] = ["base", "exec", "backend", "api"];
/// These may import everything, and nothing below them may import them.
const TOP: [&str; 4] = ["", "__private", "model_tests", "testing"];

const MOST_CODE_LINES: usize = 500;

/// A file: its path with `/` below the folder that was read, and its text.
struct Source {
    path: String,
    text: String,
}

impl Source {
    fn sample(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned() }
    }
}

/// A file of a crate as a module.
struct Module {
    path: String,
    /// From the crate root: `a/mod.rs` and `a.rs` are `["a"]`, `lib.rs` is `[]`.
    name: Vec<String>,
    /// The text with comments blanked, strings filled with one letter and items under `#[cfg(test)]` blanked.
    code: String,
    imports: Vec<Import>,
}

/// A path in the code of a file that leads to another module.
struct Import {
    line: usize,
    /// As resolved, from the crate root.
    path: Vec<String>,
    /// Whether it is a `pub use`, of any visibility.
    exported: bool,
}

/// The product's files of a crate. Files of tests are left out: `mod x;` under `#[cfg(test)]` leads to them.
struct Crate {
    modules: Vec<Module>,
}

impl Crate {
    fn parse(sources: &[Source]) -> Self {
        let mut modules: Vec<_> = sources.iter().map(Module::parse).collect();
        let tested: Vec<Vec<String>> = sources.iter().flat_map(modules_for_tests).collect();
        modules.retain(|module| !tested.iter().any(|test| module.name.starts_with(test)));
        Self { modules }
    }

    /// The module with the longest name that `path` starts with.
    fn file_of(&self, path: &[String]) -> usize {
        (0..=path.len())
            .rev()
            .find_map(|length| self.modules.iter().position(|it| it.name == path[..length]))
            .unwrap_or_else(|| panic!("no file holds crate::{}", path.join("::")))
    }

    /// From each file to the files that its code needs, with the line that says so. A re-export of a module of its own
    /// is no need.
    fn needs(&self) -> Vec<BTreeMap<usize, &Import>> {
        self.modules
            .iter()
            .enumerate()
            .map(|(number, module)| {
                let mut needs = BTreeMap::new();
                for import in &module.imports {
                    let target = self.file_of(&import.path);
                    let own_child = self.modules[target].name.starts_with(&module.name);
                    if target != number && !(import.exported && own_child) {
                        needs.entry(target).or_insert(import);
                    }
                }
                needs
            })
            .collect()
    }
}

impl Module {
    fn parse(source: &Source) -> Self {
        let name = module_name(&source.path);
        let code = without_test_items(&plain(&source.text));
        let inline = inline_modules(&code);
        let children = declared_children(&code);
        let within = |offset: usize| {
            let mut at = name.clone();
            at.extend(
                inline
                    .iter()
                    .filter(|module| module.start < offset && offset < module.end)
                    .map(|module| module.name.clone()),
            );
            at
        };
        let mut imports = Vec::new();
        let mut add = |offset: usize, path: &[String], exported: bool| {
            let line = line_of(&code, offset);
            if let Some(path) = resolved(path, &within(offset), &name, &children) {
                imports.push(Import { line, path, exported });
            }
        };
        let mut rest = code.clone();
        for statement in use_statements(&code) {
            for path in flattened(&code[statement.tree.clone()]) {
                add(statement.start, &path, statement.exported);
            }
            blank(&mut rest, statement.start, statement.tree.end);
        }
        for (offset, path) in inline_paths(&rest) {
            add(offset, &path, false);
        }
        Self { path: source.path.clone(), name, code, imports }
    }

    fn code_lines(&self) -> usize {
        self.code.lines().filter(|line| !line.trim().is_empty()).count()
    }
}

fn module_name(path: &str) -> Vec<String> {
    let path = path.strip_suffix(".rs").unwrap_or(path);
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if path == "lib" { Vec::new() } else { path.split('/').map(str::to_owned).collect() }
}

fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

fn blank(text: &mut String, from: usize, to: usize) {
    let spaces: String =
        text[from..to].bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }).collect();
    text.replace_range(from..to, &spaces);
}

/// Blanks comments, and fills strings and characters with the letter `s`. Lines stay where they are. The result is
/// ASCII, so that bytes are characters.
fn plain(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let rest = &text.as_bytes()[at..];
        let (length, filler) = if rest.starts_with(b"//") {
            (rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len()), ' ')
        } else if rest.starts_with(b"/*") {
            (end_of_block_comment(rest), ' ')
        } else if let Some(length) = literal(rest, at > 0 && is_word(bytes[at - 1])) {
            (length, 's')
        } else {
            out.push(if rest[0].is_ascii() { rest[0] as char } else { '_' });
            at += 1;
            continue;
        };
        out.extend(rest[..length].iter().map(|byte| if *byte == b'\n' { '\n' } else { filler }));
        at += length;
    }
    out
}

fn end_of_block_comment(text: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        if text[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                break;
            }
        } else {
            at += 1;
        }
    }
    at
}

/// The length of the string or character literal at the start of `text`.
fn literal(text: &[u8], inside_a_word: bool) -> Option<usize> {
    let hashes = |from: usize| text[from..].iter().take_while(|byte| **byte == b'#').count();
    if !inside_a_word {
        let prefix = ["br", "cr", "r"].into_iter().find(|it| text.starts_with(it.as_bytes()));
        if let Some(prefix) = prefix {
            let count = hashes(prefix.len());
            let open = prefix.len() + count;
            if text.get(open) == Some(&b'"') {
                let close = [b"\"".as_slice(), &b"#".repeat(count)].concat();
                let body = text[open + 1..].windows(close.len()).position(|it| it == close)?;
                return Some(open + 1 + body + close.len());
            }
        }
    }
    let quoted = |quote: u8| {
        let mut at = 1;
        while at < text.len() && text[at] != quote {
            at += if text[at] == b'\\' { 2 } else { 1 };
        }
        Some((at + 1).min(text.len()))
    };
    match text[0] {
        b'"' => quoted(b'"'),
        // Not a lifetime.
        b'\'' if text.get(1) == Some(&b'\\') => quoted(b'\''),
        b'\'' => {
            let width = std::str::from_utf8(&text[1..text.len().min(5)])
                .or_else(|error| std::str::from_utf8(&text[1..=error.valid_up_to()]))
                .ok()?
                .chars()
                .next()?
                .len_utf8();
            (text.get(1 + width) == Some(&b'\'')).then_some(2 + width)
        }
        _ => None,
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn first_word(text: &str) -> &str {
    let text = text.trim_start();
    &text[..text.bytes().position(|byte| !is_word(byte)).unwrap_or(text.len())]
}

/// The offset behind the bracket that closes the one at `open`.
fn closing(code: &str, open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
    }
    code.len()
}

const TEST_ATTRIBUTE: &str = "#[cfg(test)]";

/// The items under `#[cfg(test)]`, from the attribute to their end.
fn test_items(code: &str) -> Vec<std::ops::Range<usize>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = code[at..].find(TEST_ATTRIBUTE).map(|start| at + start) {
        at = end_of_item(code, start + TEST_ATTRIBUTE.len());
        found.push(start..at);
    }
    found
}

fn end_of_item(code: &str, from: usize) -> usize {
    let mut start = from;
    // Attributes that follow.
    while code[start..].trim_start().starts_with("#[") {
        start = closing(code, start + code[start..].find('[').unwrap());
    }
    let is_item = matches!(
        first_word(&code[start..]),
        "pub"
            | "use"
            | "mod"
            | "fn"
            | "async"
            | "const"
            | "static"
            | "unsafe"
            | "extern"
            | "struct"
            | "enum"
            | "trait"
            | "type"
            | "impl"
            | "macro_rules"
            | "let"
    );
    let mut is_use = false;
    let mut at = start;
    while at < code.len() {
        match code.as_bytes()[at] {
            b'{' if is_use => at = closing(code, at),
            b'{' => return closing(code, at),
            b'(' | b'[' => at = closing(code, at),
            b';' => return at + 1,
            b',' if !is_item => return at + 1,
            b')' | b']' | b'}' => return at,
            byte => {
                let begins = is_word(byte) && !is_word(code.as_bytes()[at - 1]);
                is_use |= begins && matches!(first_word(&code[at..]), "use" | "let" | "const");
                at += 1;
            }
        }
    }
    at
}

fn without_test_items(code: &str) -> String {
    let mut left = code.to_owned();
    for item in test_items(code) {
        blank(&mut left, item.start, item.end);
    }
    left
}

/// The modules that `source` declares for tests only: `#[cfg(test)] mod x;`.
fn modules_for_tests(source: &Source) -> Vec<Vec<String>> {
    let code = plain(&source.text);
    test_items(&code)
        .into_iter()
        .filter_map(|item| {
            let item = code[item].trim_start_matches(TEST_ATTRIBUTE);
            let name = item.split_once("mod ")?.1.trim().strip_suffix(';')?;
            let mut path = module_name(&source.path);
            path.push(name.trim().to_owned());
            Some(path)
        })
        .collect()
}

/// `mod x;`, of any visibility.
fn declared_children(code: &str) -> BTreeSet<String> {
    code.lines()
        .filter_map(|line| {
            let line = without_visibility(line.trim());
            Some(line.strip_prefix("mod ")?.strip_suffix(';')?.to_owned())
        })
        .collect()
}

fn without_visibility(line: &str) -> &str {
    match line.strip_prefix("pub(") {
        Some(rest) => rest.split_once(')').map_or(line, |(_, rest)| rest.trim_start()),
        None => line.strip_prefix("pub ").unwrap_or(line),
    }
}

struct InlineModule {
    name: String,
    start: usize,
    end: usize,
}

/// `mod x { .. }`, outer ones first.
fn inline_modules(code: &str) -> Vec<InlineModule> {
    let mut found = Vec::new();
    let mut offset = 0;
    for line in code.split_inclusive('\n') {
        let name = without_visibility(line.trim()).strip_prefix("mod ");
        if let Some((name, _)) = name.and_then(|it| it.split_once('{')) {
            let start = offset + line.find('{').unwrap();
            let end = closing(code, start);
            found.push(InlineModule { name: name.trim().to_owned(), start, end });
        }
        offset += line.len();
    }
    found
}

struct UseStatement {
    start: usize,
    /// What stands between `use` and `;`.
    tree: std::ops::Range<usize>,
    exported: bool,
}

fn use_statements(code: &str) -> Vec<UseStatement> {
    let mut found = Vec::new();
    let mut offset = 0;
    for line in code.split_inclusive('\n') {
        let trimmed = line.trim_start();
        let declared = without_visibility(trimmed);
        if let Some(tree) = declared.strip_prefix("use ") {
            let from = offset + line.len() - tree.len();
            let to = code[from..].find(';').map_or(code.len(), |length| from + length);
            let start = offset + line.len() - trimmed.len();
            let exported = declared.len() != trimmed.len();
            found.push(UseStatement { start, tree: from..to, exported });
        }
        offset += line.len();
    }
    found
}

/// The paths of a `use` tree, without `*`, `self` and new names.
fn flattened(tree: &str) -> Vec<Vec<String>> {
    let tree = tree.trim();
    let Some((prefix, list)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap();
        return vec![
            path.split("::")
                .enumerate()
                .map(|(place, part)| (place, part.trim()))
                .filter(|(place, part)| {
                    !part.is_empty() && *part != "*" && (*place == 0 || *part != "self")
                })
                .map(|(_, part)| part.to_owned())
                .collect(),
        ];
    };
    let list = list.rsplit_once('}').map_or(list, |(list, _)| list);
    let (mut depth, mut start, mut items) = (0, 0, Vec::new());
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            b',' if depth == 0 => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(&list[start..]);
    items
        .into_iter()
        .filter(|item| !item.trim().is_empty())
        .flat_map(|item| flattened(&format!("{prefix}{}", item.trim())))
        .collect()
}

/// Paths of more than one part, outside of `use`.
fn inline_paths(code: &str) -> Vec<(usize, Vec<String>)> {
    let bytes = code.as_bytes();
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        if !is_word(bytes[at]) {
            at += 1;
            continue;
        }
        let start = at;
        let mut parts = Vec::new();
        loop {
            let word = first_word(&code[at..]);
            parts.push(word.to_owned());
            at += word.len();
            let next = code[at..].trim_start();
            let behind = next.strip_prefix("::").map(str::trim_start);
            match behind {
                Some(behind) if behind.bytes().next().is_some_and(is_word) => {
                    at = code.len() - behind.len();
                }
                _ => break,
            }
        }
        let continues = code[..start].trim_end().ends_with("::");
        let is_field = start > 0 && bytes[start - 1] == b'.';
        if parts.len() > 1 && !continues && !is_field {
            found.push((start, parts));
        }
    }
    found
}

/// `path` from the crate root, if it leads into this crate. `within` is the module where it stands, `file` the one of
/// its file.
fn resolved(
    path: &[String],
    within: &[String],
    file: &[String],
    children: &BTreeSet<String>,
) -> Option<Vec<String>> {
    let mut base = within.to_vec();
    let mut rest = path;
    match path.first()?.as_str() {
        "crate" => {
            base.clear();
            rest = &path[1..];
        }
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                base.pop();
                rest = &rest[1..];
            }
        }
        child if within == file && children.contains(child) => {}
        _ => return None,
    }
    base.extend(rest.iter().cloned());
    Some(base)
}

// (a) Layers.

fn upward_imports(tree: &Crate) -> Vec<String> {
    let mut complaints = Vec::new();
    for (module, needs) in tree.modules.iter().zip(tree.needs()) {
        for (target, import) in needs {
            let target = &tree.modules[target];
            if let Some(reason) = upward(tree, &module.name, target) {
                complaints.push(format!(
                    "{}:{}: imports crate::{}: {reason}",
                    module.path,
                    import.line,
                    import.path.join("::")
                ));
            }
        }
    }
    complaints
}

/// Why a file of the module `from` may not import `target`.
fn upward(tree: &Crate, from: &[String], target: &Module) -> Option<String> {
    let top = |name: &[String]| name.first().cloned().unwrap_or_default();
    let (lower, upper) = (top(from), top(&target.name));
    if lower.is_empty() || lower == "__private" || lower == "model_tests" {
        return None;
    }
    if upper.is_empty() {
        return Some("name the module that defines it, not the crate root".to_owned());
    }
    if lower == upper {
        return upward_in_redis(tree, from, target);
    }
    if lower == "testing" {
        return (!BELOW_TESTING.contains(&upper.as_str()))
            .then(|| format!("`testing` may import only {}", BELOW_TESTING.join(", ")));
    }
    if TOP.contains(&upper.as_str()) {
        return Some(format!("nothing may import `{upper}`; move what is needed into a layer"));
    }
    let rank = |name: &str| LAYERS.iter().position(|layer| *layer == name);
    match (rank(&lower), rank(&upper)) {
        (Some(lower), Some(upper)) if upper <= lower => None,
        (Some(_), Some(_)) => Some(format!(
            "`{lower}` is below `{upper}`; move the item down, or pass a value, a trait or a closure"
        )),
        (None, _) => Some(format!("the folder `{lower}` is not in the table LAYERS")),
        (_, None) => Some(format!("the folder `{upper}` is not in the table LAYERS")),
    }
}

fn upward_in_redis(tree: &Crate, from: &[String], target: &Module) -> Option<String> {
    let below = |name: &[String]| match name {
        [backend, redis, rest @ ..] if backend == "backend" && redis == "redis" => {
            Some(rest.first().cloned())
        }
        _ => None,
    };
    let (from, to) = (below(from)?, below(&target.name)?);
    let name = |it: &Option<String>| it.clone().unwrap_or_else(|| "mod.rs".to_owned());
    let file = format!("backend/redis/{}.rs", name(&to));
    let is_folder = to.is_some() && !tree.modules.iter().any(|module| module.path == file);
    let rank = |it: &Option<String>| match it {
        None => REDIS_LAYERS.len() + 1,
        Some(it) => REDIS_LAYERS.iter().position(|layer| layer == it).map_or(0, |rank| rank + 1),
    };
    if is_folder && rank(&to) == 0 {
        return Some(format!("the folder `{}` is not in the table REDIS_LAYERS", name(&to)));
    }
    (rank(&to) > rank(&from)).then(|| {
        format!(
            "in backend/redis, `{}` is below `{}`; move the item down, or pass a value, a trait or a closure",
            name(&from),
            name(&to)
        )
    })
}

// (b) Circles.

/// One complaint for each set of files that reach each other, with a shortest way around.
fn circles(tree: &Crate) -> Vec<String> {
    let needs = tree.needs();
    let reach: Vec<BTreeSet<usize>> = (0..needs.len())
        .map(|start| {
            let mut seen = BTreeSet::new();
            let mut todo: Vec<usize> = needs[start].keys().copied().collect();
            while let Some(next) = todo.pop() {
                if seen.insert(next) {
                    todo.extend(needs[next].keys());
                }
            }
            seen
        })
        .collect();
    let mut reported = BTreeSet::<usize>::new();
    let mut complaints = Vec::new();
    for start in 0..needs.len() {
        if !reach[start].contains(&start) || reported.contains(&start) {
            continue;
        }
        let members: Vec<usize> = (0..needs.len())
            .filter(|other| reach[start].contains(other) && reach[*other].contains(&start))
            .collect();
        reported.extend(&members);
        let way = members
            .iter()
            .map(|member| shortest_way_around(&needs, *member))
            .min_by_key(Vec::len)
            .unwrap();
        let steps: Vec<_> = way
            .iter()
            .zip(way.iter().cycle().skip(1))
            .map(|(from, to)| {
                format!(
                    "  {}:{}: imports crate::{}",
                    tree.modules[*from].path,
                    needs[*from][to].line,
                    needs[*from][to].path.join("::")
                )
            })
            .collect();
        let files: Vec<_> = members.iter().map(|it| tree.modules[*it].path.as_str()).collect();
        complaints.push(format!(
            "{} files import each other ({}); move what both sides need into one file below them. A way around:\n{}",
            files.len(),
            files.join(", "),
            steps.join("\n")
        ));
    }
    complaints
}

fn shortest_way_around(needs: &[BTreeMap<usize, &Import>], start: usize) -> Vec<usize> {
    let mut todo = VecDeque::from([vec![start]]);
    let mut seen = BTreeSet::new();
    while let Some(way) = todo.pop_front() {
        for next in needs[*way.last().unwrap()].keys() {
            if *next == start {
                return way;
            }
            if seen.insert(*next) {
                todo.push_back([way.as_slice(), &[*next]].concat());
            }
        }
    }
    unreachable!("it is a member of a circle");
}

// (c) Names of types.

struct Definition<'a> {
    name: &'a str,
    path: &'a str,
    line: usize,
    /// With the lint `unreachable_pub`, plain `pub` means that users reach it.
    public: bool,
}

fn definitions(module: &Module) -> Vec<Definition<'_>> {
    let inline = inline_modules(&module.code);
    let mut found = Vec::new();
    let mut offset = 0;
    for (number, line) in module.code.split_inclusive('\n').enumerate() {
        let indent = line.len() - line.trim_start().len();
        let depth = inline.iter().filter(|it| it.start < offset && offset < it.end).count();
        offset += line.len();
        let declared = without_visibility(line.trim());
        let declared = declared.strip_prefix("unsafe ").unwrap_or(declared);
        let Some((keyword, rest)) = declared.split_once(' ') else { continue };
        let is_type = match keyword {
            "struct" | "enum" | "trait" | "union" => true,
            // Deeper ones belong to a trait.
            "type" => indent == 4 * depth,
            _ => false,
        };
        let name = first_word(rest);
        if is_type && name.starts_with(|letter: char| letter.is_ascii_uppercase()) {
            let public = line.trim().starts_with("pub ");
            found.push(Definition { name, path: &module.path, line: number + 1, public });
        }
    }
    found
}

fn names_that_stand_twice(tree: &Crate) -> Vec<String> {
    let mut by_name = BTreeMap::<&str, Vec<Definition<'_>>>::new();
    for module in tree.modules.iter().filter(|module| !module.path.starts_with("model_tests/")) {
        for definition in definitions(module) {
            by_name.entry(definition.name).or_default().push(definition);
        }
    }
    by_name
        .into_iter()
        .filter(|(_, all)| all.iter().any(|it| !it.public))
        // Within a file they are alternatives of `cfg`.
        .filter(|(_, all)| all.iter().any(|it| it.path != all[0].path))
        .map(|(name, all)| {
            let places: Vec<_> = all.iter().map(|it| format!("{}:{}", it.path, it.line)).collect();
            format!("`{name}` is defined at {}: rename all but one", places.join(" and "))
        })
        .collect()
}

// (d) Persons in comments.

const PERSONS: [&str; 9] =
    ["who", "whoever", "whom", "whomever", "whose", "somebody", "nobody", "anybody", "everybody"];

fn is_comment(path: &str, line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("//") || (path.ends_with(".lua") && line.starts_with("--"))
}

fn names_a_person(comment: &str) -> bool {
    let comment = comment.to_ascii_lowercase();
    let words: Vec<_> = comment
        .split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
        .filter(|word| !word.is_empty())
        .collect();
    words.iter().any(|word| PERSONS.contains(word))
        || words.windows(2).any(|two| two[0] == "those" && matches!(two[1], "who" | "that"))
}

/// At most one comment line in a hundred may name a person.
fn persons_in_comments(sources: &[Source]) -> Option<String> {
    let mut comments = 0;
    let mut found = Vec::new();
    for source in sources {
        for (number, line) in source.text.lines().enumerate() {
            if is_comment(&source.path, line) {
                comments += 1;
                if names_a_person(line) {
                    found.push(format!("{}:{}: {}", source.path, number + 1, line.trim()));
                }
            }
        }
    }
    (found.len() * 100 > comments).then(|| {
        format!(
            "{} of {comments} comment lines name a person, {} may: say which type, field, event or code it is\n{}",
            found.len(),
            comments / 100,
            found.join("\n")
        )
    })
}

// (e) Size.

fn files_too_long(tree: &Crate) -> Vec<String> {
    tree.modules
        .iter()
        .filter(|module| !module.path.starts_with("model_tests/"))
        .filter(|module| module.code_lines() > MOST_CODE_LINES)
        .map(|module| {
            format!(
                "{}: {} lines of code, at most {MOST_CODE_LINES}: move a part with a name of its own into a file",
                module.path,
                module.code_lines()
            )
        })
        .collect()
}

// The samples.

fn sample(files: &[(&str, &str)]) -> Crate {
    let sources: Vec<_> = files.iter().map(|(path, text)| Source::sample(path, text)).collect();
    Crate::parse(&sources)
}

fn one(complaints: &[String]) -> &str {
    assert_eq!(complaints.len(), 1, "{complaints:#?}");
    &complaints[0]
}

const BASE: (&str, &str) = ("base/key.rs", "pub(crate) struct Key;\n");

#[test]
fn a_lower_folder_may_not_import_a_higher_one() {
    let lease =
        ("lease/lease.rs", "use crate::base::key::Key;\n\nfn f() { crate::lock::core::f(); }\n");
    let core = ("lock/core.rs", "use crate::lease::lease::f;\nuse crate::base::key::Key;\n");
    let tree = sample(&[BASE, ("lib.rs", "mod base;"), lease, core]);
    let complaint = upward_imports(&tree);
    let complaint = one(&complaint);
    assert!(
        complaint.starts_with("lease/lease.rs:3: imports crate::lock::core::f: "),
        "{complaint}"
    );
}

#[test]
fn imports_in_comments_strings_and_tests_do_not_count() {
    let text = "//! [`crate::lock::core`]\n\
                /* use crate::lock::core; */\n\
                const A: &str = \"crate::lock::core\";\n\
                const B: &str = r#\"use \" crate::lock::core\"#;\n\
                fn a<'a>() -> (char, &'a str) { ('\"', \"crate::lock::core\") }\n\
                #[cfg(test)]\nuse crate::lock::{core, core::b};\n\
                #[cfg(test)]\n#[path = \"x\"]\nmod tests;\n\
                #[cfg(test)]\nmod more {\n    use super::*;\n    use crate::lock::core;\n}\n";
    let tree = sample(&[
        ("lib.rs", ""),
        ("base/key.rs", text),
        ("base/key/tests.rs", "use crate::lock::core::f;\n"),
        ("lock/core.rs", "use crate::base::key;\n"),
    ]);
    assert_eq!(tree.modules.len(), 3);
    assert_eq!(upward_imports(&tree), [""; 0]);
    assert_eq!(circles(&tree), [""; 0]);
}

#[test]
fn an_import_in_a_list_counts_with_its_own_path() {
    let text = "use crate::{\n    backend::{self, Owner as Token},\n    base::key::{Key, *},\n    lock::core,\n};\n";
    let tree = sample(&[
        BASE,
        ("lib.rs", ""),
        ("exec/driver.rs", text),
        ("backend/mod.rs", ""),
        ("lock/core.rs", ""),
    ]);
    let complaints = upward_imports(&tree);
    assert_eq!(complaints.len(), 2, "{complaints:#?}");
    assert!(complaints[0].contains("crate::backend:"), "{complaints:#?}");
    assert!(complaints[1].contains("crate::lock::core:"), "{complaints:#?}");
}

#[test]
fn a_folder_of_redis_may_not_import_a_later_one() {
    let file = |path: &'static str, text: &'static str| (path, text);
    let tree = sample(&[
        file("lib.rs", ""),
        file("backend/mod.rs", "mod redis;\n"),
        file("backend/redis/mod.rs", "mod url;\nuse self::quorum::Q;\npub(crate) struct Shared;\n"),
        file("backend/redis/url.rs", "use super::net::tls;\n"),
        file(
            "backend/redis/net/tls.rs",
            "use crate::backend::redis::url;\nuse crate::backend::redis::Shared;\n",
        ),
        file(
            "backend/redis/quorum/mod.rs",
            "use super::url;\nuse crate::backend::redis::bad::x;\n",
        ),
        file("backend/redis/bad/x.rs", ""),
    ]);
    let complaints = upward_imports(&tree);
    assert_eq!(complaints.len(), 3, "{complaints:#?}");
    assert!(complaints[0].contains("`url` is below `net`"), "{complaints:#?}");
    assert!(complaints[1].contains("`net` is below `mod.rs`"), "{complaints:#?}");
    assert!(complaints[2].contains("`bad` is not in the table"), "{complaints:#?}");
}

#[test]
fn only_some_layers_serve_testing_and_none_imports_it() {
    let tree = sample(&[
        BASE,
        ("lib.rs", "pub use base::key::Key;\n"),
        ("testing/mod.rs", "use crate::base::key::Key;\nuse crate::queue::f;\n"),
        ("queue/mod.rs", "use crate::testing;\nuse crate::Key;\n"),
    ]);
    let complaints = upward_imports(&tree);
    assert_eq!(complaints.len(), 3, "{complaints:#?}");
    assert!(complaints.iter().any(|it| it.contains("`testing` may import only")));
    assert!(complaints.iter().any(|it| it.contains("nothing may import `testing`")));
    assert!(complaints.iter().any(|it| it.contains("not the crate root")));
}

#[test]
fn files_may_not_import_each_other() {
    let tree = sample(&[
        ("lib.rs", "mod a;\n"),
        ("a/mod.rs", "mod x;\nmod y;\npub(crate) use x::X;\nfn f() { y::g(); }\n"),
        ("a/x.rs", "use super::y::g;\n"),
        ("a/y.rs", "use crate::a::z;\n"),
        ("a/z.rs", "fn f() { super::x::f() }\n"),
    ]);
    let complaints = circles(&tree);
    let complaint = one(&complaints);
    assert!(
        complaint.starts_with("3 files import each other (a/x.rs, a/y.rs, a/z.rs)"),
        "{complaint}"
    );
    assert!(complaint.contains("a/z.rs:1: imports crate::a::x::f"), "{complaint}");
}

#[test]
fn a_child_may_use_its_parent_only_while_the_parent_does_not_use_it() {
    let parent = "pub(crate) mod x;\npub(crate) use self::x::X;\npub(crate) struct P;\n";
    let child = ("a/x.rs", "use super::P;\npub(crate) struct X;\n");
    assert_eq!(circles(&sample(&[("lib.rs", ""), ("a/mod.rs", parent), child])), [""; 0]);
    for back in ["use self::x::X;\n", "use x::X;\n", "fn f() { x::f() }\n"] {
        let parent = format!("mod x;\n{back}");
        let complaints = circles(&sample(&[("lib.rs", ""), ("a/mod.rs", &parent), child]));
        assert!(one(&complaints).contains("a/x.rs:1: imports crate::a::P"), "{complaints:#?}");
    }
}

#[test]
fn an_inline_module_imports_from_its_own_file() {
    let text = "mod real {\n    use super::Other;\n    pub(crate) fn f() {}\n}\nfn g() { self::real::f() }\n";
    let tree =
        sample(&[("lib.rs", ""), ("base/mod.rs", "use self::sync::g;\n"), ("base/sync.rs", text)]);
    assert_eq!(circles(&tree), [""; 0]);
}

#[test]
fn a_private_type_may_be_defined_only_once() {
    let tree = sample(&[
        ("lib.rs", ""),
        ("a.rs", "pub struct Both;\nenum Stage { A }\nimpl T for A {\n    type Output = B;\n}\n"),
        (
            "b.rs",
            "pub struct Both;\nstruct Once;\nstruct Once;\nfn f() {\n    struct Stage;\n}\ntype Output = u8;\n",
        ),
        ("c.rs", "#[cfg(test)]\nmod tests {\n    struct Stage;\n}\n// struct Stage\n"),
    ]);
    let complaints = names_that_stand_twice(&tree);
    assert_eq!(one(&complaints), "`Stage` is defined at a.rs:2 and b.rs:5: rename all but one");
}

#[test]
fn more_than_one_person_in_a_hundred_comments_is_too_much() {
    let lines = |count: usize| "// A waiter, whole.\nlet whose = 1;\n".repeat(count);
    let text = format!("{}/// Whoever waits.\n", lines(99));
    assert_eq!(persons_in_comments(&[Source::sample("a.rs", &text)]), None);
    for person in ["    // Who waits.", "//! Those that wait.", "/// It is nobody's."] {
        let text = format!("{}{person}\n-- who\n", lines(98));
        let complaint = persons_in_comments(&[Source::sample("a.rs", &text)]).unwrap();
        assert!(complaint.starts_with("1 of 99 comment lines name a person, 0 may"), "{complaint}");
        assert!(complaint.ends_with(&format!("a.rs:197: {}", person.trim())), "{complaint}");
    }
    assert!(persons_in_comments(&[Source::sample("a.lua", "-- who\n")]).is_some());
}

#[test]
fn a_long_file_is_named_without_its_comments_and_tests() {
    let comments = "// Why.\n\n/* a\nb */\n".repeat(200);
    let text = "const A: &str = \"\n//\n\";\n".repeat(166);
    let tests = format!("#[cfg(test)]\nmod tests {{\n{text}}}\n");
    let good = format!("{comments}{text}fn f() {{}}\nfn g() {{}}\n{tests}");
    assert_eq!(files_too_long(&sample(&[("lib.rs", &good)])), [""; 0]);
    let complaints = files_too_long(&sample(&[("lib.rs", &format!("{good}fn h() {{}}\n"))]));
    assert!(one(&complaints).starts_with("lib.rs: 501 lines of code"), "{complaints:#?}");
}

// The tree.

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn sources(folder: &str, endings: &[&str]) -> Vec<Source> {
    let mut found = Vec::new();
    let mut todo = vec![root().join(folder)];
    while let Some(folder) = todo.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if path.file_name().unwrap() != "target" {
                    todo.push(path);
                }
            } else if path.extension().is_some_and(|it| endings.iter().any(|ending| it == *ending))
            {
                found.push(path);
            }
        }
    }
    found.sort();
    found
        .into_iter()
        .map(|path| Source {
            text: fs::read_to_string(&path).unwrap(),
            path: path.strip_prefix(root()).unwrap().to_str().unwrap().replace('\\', "/"),
        })
        .collect()
}

/// The files of `folder`, with their paths in it.
fn below(folder: &str) -> Vec<Source> {
    let within =
        |source: Source| Source { path: source.path[folder.len() + 1..].to_owned(), ..source };
    sources(folder, &["rs"]).into_iter().map(within).collect()
}

fn runtime() -> Crate {
    let mut sources = below("lock-runtime/src");
    // A crate of its own.
    sources.retain(|source| !source.path.starts_with("bin/"));
    assert!(sources.len() > 50, "only {} files were read", sources.len());
    Crate::parse(&sources)
}

/// It can only use the public API: the compiler sees to that.
fn lockctl() -> Crate {
    let mut sources = below("lock-runtime/src/bin/lockctl");
    for source in sources.iter_mut().filter(|source| source.path == "main.rs") {
        source.path = "lib.rs".to_owned();
    }
    // By `#[path]`, a file that imports nothing.
    let base = below("lock-runtime/src/base").into_iter();
    sources.extend(base.filter(|source| source.path == "unprintable.rs"));
    Crate::parse(&sources)
}

fn assert_none(complaints: &[String]) {
    assert!(
        complaints.is_empty(),
        "{} below lock-runtime/src:\n{}",
        complaints.len(),
        complaints.join("\n")
    );
}

#[test]
fn the_runtime_imports_only_downwards() {
    assert_none(&upward_imports(&runtime()));
}

#[test]
fn no_files_of_a_crate_import_each_other() {
    assert_none(&circles(&runtime()));
    assert_none(&circles(&lockctl()));
}

#[test]
fn no_private_type_of_a_crate_is_defined_twice() {
    assert_none(&names_that_stand_twice(&runtime()));
    assert_none(&names_that_stand_twice(&lockctl()));
}

#[test]
fn every_file_of_a_crate_is_short() {
    assert_none(&files_too_long(&runtime()));
    assert_none(&files_too_long(&lockctl()));
}

#[test]
fn comments_name_types_and_events_instead_of_persons() {
    let sources: Vec<_> = ["lock-runtime", "lock-macros", "tests", "examples", "benches"]
        .into_iter()
        .flat_map(|folder| sources(folder, &["rs", "lua"]))
        .collect();
    if let Some(complaint) = persons_in_comments(&sources) {
        panic!("{complaint}");
    }
}
