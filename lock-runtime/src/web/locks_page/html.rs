//! The text of the page.

use std::fmt::{self, Display, Formatter, Write};
use std::sync::Arc;
use std::time::Duration;

use crate::base::error::LockError;
use crate::base::inspection::Inspection;
use crate::base::unprintable::is_unprintable;
use crate::lock::snapshot::{HeldLock, Snapshot, WaitedKey};
use crate::web::locks_page::assets::{SCRIPT, STYLE};

/// The maximum number of rows in a table. The longest holds and waits come first.
const MOST_ROWS: usize = 500;

/// The whole page.
pub(super) struct Document<'a> {
    /// The last segment of its path, empty if the path ends with a slash.
    pub(super) folder: &'a str,
    pub(super) snapshots: &'a [Snapshot],
    pub(super) lookup: Lookup,
}

/// What the store says about a key that was looked up.
pub(super) enum Lookup {
    None,
    NoPool,
    Answer {
        index: usize,
        key: String,
        answer: Box<Result<Inspection, LockError>>,
        /// The pool's name, if the request may take the lock from its holder.
        may_release: Option<Arc<str>>,
        /// What such a request has led to, just before the answer.
        forced: Option<Forced>,
    },
}

/// The outcome of a forced release.
pub(super) enum Forced {
    Released,
    /// The lock is free, or another owner holds it.
    NotHeld,
    Failed(LockError),
}

impl Display for Document<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let separator = if self.folder.is_empty() { "" } else { "/" };
        // With the dot no segment is read as a scheme.
        let link = |name: &'static str| format!("./{}{separator}{name}", Escaped(self.folder));
        let (style, script) = (link(STYLE.name), link(SCRIPT.name));
        writeln!(
            f,
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n<title>Locks</title>\n\
             <link rel=\"stylesheet\" href=\"{style}\">\n<script src=\"{script}\" defer></script>\n\
             </head>\n<body>"
        )?;
        writeln!(
            f,
            "<header><h1>Locks of this process</h1><p id=\"state\" role=\"status\"><noscript>\
             <a href=\"?\">Refresh</a></noscript></p></header>"
        )?;
        self.form(f)?;
        self.lookup.fmt(f)?;
        writeln!(f, "<main>")?;
        if self.snapshots.is_empty() {
            writeln!(f, "<p class=\"none\">No lock pool is installed.</p>")?;
        }
        for snapshot in self.snapshots {
            pool(f, snapshot)?;
        }
        writeln!(f, "</main>\n</body>\n</html>")
    }
}

impl Document<'_> {
    fn form(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (shown_pool, shown_key) = match &self.lookup {
            Lookup::Answer { index, key, .. } => (Some(*index), key.as_str()),
            Lookup::None | Lookup::NoPool => (None, ""),
        };
        write!(f, "<form><label>Pool <select name=\"pool\">")?;
        for (index, snapshot) in self.snapshots.iter().enumerate() {
            let selected = if shown_pool == Some(index) { " selected" } else { "" };
            let pool = Escaped(&snapshot.pool);
            write!(f, "<option value=\"{index}\"{selected}>{pool}</option>")?;
        }
        writeln!(
            f,
            "</select></label> <label>Key <input name=\"key\" value=\"{}\" required \
             autocomplete=\"off\" spellcheck=\"false\"></label> <button>Look up in the store</button></form>",
            // Escaped, it would be another key.
            if shown_key.contains(is_unprintable) { Escaped("") } else { Escaped(shown_key) }
        )
    }
}

impl Display for Lookup {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => Ok(()),
            Self::NoPool => {
                writeln!(f, "<p class=\"error\">No pool of this name is installed.</p>")
            }
            Self::Answer { key, answer, may_release, forced, .. } => {
                write!(f, "<section><h2>{}</h2>", Visible(key))?;
                if let Some(forced) = forced {
                    forced.fmt(f)?;
                }
                match &**answer {
                    Ok(inspection) => {
                        looked_up(f, inspection)?;
                        if let Some(pool) = may_release {
                            release_form(f, pool, inspection)?;
                        }
                    }
                    Err(error) => {
                        write!(f, "<p class=\"error\">{}</p>", Visible(&error.to_string()))?;
                    }
                }
                writeln!(f, "</section>")
            }
        }
    }
}

