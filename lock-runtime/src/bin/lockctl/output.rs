//! What the commands print: text with colours, or JSON.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Stdout, Write};
use std::process::ExitCode;
use std::time::Duration;

use anstream::adapter::strip_str;
use anstream::{AutoStream, ColorChoice};
use clap::builder::styling::{AnsiColor, Style};
use lock_runtime::{LockHolder, OwnerTag};
use serde_json::Value;

use crate::latency::Latency;
use crate::unprintable::is_unprintable;

pub(crate) const STRONG: Style = Style::new().bold();
pub(crate) const FAINT: Style = Style::new().dimmed();
pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
pub(crate) const HELD: Style = AnsiColor::Yellow.on_default();
pub(crate) const BAD: Style = AnsiColor::Red.on_default().bold();

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    Json,
}

/// How a command that had its answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Done,
    /// The store cannot be reached, grants no lock, or does not show the holder.
    Unreachable,
    /// The key is free, or another owner holds it.
    NotHeld,
    /// A check has led to a warning, or could not be made; or a holder is not known.
    Warned,
}

impl End {
    pub(crate) fn exit_code(self) -> ExitCode {
        match self {
            Self::Done => ExitCode::SUCCESS,
            Self::Unreachable => 1.into(),
            Self::NotHeld => 3.into(),
            Self::Warned => 4.into(),
        }
    }
}

/// Standard output. Colours are left out where it is not a terminal, and with `NO_COLOR`.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) format: Format,
}

impl Output {
    pub(crate) const fn new(format: Format) -> Self {
        Self { format }
    }

    /// Prints `json`, or the text that `text` makes.
    pub(crate) fn print(&self, json: &Value, text: impl FnOnce() -> String) -> io::Result<()> {
        match self.format {
            Format::Text => self.raw(text().as_bytes()),
            Format::Json => self.raw(format!("{}\n", escaped(&format!("{json:#}"))).as_bytes()),
        }
    }

    /// Prints `json` on one line.
    pub(crate) fn json_line(&self, json: &Value) -> io::Result<()> {
        self.raw(format!("{}\n", escaped(&json.to_string())).as_bytes())
    }

    /// Shows `text`, as far as there is room, and `foot` in place of what the terminal shows. Elsewhere they follow what was
    /// printed before.
    pub(crate) fn screen(&self, text: &str, foot: &str) -> io::Result<()> {
        /// To the first line of the terminal.
        const TOP: &str = "\u{1b}[H";
        /// Clears what is left of the line, and of the screen.
        const REST_OF_LINE: &str = "\u{1b}[K";
        const REST_OF_SCREEN: &str = "\u{1b}[J";
        let stdout = io::stdout();
        if !stdout.is_terminal() || std::env::var_os("TERM").is_some_and(|it| it == "dumb") {
            return self.raw(format!("{text}{foot}").as_bytes());
        }
        let text = match terminal_size(&stdout) {
            Some(size) => fitted(text, foot, size),
            None => format!("{text}{foot}"),
        };
        // Without colours `anstream` would also drop these sequences.
        let is_plain = AutoStream::choice(&stdout) == ColorChoice::Never;
        let text = if is_plain { strip_str(&text).to_string() } else { text };
        let text = text.replace('\n', &format!("{REST_OF_LINE}\n"));
        let mut stdout = stdout.lock();
        write!(stdout, "{TOP}{text}{REST_OF_SCREEN}")?;
        stdout.flush()
    }

    pub(crate) fn raw(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stdout = anstream::stdout();
        stdout.write_all(bytes)?;
        stdout.flush()
    }
}

/// The rows and columns of the terminal. `None` if it does not tell them.
#[cfg(unix)]
fn terminal_size(stdout: &Stdout) -> Option<(usize, usize)> {
    let size = rustix::termios::tcgetwinsize(stdout).ok()?;
    let (rows, columns) = (size.ws_row.into(), size.ws_col.into());
    (rows > 0 && columns > 0).then_some((rows, columns))
}

#[cfg(not(unix))]
const fn terminal_size(_: &Stdout) -> Option<(usize, usize)> {
    None
}

/// The lines of `text` that fit into these rows and columns together with `foot`, and how many do not. A screen that is too
/// long would scroll, and its head would not be seen.
fn fitted(text: &str, foot: &str, (rows, columns): (usize, usize)) -> String {
    let height = |line: &str| {
        let width: usize = strip_str(line).map(|part| part.chars().count()).sum();
        width.div_ceil(columns).max(1)
    };
    // The cursor is in the line below the foot.
    let room = rows.saturating_sub(foot.lines().map(height).sum::<usize>() + 1);
    let lines: Vec<_> = text.lines().collect();
    if lines.iter().copied().map(height).sum::<usize>() <= room {
        return format!("{text}{foot}");
    }
    let (mut shown, mut used) = (String::new(), 1);
    for (number, line) in lines.iter().enumerate() {
        used += height(line);
        if used > room {
            let _ = writeln!(shown, "and {} more lines", lines.len() - number);
            break;
        }
        shown += line;
        shown.push('\n');
    }
    shown + foot
}

