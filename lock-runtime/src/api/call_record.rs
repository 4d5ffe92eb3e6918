//! What the program learns of one call: its span, the metrics of its wait, and the events of a wait without a grant.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tracing::Span;
use tracing::span;

use crate::base::call_site::LockLabel;
use crate::base::clock::Instant;
use crate::base::error::{ErrorKind, LockError};
use crate::base::lock_spec::LockSpec;
use crate::base::metrics::{self, Measurement};
use crate::base::outcome::Outcome;
use crate::base::span_slot::SpanSlot;
use crate::exec::events::{self, Origin};
use crate::exec::panic_boundary;
use crate::lease::lease::{Lease, Loss};
use crate::lock::core::PoolCore;

/// A call that waits for its lock. Dropped before the result, it counts as cancelled.
pub(crate) struct PendingCall {
    pub(crate) core: Arc<PoolCore>,
    pub(crate) spec: Arc<LockSpec>,
    span: Option<Box<Span>>,
    /// `None` if nothing needs the time of the wait.
    since: Option<Instant>,
    is_over: bool,
}

impl PendingCall {
    /// A call for the lock of `spec` begins to wait.
    #[inline]
    pub(crate) fn begin(core: Arc<PoolCore>, mut spec: LockSpec) -> Self {
        let (mut span, mut since) = (None, None);
        if events::wants_calls() {
            span = events::call_span(&spec.label, core.name()).map(Box::new);
            spec.span = span.as_deref().cloned().map(SpanSlot::new).unwrap_or_default();
            since = (span.is_some() || events::wants_failures()).then(|| core.clock().now());
        }
        if metrics::IS_ON {
            spec.metrics = core.metrics.of(spec.label.public_name());
            spec.metrics.record(Measurement::WaitBegan);
        }
        Self { core, spec: Arc::new(spec), span, since, is_over: false }
    }

    /// The call has `lease`.
    #[inline]
    pub(crate) fn granted(mut self, lease: &Arc<Lease>) -> CallSpan {
        self.end(Outcome::Acquired);
        let Some(span) = self.span.take() else { return CallSpan::default() };
        events::record_wait(&span, self.waited());
        events::record_fence(&span, lease.fence);
        let slot = self.spec.span.clone();
        CallSpan::open(*span, slot, lease.clone(), Outcome::Released)
    }

    /// The call ends with `error`. Returns it as its caller gets it.
    #[cold]
    pub(crate) fn failed(mut self, error: LockError) -> LockError {
        let LockSpec { label, keys, .. } = &*self.spec;
        let error = error.at(label.lock_name()).of_keys(keys).in_pool(self.core.name());
        let outcome = Outcome::Failed(error.kind());
        self.end(outcome);
        let waited = self.waited();
        report_failure(&self.core, self.core.origin(&self.spec), waited, &error);
        self.close(waited, outcome);
        error
    }

    fn end(&mut self, outcome: Outcome) {
        self.is_over = true;
        self.spec.metrics.record(Measurement::WaitEnded(outcome));
    }

    fn waited(&self) -> Option<Duration> {
        self.since.map(|since| self.core.clock().now().since(since))
    }

    fn close(&mut self, waited: Option<Duration>, outcome: Outcome) {
        if let Some(span) = self.span.take() {
            events::record_wait(&span, waited);
            close(*span, &self.spec.span, None, outcome);
        }
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        if self.is_over || self.core.is_inherited() {
            return;
        }
        self.end(Outcome::Cancelled);
        let waited = self.waited();
        events::cancelled(self.core.origin(&self.spec), waited);
        self.close(waited, Outcome::Cancelled);
    }
}

/// The error for the caller of a call that is refused before it waits.
#[cold]
pub(crate) fn refused(core: &PoolCore, label: &LockLabel, error: LockError) -> LockError {
    let error = error.at(label.lock_name()).in_pool(core.name());
    if core.is_inherited() {
        return error;
    }
    let outcome = Outcome::Failed(error.kind());
    let metrics = core.metrics.of(label.public_name());
    metrics.record(Measurement::WaitBegan);
    metrics.record(Measurement::WaitEnded(outcome));
    let span = events::call_span(label, core.name());
    let slot = span.clone().map(SpanSlot::new).unwrap_or_default();
    let origin = Origin { label, pool: core.name(), span: &slot, metrics: &metrics };
    report_failure(core, origin, None, &error);
    if let Some(span) = span {
        close(span, &slot, None, outcome);
    }
    error
}

