//! The `tracing` span of a call, as events name it.

use std::sync::Arc;

use tracing::Span;
use tracing::dispatcher::Dispatch;
use tracing::span::Id;

use crate::base::sync::Mutex;

/// Names the span of one call, for the events of that call. It is not a handle: an event that waits for its delivery keeps
/// no span open. Empty if no subscriber wants the span.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpanSlot(Option<Arc<NamedSpan>>);

#[derive(Debug)]
struct NamedSpan {
    id: Id,
    subscriber: Dispatch,
    /// Set by the call. Locked while a further handle is made, since the number of a closed span may be that of another.
    is_open: Mutex<bool>,
}

impl SpanSlot {
    pub(crate) fn new(span: &Span) -> Self {
        let named = span.with_subscriber(|(id, subscriber)| NamedSpan {
            id: id.clone(),
            subscriber: subscriber.clone(),
            is_open: Mutex::new(true),
        });
        Self(named.map(Arc::new))
    }

    /// The subscriber that the span belongs to.
    pub(crate) fn subscriber(&self) -> Option<&Dispatch> {
        self.0.as_ref().map(|span| &span.subscriber)
    }

    /// A handle of the span, while it is open.
    pub(crate) fn handle(&self) -> Option<SpanHandle> {
        let span = self.0.as_ref()?;
        let is_open = span.is_open.lock();
        is_open.then(|| SpanHandle {
            id: span.subscriber.clone_span(&span.id),
            subscriber: span.subscriber.clone(),
        })
    }

    /// The call ends, and closes its span next.
    pub(crate) fn close(&self) {
        if let Some(span) = &self.0 {
            *span.is_open.lock() = false;
        }
    }
}

/// Keeps a span open until it is dropped.
#[derive(Debug)]
pub(crate) struct SpanHandle {
    id: Id,
    subscriber: Dispatch,
}

impl SpanHandle {
    pub(crate) fn id(&self) -> Id {
        self.id.clone()
    }
}

impl Drop for SpanHandle {
    fn drop(&mut self) {
        self.subscriber.try_close(self.id.clone());
    }
}
