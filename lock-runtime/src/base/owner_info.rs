//! The process of an owner, and the call that it acquires for, as stores keep them beside the owner token.

use std::fmt;

use crate::base::call_location::{CallLocation, LONGEST_FILE};
use crate::base::process::OfProcess;

/// The process that holds a lock, and where in its source it calls for it.
///
/// With the feature `serde` it can be serialized.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OwnerInfo {
    /// The name of its host; in a container, often the name of the pod.
    pub host: String,
    /// The number of the process on that host.
    pub process_id: u32,
    /// File and line of the annotated function, such as `src/orders.rs:42`, or of the call of
    /// [`LockPool::lock`](crate::LockPool::lock) or [`template`](crate::LockRequest::template). `None` if the store has only the process.
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
pub(crate) struct OwnerLabel(Option<(&'static str, Option<CallLocation>)>);

impl OwnerLabel {
    /// Says nothing.
    pub(crate) const EMPTY: Self = Self(None);

    /// A label of this process, for a call at `location`.
    pub(crate) fn of_process(location: Option<CallLocation>) -> Self {
        Self(Some((process_text(), location)))
    }

    /// Whether it says something.
    pub(crate) const fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Appends its text to `out`.
    pub(crate) fn write(&self, out: &mut impl fmt::Write) -> fmt::Result {
        let Some((process, location)) = self.0 else { return Ok(()) };
        out.write_str(process)?;
        let Some(location) = location else { return Ok(()) };
        out.write_char(' ')?;
        location.write(out)
    }

    /// What it says.
    pub(crate) fn info(&self) -> Option<OwnerInfo> {
        if self.is_some() { OwnerInfo::parse(self.to_string().as_bytes()) } else { None }
    }
}

impl fmt::Display for OwnerLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f)
    }
}

/// Bytes of the name of a host that are kept.
const LONGEST_HOST: usize = 64;

/// This process: its host, and its number there.
pub(crate) fn process_text() -> &'static str {
    static TEXT: OfProcess<String> = OfProcess::new();
    TEXT.get_or_init(|| format!("{}/{}", host(), std::process::id()))
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
    use crate::base::call_site::{Location, Site};
    use crate::base::options::LockOptions;

    #[test]
    fn what_is_written_is_parsed() {
        static SITE: Site = Site::new(
            Location { module: "app", function: "settle", file: "src/my orders.rs", line: 42 },
            "order:<id>",
            LockOptions::new(),
        );
        let location = CallLocation::Site(&SITE);
        for (location, call_site) in [(None, None), (Some(location), Some("src/my orders.rs:42"))] {
            let text = OwnerLabel::of_process(location).to_string();
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
}
