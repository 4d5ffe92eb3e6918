//! All traced events, as text.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use std::{fmt, io};

use tracing::subscriber::DefaultGuard;
use tracing::{Event, Metadata, Subscriber, span};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::eventually::{eventually, eventually_async};

/// A growing text of all events, spans and their fields, from TRACE up, one line each.
#[derive(Clone, Debug, Default)]
pub struct Logs(Arc<Mutex<Vec<u8>>>);

impl Logs {
    /// The text of the whole process from the first call on: every thread, and every test that
    /// runs beside this one. Events of the `log` crate are in it too.
    ///
    /// # Panics
    ///
    /// When the process has another global subscriber.
    pub fn global() -> Self {
        static LOGS: OnceLock<Logs> = OnceLock::new();
        let install = || {
            let logs = Self::default();
            subscriber(logs.clone()).init();
            logs
        };
        LOGS.get_or_init(install).clone()
    }

    /// The text of this thread while the guard lives, without that of the driver thread.
    pub fn of_this_thread() -> (Self, DefaultGuard) {
        let logs = Self::default();
        let guard = tracing::subscriber::set_default(subscriber(logs.clone()));
        (logs, guard)
    }

    /// All of it.
    pub fn text(&self) -> String {
        self.since(0).0
    }

    /// The text from the byte at `from` on, and the byte behind it. Of a growing text a reader takes each part once: a
    /// copy of all of it would hold up the events of all threads.
    pub fn since(&self, from: usize) -> (String, usize) {
        let text = self.0.lock().unwrap();
        let new = text.get(from..).unwrap_or_default().to_vec();
        let end = text.len();
        drop(text);
        (String::from_utf8_lossy(&new).into_owned(), end)
    }

    /// Waits until any line `matches`.
    ///
    /// # Panics
    ///
    /// With `what`, when `deadline` has passed.
    pub async fn until(&self, deadline: Duration, what: &str, matches: impl Fn(&str) -> bool) {
        let mut seen = 0;
        eventually_async(deadline, what, async || {
            let (new, end) = self.since(seen);
            seen = end;
            new.lines().any(&matches)
        })
        .await;
    }

    /// The lines that contain `needle`.
    pub fn lines_with(&self, needle: &str) -> Vec<String> {
        self.text().lines().filter(|line| line.contains(needle)).map(Into::into).collect()
    }

    /// Whether any line contains `needle`.
    pub fn contains(&self, needle: &str) -> bool {
        self.text().contains(needle)
    }

    /// Waits until a line contains `needle`.
    ///
    /// # Panics
    ///
    /// When `deadline` has passed.
    #[track_caller]
    pub fn wait_for(&self, deadline: Duration, needle: &str) {
        eventually(deadline, &format!("{needle:?} is logged"), || self.contains(needle));
    }

    /// Forgets what was logged so far.
    pub fn clear(&self) {
        self.0.lock().unwrap().clear();
    }
}

impl io::Write for Logs {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Logs {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// A subscriber that passes each event of the lock runtime to a function.
pub struct OnEvent<F>(pub F);

impl<F> fmt::Debug for OnEvent<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnEvent").finish_non_exhaustive()
    }
}

impl<F: Fn(&Event<'_>) + 'static> Subscriber for OnEvent<F> {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "lock_runtime"
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        (self.0)(event);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

fn subscriber(logs: Logs) -> impl Subscriber + Send + Sync {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        // Fields of a span without events, and those recorded late, show only here.
        .with_span_events(FmtSpan::NEW | FmtSpan::CLOSE)
        .with_ansi(false)
        .with_writer(logs)
        .finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::field::Empty;

    #[test]
    fn fields_of_events_and_spans_are_in_the_text() {
        let (logs, _guard) = Logs::of_this_thread();
        let span = tracing::trace_span!("acquire", key = "order:1", fence = Empty);
        span.in_scope(|| tracing::trace!(wait_ms = 5, "waiting"));
        span.record("fence", 77);
        drop(span);
        assert_eq!(logs.lines_with("waiting").len(), 1);
        assert!(
            logs.contains("order:1") && logs.contains("wait_ms=5") && logs.contains("fence=77")
        );
        let (text, end) = logs.since(0);
        assert_eq!(text, logs.text());
        tracing::info!("one more");
        assert!(logs.since(end).0.lines().eq(logs.lines_with("one more")));
        logs.clear();
        assert_eq!(logs.text(), "");
    }

    #[test]
    fn the_global_text_has_other_threads() {
        let logs = Logs::global();
        std::thread::spawn(|| tracing::trace!("from-afar")).join().unwrap();
        Logs::global().wait_for(Duration::from_secs(1), "from-afar");
        assert!(logs.contains("from-afar"));
    }
}
