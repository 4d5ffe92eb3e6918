//! What the program learns about one call: its span, the metrics of its wait, and the events of a wait without a grant.

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tracing::Span;

use crate::base::call_site::LockLabel;
use crate::base::clock::Instant;
use crate::base::error::{ErrorKind, LockError};
use crate::base::lock_spec::LockSpec;
use crate::base::loss::Loss;
use crate::base::measurement::Measurement;
use crate::base::outcome::Outcome;
use crate::base::process::Process;
use crate::base::span_slot::SpanSlot;
use crate::exec::events::{self, Origin};
use crate::exec::panic_boundary;
use crate::lease::lease::Lease;
use crate::lock::core::PoolCore;

/// A call that waits for its lock. Dropped before the result, it counts as cancelled.
pub(crate) struct PendingCall {
    pub(crate) core: Arc<PoolCore>,
    pub(crate) spec: Arc<LockSpec>,
    span: CallSpan,
    wait: WaitState,
}

enum WaitState {
    /// Since this moment. `None` if nothing needs the time of the wait.
    Waiting(Option<Instant>),
    Over,
}

impl PendingCall {
    /// A call for the lock of `spec` begins to wait.
    #[inline]
    pub(crate) fn begin(core: Arc<PoolCore>, mut spec: LockSpec) -> Self {
        let (mut span, mut since) = (CallSpan::default(), None);
        if events::wants_calls() {
            since = Some(core.clock().now());
            if let Some(opened) = events::call_span(&spec.label, core.name()) {
                spec.span = SpanSlot::new(&opened);
                let stage = SpanStage::Waiting(Outcome::Cancelled);
                span = CallSpan::open(opened, spec.span.clone(), stage);
            }
        }
        spec.metrics = core.metrics.of(spec.label.public_name());
        spec.metrics.record(Measurement::WaitBegan);
        Self { core, spec: Arc::new(spec), span, wait: WaitState::Waiting(since) }
    }

    /// The call has `lease`.
    #[inline]
    pub(crate) fn granted(mut self, lease: &Arc<Lease>) -> CallSpan {
        self.wait = WaitState::Over;
        let metrics = &self.spec.metrics;
        if metrics.is_on() {
            metrics.record(Measurement::WaitEnded(Outcome::Acquired));
            metrics.record(Measurement::Waited(lease.waited()));
        }
        let mut span = std::mem::take(&mut self.span);
        if let Some(open) = &mut span.0 {
            events::record_wait(&open.span, Some(lease.waited()));
            events::record_fence(&open.span, lease.fence);
            open.stage = SpanStage::guarded(lease, Outcome::Released);
        }
        span
    }

    /// The call ends with `error`. Returns it in the form that the caller gets.
    #[cold]
    pub(crate) fn failed(self, error: LockError) -> LockError {
        let outcome = Outcome::Failed(error.kind());
        self.end(error, outcome)
    }

    /// The call was granted the lock, and did not take it in time.
    #[cold]
    pub(crate) fn unclaimed(self, error: LockError) -> LockError {
        self.end(error, Outcome::Unclaimed)
    }

    fn end(mut self, error: LockError, outcome: Outcome) -> LockError {
        let LockSpec { label, keys, .. } = &*self.spec;
        let error = error.at(label.lock_name()).of_keys(keys).in_pool(self.core.name());
        // The call is one of the parent process, and so are its span and its metrics.
        if self.core.is_inherited() {
            return error;
        }
        let waited = self.conclude(outcome);
        report_failure(&self.core, self.core.origin(&self.spec), waited, &error, outcome);
        self.close(waited, outcome);
        error
    }

    /// Ends the wait. Returns its time, if that is known.
    fn conclude(&mut self, outcome: Outcome) -> Option<Duration> {
        self.spec.metrics.record(Measurement::WaitEnded(outcome));
        match std::mem::replace(&mut self.wait, WaitState::Over) {
            WaitState::Waiting(Some(since)) => Some(self.core.clock().now().since(since)),
            WaitState::Waiting(None) | WaitState::Over => None,
        }
    }

