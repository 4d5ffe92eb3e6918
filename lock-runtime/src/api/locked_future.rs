//! The body under the lock: runs only while the lease is held, and releases on every way out.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;

use crate::api::guard::LockGuard;
use crate::api::reentrancy;
use crate::base::error::{ErrorKind, LockError, Progress};
use crate::base::options::{OnLost, ReleaseMode};
use crate::lease::lease::{Ending, Listener};
use crate::lock::release::Releasing;

/// The right to run a body.
#[derive(Debug)]
pub struct Entry(Ticket);

#[derive(Debug)]
enum Ticket {
    Locked(LockGuard),
    /// The lock is held by a call further out, which also sees to its release.
    Nested {
        view: LockGuard,
        on_lost: OnLost,
    },
    Unlocked,
}

impl Entry {
    pub(crate) fn locked(guard: LockGuard) -> Self {
        Self(Ticket::Locked(guard))
    }

    pub(crate) fn nested(view: LockGuard, on_lost: OnLost) -> Self {
        Self(Ticket::Nested { view, on_lost })
    }

    pub(crate) fn unlocked() -> Self {
        Self(Ticket::Unlocked)
    }

    pub(crate) fn into_guard(self) -> Option<LockGuard> {
        match self.0 {
            Ticket::Locked(guard) | Ticket::Nested { view: guard, .. } => Some(guard),
            Ticket::Unlocked => None,
        }
    }

    /// A view of the lease for the body.
    ///
    /// # Panics
    /// Without a lock. The attribute refuses `guard` together with `when`.
    pub fn guard(&self) -> LockGuard {
        match &self.0 {
            Ticket::Locked(guard) | Ticket::Nested { view: guard, .. } => guard.view(),
            Ticket::Unlocked => unreachable!("`guard` and `when` exclude each other"),
        }
    }

    /// Runs `body` while the lock is held, then releases it.
    pub fn run<F: Future>(self, body: F) -> Locked<F> {
        let held = |guard, on_lost| Stage::Held {
            listener: None,
            guard,
            on_lost,
            progress: Progress::NotStarted,
        };
        let stage = match self.0 {
            Ticket::Locked(guard) => {
                let on_lost = guard.lease().ask.policy.on_lost;
                held(guard, on_lost)
            }
            Ticket::Nested { view, on_lost } => held(view, on_lost),
            Ticket::Unlocked => Stage::Open,
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
    /// The body runs. Dropped here, the lock is let go without a word to its own listener.
    Held {
        /// From the first poll that leaves the body pending.
        listener: Option<Listener>,
        /// A view where a call further out holds the lock.
        guard: LockGuard,
        on_lost: OnLost,
        progress: Progress,
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
                Stage::Held { listener, guard, on_lost, progress } => {
                    let watched = *on_lost == OnLost::Cancel;
                    // A body that is only told about a loss still does not begin after one.
                    let begins = *progress == Progress::NotStarted;
                    let error = if guard.is_view() && !reentrancy::is_within(guard.lease()) {
                        Some(outside(guard))
                    } else if (watched || begins) && !guard.is_held() {
                        Some(guard.end_error())
                    } else {
                        None
                    };
                    if let Some(error) = error {
                        let error = error.after(*progress);
                        this.body.set(None);
                        *this.stage = Stage::Open;
                        return Poll::Ready(Err(error));
                    }
                    let Some(body) = this.body.as_mut().as_pin_mut() else { return Poll::Pending };
                    *progress = Progress::Unfinished;
                    match reentrancy::within(guard, || body.poll(cx)) {
                        Poll::Ready(output) => {
                            // The body's locals and arguments end before the lock does.
                            this.body.set(None);
                            *this.output = Some(output);
                            // Otherwise the release would wake this very task.
                            *listener = None;
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
                            let listener =
                                listener.get_or_insert_with(|| Listener::new(guard.lease()));
                            let _: Ending = ready!(listener.poll(cx));
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

/// A call that was let through the lock around it is polled outside of the body that holds the lock.
#[cold]
fn outside(guard: &LockGuard) -> LockError {
    let error = LockError::new(
        ErrorKind::Lost,
        "the call was let through the lock around it, and goes on outside of the body that holds the lock",
    );
    guard.locate(error.remedy(
        "await a `reentrant` call in the body that made it; in a task of its own make the call there, so that it takes the lock itself",
    ))
}

impl<F: Future> fmt::Debug for Locked<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locked").finish_non_exhaustive()
    }
}