/// A call that passes through `lease`, which its task holds.
pub(crate) fn passed(core: &PoolCore, label: &LockLabel, lease: &Arc<Lease>) -> CallSpan {
    let metrics = core.metrics.of(label.public_name());
    metrics.record(Measurement::WaitBegan);
    metrics.record(Measurement::WaitEnded(Outcome::Passed));
    match events::call_span(label, core.name()) {
        Some(span) => CallSpan::open(span, SpanSlot::default(), lease.clone(), Outcome::Passed),
        None => CallSpan::default(),
    }
}

fn report_failure(
    core: &PoolCore,
    origin: Origin<'_>,
    waited: Option<Duration>,
    error: &LockError,
) {
    match error.kind() {
        ErrorKind::Conflict => events::conflict(origin, waited),
        ErrorKind::QueueFull => {
            if let Some(rejected) = core.queue_full.report(core.clock().now()) {
                events::queue_full(origin, rejected);
            }
        }
        _ => events::not_acquired(origin, waited, error),
    }
}

fn close(span: Span, slot: &SpanSlot, held: Option<Duration>, outcome: Outcome) {
    events::record_end(&span, held, outcome.as_str());
    // The last handle calls the subscriber.
    let _ = panic_boundary::call(|| drop((span, slot.take())));
}

/// The span of a call that has its lock. It closes when this is dropped: at the end of the guard, or of the body and the
/// release behind it.
#[derive(Default)]
pub(crate) struct CallSpan(Option<Box<OpenSpan>>);

struct OpenSpan {
    span: Span,
    slot: SpanSlot,
    lease: Arc<Lease>,
    progress: HoldProgress,
    /// The outcome of a hold that is not cut short.
    outcome: Outcome,
}

#[derive(Clone, Copy, Debug)]
enum HoldProgress {
    /// A guard: its drop is the end.
    Guarded,
    /// A body: a drop cuts it short.
    Running,
    /// Ended after this time.
    Ended(Duration),
}

impl CallSpan {
    fn open(span: Span, slot: SpanSlot, lease: Arc<Lease>, outcome: Outcome) -> Self {
        let progress = HoldProgress::Guarded;
        Self(Some(Box::new(OpenSpan { span, slot, lease, progress, outcome })))
    }

    /// The span is that of a body from now on.
    pub(crate) fn of_body(mut self) -> Self {
        if let Some(open) = &mut self.0 {
            open.progress = HoldProgress::Running;
        }
        self
    }

    /// Enters the span until the result is dropped.
    pub(crate) fn enter(&self) -> Option<span::Entered<'_>> {
        self.0.as_ref().map(|open| open.span.enter())
    }

    /// The guard is given back, or the body has returned. The release may take longer.
    pub(crate) fn on_hold_ended(&mut self) {
        if let Some(open) = &mut self.0 {
            open.progress = HoldProgress::Ended(open.lease.held_for());
        }
    }
}

impl Drop for CallSpan {
    fn drop(&mut self) {
        let Some(open) = self.0.take() else { return };
        let OpenSpan { span, slot, lease, progress, outcome } = *open;
        let (held, outcome) = match progress {
            HoldProgress::Ended(held) => (held, outcome),
            HoldProgress::Guarded => (lease.held_for(), outcome),
            HoldProgress::Running => (lease.held_for(), Outcome::Cancelled),
        };
        let outcome = match lease.loss() {
            Some(Loss::PoolClosed) => Outcome::Failed(ErrorKind::PoolClosed),
            Some(_) => Outcome::Failed(ErrorKind::Lost),
            None => outcome,
        };
        close(span, &slot, Some(held), outcome);
    }
}

impl fmt::Debug for CallSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CallSpan").field(&self.0.is_some()).finish()
    }
}