    fn close(&mut self, waited: Option<Duration>, outcome: Outcome) {
        let Some(open) = &mut self.span.0 else { return };
        events::record_wait(&open.span, waited);
        open.stage = SpanStage::Waiting(outcome);
        self.span = CallSpan::default();
    }
}

impl fmt::Debug for PendingCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingCall").finish_non_exhaustive()
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        if matches!(self.wait, WaitState::Over) || self.core.is_inherited() {
            return;
        }
        let waited = self.conclude(Outcome::Cancelled);
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
    let slot = span.as_ref().map(SpanSlot::new).unwrap_or_default();
    let origin = Origin { label, pool: core.name(), span: &slot, metrics: &metrics };
    report_failure(core, origin, None, &error, outcome);
    drop(span.map(|span| CallSpan::open(span, slot, SpanStage::Waiting(outcome))));
    error
}

/// A call that passes through `lease`, which its task holds.
pub(crate) fn passed(core: &PoolCore, label: &LockLabel, lease: &Arc<Lease>) -> CallSpan {
    let metrics = core.metrics.of(label.public_name());
    metrics.record(Measurement::WaitBegan);
    metrics.record(Measurement::WaitEnded(Outcome::Passed));
    let Some(span) = events::call_span(label, core.name()) else { return CallSpan::default() };
    // Events of the lock name the span of the call that holds it.
    CallSpan::open(span, SpanSlot::default(), SpanStage::guarded(lease, Outcome::Passed))
}

fn report_failure(
    core: &PoolCore,
    origin: Origin<'_>,
    waited: Option<Duration>,
    error: &LockError,
    outcome: Outcome,
) {
    match outcome {
        Outcome::Failed(ErrorKind::Conflict) => events::conflict(origin, waited),
        Outcome::Failed(ErrorKind::QueueFull) => {
            if let Some(rejected) = core.queue_full.report(core.clock().now()) {
                events::queue_full(origin, rejected);
            }
        }
        _ => events::not_acquired(origin, waited, error),
    }
}

/// The span of a call. It closes when this is dropped: at the end of a wait without a grant, of the guard, or of the
/// release after the body. A forked child leaves it alone: the subscriber has the span of the parent.
#[derive(Default)]
pub(crate) struct CallSpan(Option<Box<OpenSpan>>);

struct OpenSpan {
    span: Span,
    /// Closed before the span is. Empty if no event names it.
    slot: SpanSlot,
    process: Process,
    stage: SpanStage,
    /// Whether the thread is inside it, for the drop of a body.
    is_entered: bool,
}

enum SpanStage {
    /// The call has no lock, and ends like this.
    Waiting(Outcome),
    Holding {
        lease: Arc<Lease>,
        progress: HoldProgress,
        /// Of a hold that is not cut short.
        outcome: Outcome,
    },
}

impl SpanStage {
    /// The call has `lease`, and no body yet.
    fn guarded(lease: &Arc<Lease>, outcome: Outcome) -> Self {
        Self::Holding { lease: lease.clone(), progress: HoldProgress::Guarded, outcome }
    }
}

#[derive(Clone, Copy, Debug)]
enum HoldProgress {
    /// A guard: its drop is the end.
    Guarded,
    /// A body: a drop cuts it short.
    Running,
    /// A body in its poll, which only a panic ends without a result.
    Polled,
    /// Ended after this time.
    Ended(Duration),
}

impl CallSpan {
    fn open(span: Span, slot: SpanSlot, stage: SpanStage) -> Self {
        Self(Some(Box::new(OpenSpan {
            span,
            slot,
            process: Process::current(),
            stage,
            is_entered: false,
        })))
    }

    /// The span is that of a body from now on.
    pub(crate) fn of_body(mut self) -> Self {
        self.set_progress(|_| HoldProgress::Running);
        self
    }

    /// Polls a body inside the span.
    #[inline]
    pub(crate) fn poll<T>(&mut self, body: impl FnOnce() -> T) -> T {
        if self.0.is_none() {
            return body();
        }
        self.set_progress(|_| HoldProgress::Polled);
        let polled = self.inside(body);
        self.set_progress(|_| HoldProgress::Running);
        polled
    }

