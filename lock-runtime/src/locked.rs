//! The body under the lock: runs only while the lease is held, and releases on every way out.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;

use crate::error::LockError;
use crate::guard::LockGuard;
use crate::lease::Loss;
use crate::nesting;
use crate::options::{OnLost, ReleaseMode};
use crate::release::Releasing;

/// The right to run a body.
#[derive(Debug)]
pub struct Entry(Ticket);

#[derive(Debug)]
enum Ticket {
    Locked(LockGuard),
    /// The lock is held by a call further out, which also sees to its loss and release.
    Nested(LockGuard),
    Unlocked,
}

impl Entry {
    pub(crate) fn locked(guard: LockGuard) -> Self {
        Self(Ticket::Locked(guard))
    }

    pub(crate) fn nested(guard: LockGuard) -> Self {
        Self(Ticket::Nested(guard))
    }

    pub(crate) fn unlocked() -> Self {
        Self(Ticket::Unlocked)
    }

    pub(crate) fn into_guard(self) -> Option<LockGuard> {
        match self.0 {
            Ticket::Locked(guard) | Ticket::Nested(guard) => Some(guard),
            Ticket::Unlocked => None,
        }
    }

    /// A view of the lease for the body.
    ///
    /// # Panics
    /// Without a lock. The attribute refuses `guard` together with `when`.
    pub fn guard(&self) -> LockGuard {
        match &self.0 {
            Ticket::Locked(guard) | Ticket::Nested(guard) => guard.view(),
            Ticket::Unlocked => unreachable!("`guard` and `when` exclude each other"),
        }
    }

    /// Runs `body` while the lock is held, then releases it.
    pub fn run<F: Future>(self, body: F) -> Locked<F> {
        let stage = match self.0 {
            Ticket::Locked(guard) => Stage::Held { guard, listener: None, started: false },
            Ticket::Nested(_) | Ticket::Unlocked => Stage::Open,
        };
        Locked { body: Some(body), stage, output: None }
    }
}

pin_project! {
    /// A body that runs under a lock: its output, or why it was stopped.
    ///
    /// Fields drop in order: dropped half-way, the body ends before the lock is let go.
    #[must_use = "futures do nothing unless awaited"]
    pub struct Locked<F: Future> {
        #[pin]
        body: Option<F>,
        stage: Stage,
        output: Option<F::Output>,
    }
}

enum Stage {
    Held {
        guard: LockGuard,
        listener: Option<u64>,
        /// Whether the body has been polled.
        started: bool,
    },
    /// Nothing to watch and nothing to release.
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
                Stage::Held { guard, listener, started } => {
                    let watched = guard.lease().ask.policy.on_lost == OnLost::Cancel;
                    // A body that is only told about a loss still does not begin after one.
                    if (watched || !*started) && !guard.is_held() {
                        let error = guard.end_error();
                        this.body.set(None);
                        *this.stage = Stage::Open;
                        return Poll::Ready(Err(error));
                    }
                    let Some(body) = this.body.as_mut().as_pin_mut() else { return Poll::Pending };
                    *started = true;
                    match nesting::within(guard, || body.poll(cx)) {
                        Poll::Ready(output) => {
                            // The body's locals and arguments end before the lock does.
                            this.body.set(None);
                            *this.output = Some(output);
                            let mode = guard.lease().ask.policy.release;
                            *this.stage = match (guard.let_go(), mode) {
                                (Some(releasing), ReleaseMode::Awaited) => {
                                    Stage::Releasing(releasing)
                                }
                                _ => Stage::Open,
                            };
                        }
                        Poll::Pending if !watched => return Poll::Pending,
                        // Lost meanwhile: go round once more and stop it.
                        Poll::Pending => {
                            let _: Loss = ready!(guard.lease().poll_lost(listener, cx));
                        }
                    }
                }
                Stage::Releasing(releasing) => {
                    // A failed release has been reported; the body's result stands.
                    let _ = ready!(Pin::new(releasing).poll(cx));
                    *this.stage = Stage::Open;
                }
                Stage::Open => {
                    if let Some(output) = this.output.take() {
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

impl<F: Future> fmt::Debug for Locked<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locked").finish_non_exhaustive()
    }
}