/// Prints `text` to standard error, which may be closed or full: the exit code tells the rest.
pub(crate) fn error_text(text: &str) {
    let mut stderr = anstream::stderr();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

/// `text` without characters that control a terminal, or that change the order or the width of others.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unprintable) {
        return Cow::Borrowed(text);
    }
    let escaped = |it: char| {
        if is_unprintable(it) { it.escape_default().to_string() } else { it.to_string() }
    };
    Cow::Owned(text.chars().map(escaped).collect())
}

/// The same value as the text `json`, in which no string has such a character.
fn escaped(json: &str) -> Cow<'_, str> {
    // A line feed in a string is escaped already.
    let is_escaped = |it: char| it != '\n' && is_unprintable(it);
    if !json.contains(is_escaped) {
        return Cow::Borrowed(json);
    }
    let mut text = String::with_capacity(json.len() + 16);
    for it in json.chars() {
        if is_escaped(it) {
            for unit in it.encode_utf16(&mut [0; 2]) {
                let _ = write!(text, "\\u{unit:04x}");
            }
        } else {
            text.push(it);
        }
    }
    Cow::Owned(text)
}

/// The tag of an owner. A client of another library has none.
pub(crate) fn owner_text(owner: Option<OwnerTag>) -> String {
    owner.map_or_else(|| "another client".to_owned(), |tag| tag.to_string())
}

/// The holder in one line.
pub(crate) fn holder_text(holder: &LockHolder) -> String {
    let mut text = owner_text(holder.owner);
    if let Some(info) = &holder.info {
        text += &format!(" ({})", printable(&info.to_string()));
    }
    if let Some(left) = holder.expires_in {
        text += &format!(", for {} if it does not renew", duration_text(left));
    }
    if let Some(fence) = holder.fence {
        text += &format!(", fence {fence}");
    }
    text
}

/// `p50 0.21 ms, p99 0.83 ms`
pub(crate) fn latency_text(latency: &Latency) -> String {
    let millis = |span: Duration| span.as_secs_f64() * 1_000.0;
    format!("p50 {:.2} ms, p99 {:.2} ms", millis(latency.p50), millis(latency.p99))
}

/// `250 ms`, `27.3 s`, `12 min`
pub(crate) fn duration_text(span: Duration) -> String {
    match span.as_secs() {
        0 => format!("{} ms", span.as_millis()),
        1..=119 => format!("{:.1} s", span.as_secs_f64()),
        seconds => format!("{} min", seconds / 60),
    }
}

#[cfg(test)]
mod tests {
    use lock_runtime::OwnerInfo;

    use super::*;

    #[test]
    fn a_key_cannot_write_to_the_terminal() {
        assert_eq!(printable("order:42 ä"), "order:42 ä");
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\\n");
        assert_eq!(printable("\u{9b}"), "\\u{9b}");
        assert_eq!(printable("a\u{202e}b\u{2069}\u{200b}"), "a\\u{202e}b\\u{2069}\\u{200b}");
        assert_eq!(printable("注文:42 é"), "注文:42 é");
    }

    #[test]
    fn a_screen_is_not_longer_than_the_terminal() {
        let text: String =
            (1..=6).map(|number| format!("{STRONG}row {number}{STRONG:#}\n")).collect();
        let fitted = |size| strip_str(&fitted(&text, "foot\n", size)).to_string();
        let whole = "row 1\nrow 2\nrow 3\nrow 4\nrow 5\nrow 6\nfoot\n";
        assert_eq!(fitted((8, 80)), whole);
        assert_eq!(fitted((7, 80)), "row 1\nrow 2\nrow 3\nrow 4\nand 2 more lines\nfoot\n");
        // Each row takes two lines.
        assert_eq!(fitted((8, 4)), "row 1\nrow 2\nand 4 more lines\nfoot\n");
        assert_eq!(fitted((1, 80)), "and 6 more lines\nfoot\n");
    }

    #[test]
    fn json_has_the_same_value_without_characters_that_a_terminal_obeys() {
        let key = "order:\u{9b}31m\u{7f}\u{202e}\u{e0041}\n\u{1b}\"\\ä 注";
        let value = serde_json::json!({ "locks": [{ "key": key }] });
        for text in [value.to_string(), format!("{value:#}")] {
            let escaped = escaped(&text);
            assert!(!escaped.contains(|it| it != '\n' && is_unprintable(it)), "{escaped:?}");
            assert!(escaped.contains(r"\u009b31m\u007f\u202e\udb40\udc41\n\u001b"), "{escaped}");
            assert!(escaped.contains("ä 注"), "{escaped}");
            assert_eq!(serde_json::from_str::<Value>(&escaped).unwrap(), value);
        }
        assert!(matches!(escaped("{\n  \"key\": 1\n}"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_holder_is_told_with_its_process() {
        let holder = LockHolder::new(None).with_expiry(Some(Duration::from_secs(7)));
        assert_eq!(holder_text(&holder), "another client, for 7.0 s if it does not renew");
        let known =
            holder.with_info(OwnerInfo::parse("web/4711 src/\u{202e}orders.rs:42".as_bytes()));
        let text = holder_text(&known);
        assert!(
            text.starts_with("another client (web/4711 src/\\u{202e}orders.rs:42), for"),
            "{text}"
        );
    }

    #[test]
    fn times_have_a_unit() {
        for (millis, text) in
            [(0, "0 ms"), (999, "999 ms"), (27_349, "27.3 s"), (720_000, "12 min")]
        {
            assert_eq!(duration_text(Duration::from_millis(millis)), text);
        }
    }
}
