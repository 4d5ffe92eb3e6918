//! The face of a lease: releases as it goes.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::backend::{BackendError, FailureKind, LeaseStatus};
use crate::base::error::{ErrorKind, LockError, Progress};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::exec::events;
use crate::exec::panic_boundary;
use crate::lease::lease::{Ending, Lease, Listener, Loss};
use crate::lock::core::Engine;
use crate::lock::release::{Releasing, release};

/// A lock that is held. Dropping it releases in the background, also when the caller's runtime is gone;
/// [`release`](Self::release) waits until others can have it.
///
/// The watchdog renews the lease as long as the guard lives. When it cannot, the guard stops believing
/// in time: [`is_held`](Self::is_held) turns false by the local clock, without any answer.
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct LockGuard {
    engine: Arc<Engine>,
    lease: Arc<Lease>,
    role: Role,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Ends the lease.
    Owner,
    /// Looks at a lease that somebody else ends.
    View,
}

impl LockGuard {
    pub(crate) fn new(engine: Arc<Engine>, lease: Arc<Lease>) -> Self {
        Self { engine, lease, role: Role::Owner }
    }

    pub(crate) fn view(&self) -> Self {
        Self { engine: self.engine.clone(), lease: self.lease.clone(), role: Role::View }
    }

    pub(crate) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// The key, without the pool's prefix; the first one if several are held.
    #[must_use]
    pub fn key(&self) -> &Key {
        // A lease has at least one key: `acquire` is not called without.
        &self.lease.ask.keys[0]
    }

    /// All keys, sorted.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.lease.ask.keys
    }

    /// The fencing token of this grant. `None` if the lock was asked for without
    /// (`fencing(false)`), or the store has none.
    #[must_use]
    pub fn fence(&self) -> Option<Fence> {
        self.lease.fence
    }

    /// Whether the lock may be believed to be held. Reads only the local clock.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !self.engine.is_inherited() && self.lease.is_held()
    }

    /// How long the lock may be believed to be held if no further renewal succeeds.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        if self.is_held() { self.lease.valid_for() } else { Duration::ZERO }
    }

    /// Resolves when the hold ends, with the reason.
    ///
    /// | how the hold ends | kind of the error |
    /// |---|---|
    /// | the lock is lost, or its `max_hold` is over; told a little before belief ends, so that there is time to stop | [`ErrorKind::Lost`] |
    /// | the pool shuts down, and its grace is over | [`ErrorKind::PoolClosed`] |
    /// | the holder lets the lock go: by `release`, by a drop of the guard, or at the end of the body | [`ErrorKind::Released`] |
    ///
    /// The future borrows nothing and may outlive the guard. A task that waits for it ends with the hold at the latest.
    /// [`is_lost`](LockError::is_lost) tells a loss from a release.
    ///
    /// ```
    /// # use lock_runtime::{ErrorKind, LockPool};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// let guard = LockPool::connect("memory://").await?.lock("order:42").acquire().await?;
    /// let alarm = tokio::spawn({
    ///     let lost = guard.lost();
    ///     async move {
    ///         let error = lost.await;
    ///         if error.is_lost() {
    ///             eprintln!("{error}");
    ///         }
    ///         error.kind()
    ///     }
    /// });
    /// guard.release().await?;
    /// assert_eq!(alarm.await.unwrap(), ErrorKind::Released);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Cancel safe. Dropped, it leaves nothing behind.
    pub fn lost(&self) -> Lost {
        Lost { guard: self.view(), listener: Listener::new(&self.lease) }
    }

    /// Asks the store whether the lock is still ours (Chubby's CheckSequencer).
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if it is not, [`ErrorKind::Backend`] if the store cannot be asked.
    pub async fn verify(&self) -> Result<(), LockError> {
        self.ask_the_store().await.map_err(|error| error.after(Progress::Unfinished))
    }

    async fn ask_the_store(&self) -> Result<(), LockError> {
        if self.engine.is_inherited() {
            return Err(self.locate(LockError::inherited()));
        }
        if let Some(loss) = self.lease.loss() {
            return Err(self.loss_error(loss));
        }
        // The store knows the process by the same name still; the lock is another task's.
        if self.lease.is_passed_on() {
            return Err(self.loss_error(Loss::Taken));
        }
        let (engine, request) = (self.engine.clone(), self.lease.to_store());
        let request_timeout = engine.request_timeout;
        let asked = async move { timeout(request_timeout, engine.store.is_held(&request)).await };
        let outcome = self.engine.driver.run(asked).await?;
        let silence =
            || BackendError::new(FailureKind::MaybeApplied, "the store did not answer in time");
        match outcome.unwrap_or_else(|_| Err(silence())) {
            Ok(LeaseStatus::Held) if !self.lease.is_passed_on() => Ok(()),
            // Not there; or handed on while the store was asked.
            Ok(LeaseStatus::Held | LeaseStatus::NotHeld) => {
                if self.lease.lose(Loss::Taken) {
                    events::lost(&self.lease, Loss::Taken);
                }
                Err(self.loss_error(Loss::Taken))
            }
            Err(error) => Err(self.locate(LockError::backend(error))),
        }
    }

    /// Releases the lock and waits until the store has done it.
    ///
    /// Not cancel safe in the sense that dropping the future does not keep the lock: the release goes
    /// on in the background.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if the lock was not ours any more, [`ErrorKind::Backend`] if the store did
    /// not confirm within twice the pool's request_timeout; it is then retried in the background until the ttl
    /// is over.
    pub async fn release(self) -> Result<(), LockError> {
        if self.engine.is_inherited() {
            return Err(self.locate(LockError::inherited()));
        }
        let loss = self.lease.loss();
        let released = match self.let_go() {
            Some(releasing) => releasing.await.map_err(|error| self.locate(error)),
            None => Ok(()),
        };
        let outcome = match (released, loss) {
            (Ok(()), Some(loss)) => Err(self.loss_error(loss)),
            (outcome, _) => outcome,
        };
        outcome.map_err(|error| error.after(Progress::Finished))
    }

    /// Gives the guard to the one who waits for it. If that one is gone, it comes back and releases as
    /// it drops; so it does when the pool has begun to shut down, too late to begin something.
    pub(crate) fn deliver(self, reply: oneshot::Sender<Result<Self, LockError>>) {
        let open = self.engine.registry.is_open();
        let outcome = if open { Ok(self) } else { Err(LockError::shutdown()) };
        panic_boundary::answer(reply, outcome);
    }

    /// This guard, for the caller that it was made for; or why its lease is over already.
    pub(crate) fn picked_up(self) -> Result<Self, LockError> {
        if !self.lease.pick_up() {
            return Err(unclaimed());
        }
        if self.is_held() { Ok(self) } else { Err(self.end_error()) }
    }

    /// Why the lease is over. The watchdog has usually said so; after a suspend of the machine or on a
    /// blocked thread the clock may be the first to know.
    #[cold]
    pub(crate) fn end_error(&self) -> LockError {
        if self.engine.is_inherited() {
            return self.locate(LockError::inherited());
        }
        if let Some(loss) = self.lease.lapse(self.engine.clock.now()) {
            events::lost(&self.lease, loss);
        }
        self.loss_error(self.lease.loss().unwrap_or(Loss::Expired))
    }

    /// Whether the lease is ended by another guard.
    pub(crate) fn is_view(&self) -> bool {
        self.role == Role::View
    }

    /// Starts the release; `None` if this guard is a view or the lock is let go already.
    pub(crate) fn let_go(&self) -> Option<Releasing> {
        match self.role {
            // The lock is the parent's.
            _ if self.engine.is_inherited() => None,
            Role::Owner => release(&self.engine, &self.lease),
            Role::View => None,
        }
    }

    pub(crate) fn loss_error(&self, loss: Loss) -> LockError {
        let error = lost_error(loss);
        self.locate(match self.lease.unconfirmed() {
            Some(why) if loss == Loss::Expired => error.because(why),
            _ => error,
        })
    }

    pub(crate) fn locate(&self, error: LockError) -> LockError {
        error.at(self.lease.ask.subject.template()).in_pool(self.engine.name())
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        drop(self.let_go());
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("keys", &self.keys())
            .field("fence", &self.fence())
            .field("pool", self.engine.name())
            .field("valid_for", &self.valid_for())
            .finish_non_exhaustive()
    }
}