impl Display for Forced {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Released => "The lock was taken from its holder.",
            Self::NotHeld => {
                "That holder no longer has the lock. It may have been taken just before."
            }
            Self::Failed(error) => {
                return write!(f, "<p class=\"error\">{}</p>", Visible(&error.to_string()));
            }
        };
        write!(f, "<p class=\"forced\" role=\"status\">{text}</p>")
    }
}

/// It names the holder: a later one keeps its lock.
fn release_form(f: &mut Formatter<'_>, pool: &str, inspection: &Inspection) -> fmt::Result {
    let Some(owner) = inspection.holder.as_ref().and_then(|holder| holder.owner) else {
        return Ok(());
    };
    write!(
        f,
        "<form method=\"post\" autocomplete=\"off\"><input type=\"hidden\" name=\"pool_name\" value=\"{}\">\
         <input type=\"hidden\" name=\"owner\" value=\"{owner}\"><label><input type=\"checkbox\" required> \
         the task of that process that has the lock now is cancelled, and until then runs beside the next holder's</label> \
         <button>Release by force</button></form>",
        Escaped(pool)
    )
}

fn looked_up(f: &mut Formatter<'_>, inspection: &Inspection) -> fmt::Result {
    write!(f, "<dl>")?;
    match &inspection.holder {
        None => write!(f, "<dt>holder</dt><dd>none, the key is free</dd>")?,
        Some(holder) => {
            match &holder.owner {
                Some(owner) => write!(f, "<dt>holder</dt><dd><code>{owner}</code></dd>")?,
                None => write!(f, "<dt>holder</dt><dd>a client of another library</dd>")?,
            }
            if let Some(info) = &holder.info {
                let (host, process) = (Visible(&info.host), info.process_id);
                write!(f, "<dt>process</dt><dd><code>{host}/{process}</code></dd>")?;
                if let Some(call_site) = &info.call_site {
                    write!(f, "<dt>call site</dt><dd><code>{}</code></dd>", Visible(call_site))?;
                }
            }
            if let Some(expires_in) = holder.expires_in {
                write!(f, "<dt>expires in</dt><dd>{}</dd>", Span(expires_in))?;
            }
            if let Some(fence) = holder.fence {
                write!(f, "<dt>fence</dt><dd>{fence}</dd>")?;
            }
        }
    }
    if let Some(waiting) = inspection.waiting {
        write!(f, "<dt>waiting processes</dt><dd>{waiting}")?;
        for waiter in &inspection.waiters {
            match &waiter.owner {
                Some(owner) => write!(f, " <code>{owner}</code>")?,
                None => write!(f, " <code>another library</code>")?,
            }
        }
        write!(f, "</dd>")?;
    }
    write!(f, "</dl>")
}

fn pool(f: &mut Formatter<'_>, snapshot: &Snapshot) -> fmt::Result {
    let Snapshot { pool, held, waiting, .. } = snapshot;
    writeln!(
        f,
        "<section data-pool=\"{0}\">\n<h2>Pool {0}</h2>\n<p>{1} held, {2} with waiting tasks</p>",
        Escaped(pool),
        held.len(),
        waiting.len(),
    )?;
    if !held.is_empty() {
        writeln!(
            f,
            "<table class=\"held\"><caption>Held</caption><thead><tr><th>key<th>function<th>held for<th>valid for\
             <th>fence<th>waiting here<th>owner</tr></thead><tbody>"
        )?;
        held.iter().take(MOST_ROWS).try_for_each(|lock| held_row(f, lock))?;
        end_table(f, held.len())?;
    }
    if !waiting.is_empty() {
        writeln!(
            f,
            "<table class=\"waiting\"><caption>Waited for</caption><thead><tr><th>key<th>tasks<th>first one waits\
             </tr></thead><tbody>"
        )?;
        waiting.iter().take(MOST_ROWS).try_for_each(|waited| waited_row(f, waited))?;
        end_table(f, waiting.len())?;
    }
    writeln!(f, "</section>")
}