    /// Runs `code` inside the span.
    #[inline]
    pub(crate) fn inside<T>(&self, code: impl FnOnce() -> T) -> T {
        let _inside = self.0.as_deref().and_then(Inside::enter);
        code()
    }

    /// A body is dropped next, inside the span. It is left as the span closes.
    pub(crate) fn enter_for_drop(&mut self) {
        if let Some(open) = self.0.as_deref_mut()
            && open.process.is_current()
        {
            events::enter(&open.span);
            open.is_entered = true;
        }
    }

    /// The guard is given back, or the body has returned. The release may take longer.
    pub(crate) fn on_hold_ended(&mut self) {
        self.set_progress(|lease| HoldProgress::Ended(lease.held_for()));
    }

    /// The body is cut short by `error`.
    #[cold]
    pub(crate) fn on_cancelled(&mut self, error: &LockError) {
        self.on_hold_ended();
        self.set_outcome(Outcome::Failed(error.kind()));
    }

    /// The end of the call waits for the release.
    pub(crate) fn awaits_release(&mut self) {
        self.set_outcome(Outcome::Unconfirmed);
    }

    pub(crate) fn on_released(&mut self, released: &Result<(), LockError>) {
        match released {
            Ok(()) => self.set_outcome(Outcome::Released),
            Err(error) if error.is_lost() => self.set_outcome(Outcome::Failed(ErrorKind::Lost)),
            Err(_) => {}
        }
    }

    fn set_outcome(&mut self, ends: Outcome) {
        if let Some(SpanStage::Holding { outcome, .. }) = self.stage() {
            *outcome = ends;
        }
    }

    fn set_progress(&mut self, next: impl FnOnce(&Lease) -> HoldProgress) {
        if let Some(SpanStage::Holding { lease, progress, .. }) = self.stage() {
            *progress = next(lease);
        }
    }

    fn stage(&mut self) -> Option<&mut SpanStage> {
        let open = self.0.as_deref_mut()?;
        // The lease of the parent process may be locked forever.
        open.process.is_current().then_some(&mut open.stage)
    }
}

impl Drop for CallSpan {
    fn drop(&mut self) {
        let Some(open) = self.0.take() else { return };
        if !open.process.is_current() {
            Box::leak(open);
            return;
        }
        let OpenSpan { span, slot, stage, is_entered, .. } = *open;
        slot.close();
        if is_entered {
            events::exit(&span);
        }
        let (held, outcome) = match &stage {
            SpanStage::Waiting(outcome) => (None, *outcome),
            SpanStage::Holding { lease, progress, outcome } => {
                let held =
                    if let HoldProgress::Ended(held) = progress { *held } else { lease.held_for() };
                (Some(held), outcome_of(*progress, lease.loss(), *outcome))
            }
        };
        events::record_end(&span, held, outcome.as_str());
        // The last handle calls the subscriber.
        let _ = panic_boundary::call(|| drop(span));
    }
}

fn outcome_of(progress: HoldProgress, loss: Option<Loss>, outcome: Outcome) -> Outcome {
    match (progress, loss) {
        (HoldProgress::Polled, _) => Outcome::Panicked,
        (HoldProgress::Guarded, _) if thread::panicking() => Outcome::Panicked,
        (_, Some(Loss::PoolClosed)) => Outcome::Failed(ErrorKind::PoolClosed),
        (_, Some(_)) => Outcome::Failed(ErrorKind::Lost),
        (HoldProgress::Running, None) => Outcome::Cancelled,
        (HoldProgress::Guarded | HoldProgress::Ended(_), None) => outcome,
    }
}

/// While it exists, its thread is inside the span.
struct Inside<'a>(&'a Span);

impl<'a> Inside<'a> {
    fn enter(open: &'a OpenSpan) -> Option<Self> {
        open.process.is_current().then(|| {
            events::enter(&open.span);
            Self(&open.span)
        })
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        events::exit(self.0);
    }
}

impl fmt::Debug for CallSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CallSpan").field(&self.0.is_some()).finish()
    }
}
