//! Polls a body only while its lease is valid, and releases the lock on every exit.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;

use crate::api::call_record::CallSpan;
use crate::api::guard::LockGuard;
use crate::api::reentrancy;
use crate::base::error::{ErrorKind, LockError, Progress};
use crate::base::options::{OnLost, ReleaseMode};
use crate::lease::held_lease::Releasing;
use crate::lease::lease::{Ending, Listener};

/// Permission to run a body.
#[derive(Debug)]
pub struct Entered(Access);

#[derive(Debug)]
enum Access {
    Locked(LockGuard),
    /// An outer call holds the lock, and releases it.
    Nested {
        guard: LockGuard,
        on_lost: OnLost,
    },
    Unlocked,
}

impl Entered {
    pub(crate) fn locked(guard: LockGuard) -> Self {
        Self(Access::Locked(guard))
    }

    pub(crate) fn nested(mut guard: LockGuard, on_lost: OnLost, span: CallSpan) -> Self {
        guard.set_span(span);
        Self(Access::Nested { guard, on_lost })
    }

    pub(crate) fn unlocked() -> Self {
        Self(Access::Unlocked)
    }

    pub(crate) fn into_guard(self) -> Option<LockGuard> {
        match self.0 {
            Access::Locked(guard) | Access::Nested { guard, .. } => Some(guard),
            Access::Unlocked => None,
        }
    }

    /// A borrowed guard for the body.
    ///
    /// # Panics
    /// Without a lock. The attribute refuses `guard` together with `when`.
    pub fn guard(&self) -> LockGuard {
        match &self.0 {
            Access::Locked(guard) | Access::Nested { guard, .. } => guard.borrowed(),
            Access::Unlocked => unreachable!("`guard` and `when` exclude each other"),
        }
    }

    /// Runs `body` while the lock is held, then releases it.
    pub fn run<F: Future>(self, body: F) -> Locked<F> {
        let held = |guard, on_lost| BodyState::Held {
            listener: None,
            guard,
            on_lost,
            progress: Progress::NotStarted,
        };
        let (stage, span) = match self.0 {
            Access::Locked(mut guard) => {
                let (on_lost, span) = (guard.lease().spec.policy.on_lost, guard.take_span());
                (held(guard, on_lost), span)
            }
            Access::Nested { mut guard, on_lost } => {
                let span = guard.take_span();
                (held(guard, on_lost), span)
            }
            Access::Unlocked => (BodyState::Open, CallSpan::default()),
        };
        Locked { body: Some(body), stage, output: None, span: span.of_body() }
    }
}

pin_project! {
    /// A body that runs under a lock. Resolves to its output, or to why it was cancelled.
    ///
    /// Fields drop in order: the body ends before the lock is released.
    #[must_use = "futures do nothing unless awaited"]
    pub struct Locked<F: Future> {
        #[pin]
        body: Option<F>,
        stage: BodyState,
        output: Option<F::Output>,
        // Open until the release is over.
        span: CallSpan,
    }

    impl<F: Future> PinnedDrop for Locked<F> {
        fn drop(this: Pin<&mut Self>) {
            let mut this = this.project();
            if this.body.is_some() {
                this.span.inside(|| this.body.set(None));
            }
        }
    }
}

enum BodyState {
    /// The body runs. A drop releases the lock without a wake-up of its own listener.
    Held {
        /// From the first poll that leaves the body pending.
        listener: Option<Listener>,
        /// Borrowed where an outer call holds the lock.
        guard: LockGuard,
        on_lost: OnLost,
        progress: Progress,
    },
    /// No lease to watch, and nothing to release.
    Open,
    /// The body has ended.
    Releasing(Releasing),
}

impl<F: Future> Future for Locked<F> {
    type Output = Result<F::Output, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            match this.stage {
                BodyState::Held { listener, guard, on_lost, progress } => {
                    let watched = *on_lost == OnLost::Cancel;
                    // With `on_lost = "notify"` a body goes on after a loss, but does not begin after one.
                    let begins = *progress == Progress::NotStarted;
                    let error =
                        if guard.is_borrowed() && !reentrancy::is_polled_within(guard.lease()) {
                            Some(outside(guard))
                        } else if (watched || begins) && !guard.is_held() {
                            Some(guard.end_error())
                        } else {
                            None
                        };
                    if let Some(error) = error {
                        let error = error.after(*progress);
                        this.span.inside(|| this.body.set(None));
                        this.span.on_cancelled(&error);
                        *this.stage = BodyState::Open;
                        *this.span = CallSpan::default();
                        return Poll::Ready(Err(error));
                    }
                    *progress = Progress::Unfinished;
                    let polled = this.span.poll(|| {
                        let body = this.body.as_mut().as_pin_mut()?;
                        let polled = reentrancy::enter(guard, || body.poll(cx));
                        if polled.is_ready() {
                            // The body's locals and arguments drop before the release.
                            this.body.set(None);
                        }
                        Some(polled)
                    });
                    match polled.unwrap_or(Poll::Pending) {
                        Poll::Ready(output) => {
                            *this.output = Some(output);
                            this.span.on_hold_ended();
                            // Otherwise the release would wake this very task.
                            *listener = None;
                            let mode = guard.lease().spec.policy.release;
                            *this.stage = match (guard.begin_release(mode), mode) {
                                (Some(releasing), ReleaseMode::Awaited) => {
                                    this.span.awaits_release();
                                    BodyState::Releasing(releasing)
                                }
                                _ => BodyState::Open,
                            };
                        }
                        Poll::Pending if !watched => return Poll::Pending,
                        // Lost meanwhile: the next round cancels the body.
                        Poll::Pending => {
                            let listener =
                                listener.get_or_insert_with(|| Listener::new(guard.lease()));
                            let _: Ending = ready!(listener.poll(cx));
                        }
                    }
                }
                BodyState::Releasing(releasing) => {
                    // An event reports a failed release. The result of the body stands.
                    this.span.on_released(&ready!(Pin::new(releasing).poll(cx)));
                    *this.stage = BodyState::Open;
                }
                BodyState::Open => {
                    if let Some(output) = this.output.take() {
                        *this.span = CallSpan::default();
                        return Poll::Ready(Ok(output));
                    }
                    let Some(body) = this.body.as_mut().as_pin_mut() else { return Poll::Pending };
                    let output = ready!(body.poll(cx));
                    this.body.set(None);
                    return Poll::Ready(Ok(output));
                }
            }
        }
    }
}

/// A reentrant call is polled outside of the body that holds the lock.
#[cold]
fn outside(guard: &LockGuard) -> LockError {
    let error = LockError::new(
        ErrorKind::Lost,
        "the reentrant call continues outside of the body that holds the lock",
    );
    guard.locate(error.remedy(
        "await a `reentrant` call in the body that made it; in a separate task, make the call there, so that it acquires the lock itself",
    ))
}

impl<F: Future> fmt::Debug for Locked<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locked").finish_non_exhaustive()
    }
}