fn held_row(f: &mut Formatter<'_>, lock: &HeldLock) -> fmt::Result {
    write!(f, "<tr><td data-label=\"key\">")?;
    for (index, key) in lock.keys.iter().enumerate() {
        let separator = if index == 0 { "" } else { " " };
        write!(f, "{separator}<code>{}</code>", Visible(key.as_str()))?;
    }
    if lock.lingers {
        write!(f, " <span class=\"lingers\">lingers</span>")?;
    }
    let function = lock.name.as_deref().or(lock.template).unwrap_or("");
    write!(
        f,
        "<td data-label=\"function\">{}<td data-label=\"held for\">{}<td data-label=\"valid for\">{}<td data-label=\"fence\">",
        Escaped(function),
        Span(lock.held_for),
        Span(lock.valid_for),
    )?;
    if let Some(fence) = lock.fence {
        write!(f, "{fence}")?;
    }
    writeln!(
        f,
        "<td data-label=\"waiting here\">{}<td data-label=\"owner\"><code>{}</code></tr>",
        lock.waiting, lock.owner
    )
}

fn waited_row(f: &mut Formatter<'_>, waited: &WaitedKey) -> fmt::Result {
    writeln!(
        f,
        "<tr><td data-label=\"key\"><code>{}</code><td data-label=\"tasks\">{}<td data-label=\"first one waits\">{}</tr>",
        Visible(waited.key.as_str()),
        waited.waiting,
        Span(waited.waited_for)
    )
}

fn end_table(f: &mut Formatter<'_>, rows: usize) -> fmt::Result {
    writeln!(f, "</tbody></table>")?;
    if rows > MOST_ROWS {
        writeln!(f, "<p class=\"none\">{} more</p>", rows - MOST_ROWS)?;
    }
    Ok(())
}

/// Text as content of an element or of a quoted attribute.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for char in self.0.chars() {
            match char {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                char => f.write_char(char)?,
            }
        }
        Ok(())
    }
}

/// Visible text, without characters that are invisible, or that change the order of others.
struct Visible<'a>(&'a str);

impl Display for Visible<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for part in self.0.split_inclusive(is_unprintable) {
            let seen = part.trim_end_matches(is_unprintable);
            Escaped(seen).fmt(f)?;
            write!(f, "{}", part[seen.len()..].escape_default())?;
        }
        Ok(())
    }
}

/// A duration in the largest unit that fits, with one decimal below a minute.
struct Span(Duration);

impl Display for Span {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        match seconds {
            0 => write!(f, "{} ms", self.0.as_millis()),
            1..60 => write!(f, "{:.1} s", self.0.as_secs_f64()),
            60..3600 => write!(f, "{} min {} s", seconds / 60, seconds % 60),
            _ => write!(f, "{} h {} min", seconds / 3600, seconds / 60 % 60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::inspection::LockHolder;
    use crate::base::owner_info::OwnerInfo;

    #[test]
    fn a_character_that_is_not_seen_is_escaped() {
        let text = Visible("order:1\u{202e}24<\u{200b}\u{7}注").to_string();
        assert_eq!(text, "order:1\\u{202e}24&lt;\\u{200b}\\u{7}注");
    }

    #[test]
    fn markup_in_a_key_is_text() {
        assert_eq!(
            Escaped("<script>\"a\" & 'b'</script>").to_string(),
            "&lt;script&gt;&quot;a&quot; &amp; &#39;b&#39;&lt;/script&gt;"
        );
    }

    #[test]
    fn a_holder_is_shown_with_its_process() {
        let holder = LockHolder::new(None).with_info(OwnerInfo::parse(b"web-7/4711 src/<b>.rs:42"));
        let answer = Box::new(Ok(Inspection::new(Some(holder))));
        let key = "order:1".to_owned();
        let lookup =
            Lookup::Answer { index: 0, key, answer, may_release: Some("p".into()), forced: None };
        let text = lookup.to_string();
        assert!(!text.contains("<form"), "it is no holder of this framework: {text}");
        for part in ["<code>web-7/4711</code>", "<code>src/&lt;b&gt;.rs:42</code>"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn durations_have_one_or_two_units() {
        let shown = |millis| Span(Duration::from_millis(millis)).to_string();
        assert_eq!(
            [shown(7), shown(1_250), shown(59_940), shown(61_000), shown(7_260_000)],
            ["7 ms", "1.2 s", "59.9 s", "1 min 1 s", "2 h 1 min"]
        );
    }

    #[test]
    fn links_are_relative_to_the_last_segment() {
        let page = |folder| Document { folder, snapshots: &[], lookup: Lookup::None }.to_string();
        assert!(page("locks").contains("href=\"./locks/style.css\""));
        assert!(page("").contains("src=\"./live.js\""));
        assert!(page("a\"b").contains("href=\"./a&quot;b/style.css\""));
        assert!(page("").contains("No lock pool is installed."));
    }
}