/// The future of [`LockGuard::lost`]. It keeps nothing held.
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct Lost {
    guard: LockGuard,
    listener: Listener,
}

impl Future for Lost {
    type Output = LockError;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LockError> {
        let this = &mut *self;
        if this.guard.engine.is_inherited() || this.guard.lease.is_overdue() {
            return Poll::Ready(this.guard.end_error().after(Progress::Unfinished));
        }
        this.listener.poll(cx).map(|ending| match ending {
            Ending::Lost(loss) => this.guard.loss_error(loss).after(Progress::Unfinished),
            Ending::Released => this.guard.locate(released()).after(Progress::Finished),
        })
    }
}

#[cold]
fn released() -> LockError {
    LockError::new(
        ErrorKind::Released,
        "the lock was released by its holder before anything was lost",
    )
    .remedy("end what waits for a loss; `is_lost()` is true of a loss alone")
}

#[cold]
fn unclaimed() -> LockError {
    let cause = "the lock was granted and given back: the acquire was not polled until `wait` and one ttl were over";
    LockError::new(ErrorKind::Conflict, cause)
        .remedy("poll the future of an acquire until it is ready: `tokio::spawn` it, or `await` it before other work")
}

#[cold]
fn lost_error(loss: Loss) -> LockError {
    let (cause, remedy) = match loss {
        Loss::Expired => (
            "the lock was lost: the store did not confirm a renewal before the lease ran out",
            "check the store and the network to it; a longer ttl rides out longer outages",
        ),
        Loss::Taken => (
            "the lock was lost: the store says that it is not ours any more",
            "somebody deleted or overwrote the key, or the store lost its data; check the fence where you write",
        ),
        Loss::TtlOver => (
            "the lock was given up: its ttl is over and it is not renewed",
            "raise the ttl, or let the watchdog renew it with `renew = true`",
        ),
        Loss::MaxHold => {
            ("the lock was given up: its max_hold is over", "raise `max_hold`, or split the work")
        }
        Loss::Shutdown => return LockError::shutdown(),
    };
    LockError::new(ErrorKind::Lost, cause).remedy(remedy)
}
