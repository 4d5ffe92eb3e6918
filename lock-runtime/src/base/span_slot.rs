//! The `tracing` span of a call.

use std::sync::{Arc, Mutex, PoisonError};

use tracing::Span;

/// The span of one call, for the events of that call. Empty if no subscriber wants it, and after the call has ended: a
/// release or an undo in the background does not keep the span open.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpanSlot(Option<Arc<Mutex<Option<Span>>>>);

impl SpanSlot {
    pub(crate) fn new(span: Span) -> Self {
        if span.is_disabled() {
            return Self(None);
        }
        Self(Some(Arc::new(Mutex::new(Some(span)))))
    }

    /// Another handle of the span, if it is open. It calls the subscriber.
    pub(crate) fn span(&self) -> Option<Span> {
        let slot = self.0.as_ref()?;
        slot.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Empties the slot. The span closes with its last handle.
    pub(crate) fn take(&self) -> Option<Span> {
        let slot = self.0.as_ref()?;
        slot.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
