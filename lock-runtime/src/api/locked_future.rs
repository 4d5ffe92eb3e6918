//! Polls a body only while its lease is valid, and releases the lock on every exit.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;

use crate::api::call_record::CallSpan;
use crate::api::enter::Entering;
use crate::api::entered::{Access, Entered};
use crate::api::guard::LockGuard;
use crate::api::reentrancy;
use crate::base::error::{ErrorKind, LockError, Progress};
use crate::base::options::{OnLost, ReleaseMode};
use crate::lease::held_lease::Releasing;
use crate::lease::lease_state::Ending;
use crate::lease::listener::Listener;

pin_project! {
    /// A future that is dropped as soon as it has completed, like an `async` block. So a body is dropped before the release.
    pub(crate) struct Fuse<F> {
        #[pin]
        body: Option<F>,
    }
}

impl<F> Fuse<F> {
    pub(crate) fn new(body: F) -> Self {
        Self { body: Some(body) }
    }
}

impl<F: Future> Future for Fuse<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let mut body = self.project().body;
        let Some(running) = body.as_mut().as_pin_mut() else { return Poll::Pending };
        let output = ready!(running.poll(cx));
        body.set(None);
        Poll::Ready(output)
    }
}

impl Entering {
    /// Runs `body`, an `async` block, once the lock is acquired, then releases it.
    pub fn run<F: Future<Output = R>, R>(self, body: F) -> Locked<F, R> {
        Locked::new(LockedCall::entering(self), body)
    }
}

impl Entered {
    /// Runs `body`, an `async` block, while the lock is held, then releases it.
    pub fn run<F: Future<Output = R>, R>(self, body: F) -> Locked<F, R> {
        Locked::new(LockedCall::entered(self), body)
    }
}

pin_project! {
    /// A body that runs under a lock. Resolves to its output, or to why it did not run or was cancelled.
    ///
    /// Fields drop in order: a cancelled body ends before the lock is released. One that has completed is an `async` block,
    /// which has dropped its locals and captures by then.
    ///
    /// Each annotated function has a type of its own here. Code that does not touch the body is compiled once, in
    /// `LockedCall`. There the body's type is erased, because rustc would walk through its fields for each of these types.
    #[must_use = "futures do nothing unless awaited"]
    pub struct Locked<F, R> {
        #[pin]
        body: F,
        state: Box<dyn LockState>,
        output: Option<R>,
    }

    impl<F, R> PinnedDrop for Locked<F, R> {
        fn drop(this: Pin<&mut Self>) {
            this.project().state.before_drop();
        }
    }
}

impl<F, R> Locked<F, R> {
    fn new(state: LockedCall, body: F) -> Self {
        Self { body, state: Box::new(state), output: None }
    }
}

impl<F: Future<Output = R>, R> Future for Locked<F, R> {
    type Output = Result<R, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let mut running = Running { body: this.body, output: this.output };
        let ended = this.state.poll(cx, &mut running);
        taken(ended, running.output)
    }
}

fn taken<R>(
    ended: Poll<Result<(), LockError>>,
    output: &mut Option<R>,
) -> Poll<Result<R, LockError>> {
    match (ready!(ended), output.take()) {
        (Err(error), _) => Poll::Ready(Err(error)),
        (Ok(()), Some(output)) => Poll::Ready(Ok(output)),
        (Ok(()), None) => Poll::Pending,
    }
}

/// The body of a [`Locked`], and where its output goes.
struct Running<'a, F, R> {
    body: Pin<&'a mut F>,
    output: &'a mut Option<R>,
}

/// A body without its type.
trait Body {
    /// Ready once the output is stored.
    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<()>;
}

impl<F: Future<Output = R>, R> Body for Running<'_, F, R> {
    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        stored(self.body.as_mut().poll(cx), self.output)
    }
}

fn stored<R>(polled: Poll<R>, output: &mut Option<R>) -> Poll<()> {
    *output = Some(ready!(polled));
    Poll::Ready(())
}

