//! Where in its source a program calls for a lock.

use std::fmt;
use std::panic;
use std::path::Path;

use crate::base::call_site::{LockLabel, Site};

/// As text: file and line, such as `src/orders.rs:42`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CallLocation {
    /// Of the attribute, or of the template of a route.
    Site(&'static Site),
    /// Of the call of the programmatic API.
    Call(&'static panic::Location<'static>),
}

impl CallLocation {
    pub(crate) const fn of(label: &LockLabel) -> Self {
        match label {
            LockLabel::Site(site) => Self::Site(site),
            LockLabel::Template(_, at) | LockLabel::Key(_, at) => Self::Call(at),
        }
    }

    /// Appends its text to `out`.
    pub(crate) fn write(&self, out: &mut impl fmt::Write) -> fmt::Result {
        match self {
            Self::Site(site) => out
                .write_str(site.location_text(|at| format!("{}:{}", file_name(at.file), at.line))),
            Self::Call(at) => write!(out, "{}:{}", file_name(at.file()), at.line()),
        }
    }
}

impl fmt::Display for CallLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f)
    }
}

/// Bytes of a path that are kept.
pub(crate) const LONGEST_FILE: usize = 120;

/// What is kept of a path in the source of a program. The end of a long path tells more than its start. A dependency has an
/// absolute path: its start is a directory of the machine that built the program.
fn file_name(file: &str) -> &str {
    tail(if Path::new(file).has_root() { in_package(file) } else { file }, LONGEST_FILE)
}

/// The part of an absolute path from the directory of its package on, such as `shop-1.2.0/src/orders.rs`.
fn in_package(file: &str) -> &str {
    const SEPARATORS: [char; 2] = ['/', '\\'];
    let parts = |count| file.rmatch_indices(SEPARATORS).nth(count).map_or(0, |(at, _)| at + 1);
    let depth = file.split(SEPARATORS).rev().position(|part| part == "src").unwrap_or(0);
    // Without a directory `src` the name of the file remains.
    let part = file.get(parts(if depth > 0 { depth + 1 } else { 0 })..).unwrap_or_default();
    part.trim_start_matches(SEPARATORS)
}

fn tail(text: &str, length: usize) -> &str {
    let from = text.len().saturating_sub(length);
    (from..=text.len()).find_map(|from| text.get(from..)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_location_of_a_call_is_that_of_the_caller() {
        let (at, line) = (panic::Location::caller(), line!());
        assert_eq!(CallLocation::Call(at).to_string(), format!("{}:{line}", file!()));
    }

    #[test]
    fn an_absolute_path_loses_the_directories_of_its_builder() {
        for (file, kept) in [
            ("src/orders.rs", "src/orders.rs"),
            ("shop/src/api/orders.rs", "shop/src/api/orders.rs"),
            (
                "/home/me/.cargo/registry/src/index-1/shop-1.2.0/src/api/orders.rs",
                "shop-1.2.0/src/api/orders.rs",
            ),
            ("/build/shop/src/orders.rs", "shop/src/orders.rs"),
            ("/src/orders.rs", "src/orders.rs"),
            ("/build/shop/tests/orders.rs", "orders.rs"),
        ] {
            assert_eq!(file_name(file), kept, "{file}");
        }
    }

    #[test]
    fn a_long_path_keeps_its_end() {
        assert_eq!(tail("src/orders.rs", 9), "orders.rs");
        assert_eq!(tail("a", 9), "a");
        assert_eq!(tail("äö", 3), "ö");
    }
}
