//! The process of an owner, and the call that it acquires for, as stores keep them beside the owner token.

use std::fmt;
use std::path::Path;

use crate::base::call_site::{Location, Site};
use crate::base::process::OfProcess;

/// The process that holds a lock, and the annotated function.
///
/// With the feature `serde` it can be serialized.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OwnerInfo {
    /// The name of its host; in a container, often the name of the pod.
    pub host: String,
    /// The number of the process on that host.
    pub process_id: u32,
    /// File and line of the annotated function, such as `src/orders.rs:42`. `None` for the programmatic API.
    pub call_site: Option<String>,
}

/// As text: `web-7/4711 src/orders.rs:42`, without the last part if there is no call site.
impl fmt::Display for OwnerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.process_id)?;
        match &self.call_site {
            Some(call_site) => write!(f, " {call_site}"),
            None => Ok(()),
        }
    }
}

impl OwnerInfo {
    /// Parses what `to_string` writes, for a [`Backend`](crate::backend::Backend) that stores it. `None` for other text.
    ///
    /// ```
    /// use lock_runtime::OwnerInfo;
    ///
    /// let text = b"web-7/4711 src/orders.rs:42";
    /// let info = OwnerInfo::parse(text).unwrap();
    /// assert_eq!((info.host.as_str(), info.process_id), ("web-7", 4711));
    /// assert_eq!(info.call_site.as_deref(), Some("src/orders.rs:42"));
    /// assert_eq!(info.to_string().as_bytes(), text);
    /// ```
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        let (process, call_site) = match text.split_once(' ') {
            Some((process, call_site)) => (process, Some(call_site.to_owned())),
            None => (text, None),
        };
        let (host, process_id) = process.rsplit_once('/')?;
        // A value of another program is not shown as a process.
        let is_of_host = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let is_host = (1..=LONGEST_HOST).contains(&host.len()) && host.bytes().all(is_of_host);
        let is_number = process_id.bytes().all(|byte| byte.is_ascii_digit());
        // A file, and the number of a line.
        let is_call_site = call_site.as_ref().is_none_or(|text| {
            text.len() <= LONGEST_FILE + 12 && !text.chars().any(char::is_control)
        });
        if !is_host || !is_number || !is_call_site {
            return None;
        }
        Some(Self { host: host.to_owned(), process_id: process_id.parse().ok()?, call_site })
    }
}

/// What a request says about its owner: nothing, or `host/process`, or `host/process file:line`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OwnerLabel(Option<(&'static str, Option<&'static Site>)>);

impl OwnerLabel {
    /// Says nothing.
    pub(crate) const EMPTY: Self = Self(None);

    /// A label of this process, for a call at `site`.
    pub(crate) fn of_process(site: Option<&'static Site>) -> Self {
        Self(Some((process_text(), site)))
    }

    /// Whether it says something.
    pub(crate) const fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// The parts of its text.
    pub(crate) fn parts(&self) -> [&'static str; 3] {
        let text = |at: &Location| format!("{}:{}", file_name(at.file), at.line);
        match self.0 {
            None => [""; 3],
            Some((process, None)) => [process, "", ""],
            Some((process, Some(site))) => [process, " ", site.location_text(text)],
        }
    }

    /// What it says.
    pub(crate) fn info(&self) -> Option<OwnerInfo> {
        if self.is_some() { OwnerInfo::parse(self.to_string().as_bytes()) } else { None }
    }
}

impl fmt::Display for OwnerLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [process, space, location] = self.parts();
        f.write_str(process)?;
        f.write_str(space)?;
        f.write_str(location)
    }
}

/// Bytes of a path that are kept.
const LONGEST_FILE: usize = 120;
/// Bytes of the name of a host that are kept.
const LONGEST_HOST: usize = 64;

/// This process: its host, and its number there.
pub(crate) fn process_text() -> &'static str {
    static TEXT: OfProcess<String> = OfProcess::new();
    TEXT.get_or_init(|| format!("{}/{}", host(), std::process::id()))
}

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

/// The name of this host, without characters that have a meaning in the stored text.
fn host() -> String {
    #[cfg(unix)]
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    let name = std::env::var("COMPUTERNAME").unwrap_or_default();
    let is_plain = |it: char| it.is_ascii_alphanumeric() || matches!(it, '-' | '.' | '_');
    let plain = name.chars().map(|it| if is_plain(it) { it } else { '_' });
    let plain: String = plain.take(LONGEST_HOST).collect();
    if plain.is_empty() { "unknown".to_owned() } else { plain }
}

#[cfg(feature = "serde")]
crate::base::serialized_fields::serialized_fields!(OwnerInfo, it => {
    host: it.host,
    process_id: it.process_id,
    call_site: it.call_site,
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::call_site::Location;
    use crate::base::options::LockOptions;

    #[test]
    fn what_is_written_is_parsed() {
        static SITE: Site = Site::new(
            Location { module: "app", function: "settle", file: "src/my orders.rs", line: 42 },
            "order:<id>",
            LockOptions::new(),
        );
        for (site, call_site) in [(None, None), (Some(&SITE), Some("src/my orders.rs:42"))] {
            let text = OwnerLabel::of_process(site).to_string();
            let info = OwnerInfo::parse(text.as_bytes()).unwrap();
            assert_eq!(info.to_string(), text);
            assert_eq!(info.process_id, std::process::id());
            assert!(!info.host.is_empty() && !info.host.contains(' '), "{text}");
            assert_eq!(info.call_site.as_deref(), call_site);
        }
        assert_eq!(OwnerLabel::default().to_string(), "");
        for other in [
            "",
            "web-7",
            "web-7/x",
            "10.0.0.7",
            "web-7/99999999999",
            "/5",
            "web/+5",
            "\u{1b}]0;x/5",
            "web/5 a\u{9b}31m",
        ] {
            assert_eq!(OwnerInfo::parse(other.as_bytes()), None, "{other}");
        }
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
