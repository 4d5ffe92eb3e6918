//! The `tracing` span of a call, as events name it.

use std::sync::atomic::{AtomicBool, Ordering};

use tracing::Span;
use tracing::dispatcher::Dispatch;
use tracing::span::Id;

/// Names the span of one call, for the events of that call. It is no handle: an event that is delivered late keeps no span
/// open. Empty if no subscriber wants the span.
#[derive(Debug, Default)]
pub(crate) struct SpanSlot(Option<Box<NamedSpan>>);

#[derive(Debug)]
struct NamedSpan {
    id: Id,
    subscriber: Dispatch,
    is_open: AtomicBool,
}

impl SpanSlot {
    pub(crate) fn new(span: &Span) -> Self {
        let named = span.with_subscriber(|(id, subscriber)| NamedSpan {
            id: id.clone(),
            subscriber: subscriber.clone(),
            is_open: AtomicBool::new(true),
        });
        Self(named.map(Box::new))
    }

    /// The subscriber that the span belongs to.
    pub(crate) fn subscriber(&self) -> Option<&Dispatch> {
        self.0.as_ref().map(|span| &span.subscriber)
    }

    /// The span, while it is open. Afterwards a subscriber may use its number for another one.
    pub(crate) fn id(&self) -> Option<Id> {
        let open = self.0.as_ref().filter(|span| span.is_open.load(Ordering::Relaxed));
        open.map(|span| span.id.clone())
    }

    /// The call ends, and closes its span.
    pub(crate) fn close(&self) {
        if let Some(span) = &self.0 {
            span.is_open.store(false, Ordering::Relaxed);
        }
    }
}