/// The lock around a body.
trait LockState: Send + Sync {
    /// Ready once `body` has stored its output and the lock is released, or with the reason to drop the body.
    fn poll(&mut self, cx: &mut Context<'_>, body: &mut dyn Body) -> Poll<Result<(), LockError>>;

    /// The body is dropped next, and this after it.
    fn before_drop(&mut self);
}

/// The lock around a body, and the span of the call, which is open until the release is over.
struct LockedCall {
    state: BodyState,
    span: CallSpan,
}

impl LockedCall {
    fn entering(entering: Entering) -> Self {
        Self { state: BodyState::Entering(entering), span: CallSpan::default() }
    }

    fn entered(mut entered: Entered) -> Self {
        let span = entered.take_span().of_body();
        Self { state: BodyState::entered(entered), span }
    }
}

#[derive(Debug)]
enum BodyState {
    Entering(Entering),
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
    Ended,
}

impl BodyState {
    fn entered(entered: Entered) -> Self {
        let held = |guard, on_lost| Self::Held {
            listener: None,
            guard,
            on_lost,
            progress: Progress::NotStarted,
        };
        match entered.0 {
            Access::Locked(guard) => {
                let on_lost = guard.lease().spec.policy.on_lost;
                held(guard, on_lost)
            }
            Access::Nested { guard, on_lost } => held(guard, on_lost),
            Access::Unlocked => Self::Open,
        }
    }
}

impl LockState for LockedCall {
    fn poll(&mut self, cx: &mut Context<'_>, body: &mut dyn Body) -> Poll<Result<(), LockError>> {
        loop {
            match &mut self.state {
                BodyState::Entering(entering) => {
                    *self = Self::entered(ready!(Pin::new(entering).poll(cx))?);
                }
                BodyState::Held { listener, guard, on_lost, progress } => {
                    let watched = *on_lost == OnLost::Cancel;
                    // With `on_lost = "notify"` a body goes on after a loss, but does not begin after one.
                    let begins = *progress == Progress::NotStarted;
                    let running = guard.enter_body();
                    let error =
                        if guard.is_borrowed() && !reentrancy::is_polled_within(guard.lease()) {
                            Some(outside(guard))
                        } else if (watched || begins) && !guard.is_held() {
                            Some(guard.end_error())
                        } else {
                            None
                        };
                    if let Some(error) = error {
                        self.span.on_cancelled(&error);
                        if !begins {
                            // Its locals are dropped with it.
                            running.keep();
                        }
                        return Poll::Ready(Err(error.after(*progress)));
                    }
                    *progress = Progress::Unfinished;
                    let poll = || reentrancy::enter(guard, &running, || body.poll_body(cx));
                    let polled = self.span.poll(poll);
                    drop(running);
                    match polled {
                        Poll::Ready(()) => {
                            self.span.on_hold_ended();
                            // Otherwise the release would wake this very task.
                            *listener = None;
                            let mode = guard.lease().spec.policy.release;
                            self.state = match (guard.begin_release(mode), mode) {
                                (Some(releasing), ReleaseMode::Awaited) => {
                                    self.span.awaits_release();
                                    BodyState::Releasing(releasing)
                                }
                                _ => BodyState::Ended,
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
                    self.span.on_released(&ready!(Pin::new(releasing).poll(cx)));
                    self.state = BodyState::Ended;
                }
                BodyState::Open => {
                    ready!(body.poll_body(cx));
                    self.state = BodyState::Ended;
                }
                BodyState::Ended => {
                    self.span = CallSpan::default();
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }

    fn before_drop(&mut self) {
        if let BodyState::Held { guard, progress: Progress::Unfinished, .. } = &self.state {
            guard.enter_body().keep();
        }
        self.span.enter_for_drop();
    }
}

/// A reentrant call is polled outside the body that holds the lock.
#[cold]
fn outside(guard: &LockGuard) -> LockError {
    let error = LockError::new(
        ErrorKind::Lost,
        "the reentrant call continues outside the body that holds the lock",
    );
    guard.locate(error.remedy(
        "await a `reentrant` call in the body that made it; in a separate task, make the call there, so that it acquires the lock itself",
    ))
}

impl<F, R> fmt::Debug for Locked<F, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locked").finish_non_exhaustive()
    }
}
