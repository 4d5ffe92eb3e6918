//! Events of the library as lines on standard error, for a log of what was done.

use std::fmt::{Debug, Write};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::set_global_default;
use tracing::{Event, Metadata, Subscriber};

use crate::output::{FAINT, error_text, printable};

/// Prints each warning from now on, in the form `event: released by force owner=1f2e3d4c by=alice at web-7/4711`.
pub(crate) fn print() {
    // The program has no other subscriber.
    let _ = set_global_default(EventLines);
}

struct EventLines;

impl Subscriber for EventLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        !metadata.is_span()
            && metadata.target() == "lock_runtime"
            && *metadata.level() <= LevelFilter::WARN
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = EventLine::default();
        event.record(&mut line);
        let EventLine { message, fields } = line;
        error_text(&format!("{FAINT}event:{FAINT:#} {}\n", printable(&(message + &fields))));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct EventLine {
    message: String,
    fields: String,
}

impl Visit for EventLine {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a `String` cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
