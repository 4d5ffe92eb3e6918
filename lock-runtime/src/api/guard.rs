//! A held lock, as programs see it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::api::call_record::CallSpan;
use crate::base::error::{ErrorKind, LockError, Progress};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::loss::Loss;
use crate::base::options::ReleaseMode;
use crate::base::sequencer::Sequencer;
use crate::lease::held_lease::{HeldLease, Releasing};
use crate::lease::lease::{Lease, RunningBody};
use crate::lease::lease_state::Ending;
use crate::lease::listener::Listener;
use crate::lock::core::PoolCore;
use crate::lock::hold;

/// A held lock. Dropping it releases the lock in the background, even after the caller's runtime has ended.
/// [`release`](Self::release) waits until other owners can acquire the lock, or until it lingers.
///
/// The lease is renewed as long as the guard lives. When it cannot be renewed, its validity ends in time:
/// [`is_held`](Self::is_held) becomes `false` by the local clock, without any answer.
#[must_use = "the lock is released as soon as the guard is dropped, also by `let _ = ..`: bind it, as in `let _guard = ..`"]
pub struct LockGuard {
    core: Arc<PoolCore>,
    hold: Hold,
    /// Of the call that acquired the lock, without a body. Dropped after the hold.
    span: CallSpan,
}

#[derive(Debug)]
enum Hold {
    /// Ends the lease when it is dropped.
    Owned(HeldLease),
    /// Reads a lease that another guard ends.
    Borrowed(Arc<Lease>),
}

impl LockGuard {
    /// The guard of the caller that `lease` was granted to.
    ///
    /// # Errors
    /// Why the lease is over already, if it is.
    pub(crate) fn pick_up(core: Arc<PoolCore>, lease: HeldLease) -> Result<Self, LockError> {
        // Validity may have ended while this thread was blocked or the machine suspended. No body begins then, so no
        // `min_hold` does either.
        let (offered, now) = (lease.lease(), core.clock().now());
        let is_lost = !offered.is_held_at(now) && (offered.withdraw() || offered.loss().is_some());
        if !is_lost && !offered.pick_up() {
            return Err(unclaimed());
        }
        let is_held = !core.is_inherited() && offered.is_held_at(now);
        let guard = Self { core, hold: Hold::Owned(lease), span: CallSpan::default() };
        if is_held { Ok(guard) } else { Err(guard.end_error()) }
    }

    /// Another guard of the same lease, which does not end it.
    pub(crate) fn borrowed(&self) -> Self {
        let (hold, span) = (Hold::Borrowed(self.lease().clone()), CallSpan::default());
        Self { core: self.core.clone(), hold, span }
    }

    /// The span closes with this guard.
    pub(crate) fn set_span(&mut self, span: CallSpan) {
        self.span = span;
    }

    pub(crate) fn take_span(&mut self) -> CallSpan {
        std::mem::take(&mut self.span)
    }

    /// A poll of the body begins, or its drop: see [`Lease::enter_body`].
    pub(crate) fn enter_body(&self) -> RunningBody<'_> {
        match &self.hold {
            Hold::Owned(held) => held.lease().enter_body(),
            Hold::Borrowed(_) => RunningBody::nested(),
        }
    }

    pub(crate) fn is_borrowed(&self) -> bool {
        matches!(self.hold, Hold::Borrowed(_))
    }

    pub(crate) fn lease(&self) -> &Arc<Lease> {
        match &self.hold {
            Hold::Owned(held) => held.lease(),
            Hold::Borrowed(lease) => lease,
        }
    }

    pub(crate) fn core(&self) -> &Arc<PoolCore> {
        &self.core
    }

    /// The key, without the pool's prefix; the first one if several are held.
    #[must_use]
    pub fn key(&self) -> &Key {
        // A lease has at least one key: an acquire without keys is refused.
        &self.lease().spec.keys[0]
    }

    /// All keys, sorted.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.lease().spec.keys
    }

    /// The fencing token of this grant. `None` if none was requested (`fencing(false)`), or the store has none.
    #[must_use]
    pub fn fence(&self) -> Option<Fence> {
        self.lease().fence
    }

    /// Whether the lease is valid. Reads only the local clock.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !self.core.is_inherited() && self.lease().is_held()
    }

    /// How long the lease remains valid if no further renewal succeeds.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        if self.is_held() { self.lease().valid_for() } else { Duration::ZERO }
    }

    /// Resolves when the hold ends, with the reason.
    ///
    /// | how the hold ends | kind of the error |
    /// |---|---|
    /// | the lock is lost, or its `max_hold` is over; resolves a little before validity ends, so that there is time to stop | [`ErrorKind::Lost`] |
    /// | the pool shuts down, and its grace is over | [`ErrorKind::PoolClosed`] |
    /// | the lock is released: by `release`, by a drop of the guard, or at the end of the body | [`ErrorKind::Released`] |
    ///
    /// The future borrows nothing and may outlive the guard. A task that waits for it ends no later than the hold.
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
    /// Cancel safe. A dropped future leaves nothing behind.
    pub fn lost(&self) -> Lost {
        Lost { guard: self.borrowed(), listener: Listener::new(self.lease()) }
    }

    /// Reads from the store whether the lock is still held by this guard (Chubby's CheckSequencer). If it is not, the hold is lost
    /// from then on, as after a renewal that finds it: [`lost`](Self::lost) resolves, and a body is cancelled.
    ///
    /// Cancel safe. A request that has been sent is not recalled.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if it is not, [`ErrorKind::Backend`] if the store does not answer.
    pub async fn verify(&self) -> Result<(), LockError> {
        self.check_status().await.map_err(|error| error.after(Progress::Unfinished))
    }

    async fn check_status(&self) -> Result<(), LockError> {
        if self.core.is_inherited() {
            return Err(self.locate(LockError::inherited()));
        }
        let lease = self.lease();
        // A hold that is over needs no request.
        if let Some(loss) = self.loss() {
            return Err(self.loss_error(loss));
        }
        // The store knows one owner for the process. The lock belongs to another task by now.
        if lease.is_transferred() {
            return Err(self.loss_error(Loss::Taken));
        }
        let is_held = self.core.is_held(lease.to_store()).await;
        let is_held = is_held.map_err(|error| self.locate(error))?;
        // Its time may have ended before the answer, or it was handed off.
        if let Some(loss) = self.loss() {
            return Err(self.loss_error(loss));
        }
        if is_held && !lease.is_transferred() {
            return Ok(());
        }
        lease.lose(Loss::Taken);
        Err(self.loss_error(Loss::Taken))
    }

    /// The grant as a value that travels with a request: its receiver asks the store with
    /// [`LockPool::check`](crate::LockPool::check) whether the grant still stands. See [`Sequencer`].
    ///
    /// The hold then ends with a release at the store, and is not handed off within the process: the sequencer names only
    /// this hold.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the grant has no fence, [`ErrorKind::Lost`] or [`ErrorKind::Released`] if the hold has
    /// ended.
    pub fn sequencer(&self) -> Result<Sequencer, LockError> {
        let lease = self.lease();
        let Some(fence) = lease.fence else { return Err(self.locate(no_fence("a sequencer"))) };
        if self.is_held() && lease.name_owner() {
            return Ok(Sequencer::new(lease.spec.keys.clone(), fence, lease.owner));
        }
        Err(self.ended())
    }

    /// A statement for a transaction in the database that stores the locks, `postgres://` or `mysql://` with `?pin=on`. It
    /// makes the commit depend on the grant: a holder that was stopped, and has lost its lock meanwhile, cannot commit.
    ///
    /// Run it first in the transaction. It has no parameters and no result. It fails if the lock has been granted again: in
    /// PostgreSQL with SQLSTATE `LK001`, in MySQL and MariaDB with error 1690. Roll the transaction back in that case, and
    /// after any other error of the pin. If it succeeds, the lock is not granted again before the end of the transaction,
    /// even if the lease expires meanwhile.
    ///
    /// The pin belongs outside of savepoints. The transaction begins after the grant, at any isolation level. Its user
    /// needs the rights `SELECT` and `UPDATE` on the table `lock_fence`. See the chapters on PostgreSQL and MySQL in the
    /// guide.
    ///
    /// ```no_run
    /// # async fn example(pool: lock_runtime::LockPool) -> Result<(), Box<dyn std::error::Error>> {
    /// # trait Client { async fn batch_execute(&self, sql: &str) -> Result<(), std::io::Error>; }
    /// # async fn begin() -> impl Client { struct C; impl Client for C { async fn batch_execute(&self, _: &str) -> Result<(), std::io::Error> { Ok(()) } } C }
    /// let guard = pool.lock("order:42").acquire().await?;
    /// let transaction = begin().await;
    /// transaction.batch_execute(&guard.pin_sql()?).await?;
    /// transaction.batch_execute("UPDATE orders SET state = 'paid' WHERE id = 42").await?;
    /// transaction.batch_execute("COMMIT").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the store has no pins or the grant has no fence, [`ErrorKind::Lost`] or
    /// [`ErrorKind::Released`] if the hold has ended.
    pub fn pin_sql(&self) -> Result<String, LockError> {
        let lease = self.lease();
        let Some(fence) = lease.fence else { return Err(self.locate(no_fence("a pin"))) };
        if !self.is_held() {
            return Err(self.ended());
        }
        let pin = self.core.backend().pin_sql(&lease.spec.store_keys, fence);
        pin.ok_or_else(|| self.locate(no_pins()))
    }

    /// Why no more work may run under the lock.
    #[cold]
    fn ended(&self) -> LockError {
        let is_released = self.lease().is_released();
        let error = if is_released { self.locate(released()) } else { self.end_error() };
        error.after(Progress::Unfinished)
    }

    /// Releases the lock and waits until the store has confirmed it. With a `linger` the lock may stay in this process instead,
    /// which takes no request.
    ///
    /// Dropping the future does not keep the lock: the release goes on in the background.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if the lock was no longer held, [`ErrorKind::Backend`] if the store did not confirm within
    /// twice the pool's `request_timeout`. The release is then retried in the background until the ttl is over.
    pub async fn release(mut self) -> Result<(), LockError> {
        if self.core.is_inherited() {
            return Err(self.locate(LockError::inherited()));
        }
        let loss = self.loss();
        self.span.on_hold_ended();
        let released = match self.begin_release(ReleaseMode::Awaited) {
            Some(releasing) => {
                self.span.awaits_release();
                let released = releasing.await;
                self.span.on_released(&released);
                released.map_err(|error| self.locate(error))
            }
            None => Ok(()),
        };
        let outcome = match (released, loss) {
            (Ok(()), Some(loss)) => Err(self.loss_error(loss)),
            (outcome, _) => outcome,
        };
        outcome.map_err(|error| error.after(Progress::Finished))
    }

    /// Why the lease is over.
    #[cold]
    pub(crate) fn end_error(&self) -> LockError {
        if self.core.is_inherited() {
            return self.locate(LockError::inherited());
        }
        self.loss_error(self.loss().unwrap_or(Loss::Expired))
    }

    /// Why the hold was lost, if it was.
    fn loss(&self) -> Option<Loss> {
        hold::note_end(&self.core, self.lease());
        self.lease().loss()
    }

    /// Starts the release; `None` if this guard is borrowed, or the lock is released already.
    pub(crate) fn begin_release(&self, mode: ReleaseMode) -> Option<Releasing> {
        match &self.hold {
            Hold::Owned(held) => held.release(mode),
            Hold::Borrowed(_) => None,
        }
    }

    /// Starts the release after a body. `None` if there is nothing to wait for.
    #[cfg(any(feature = "actix", feature = "tower"))]
    pub(crate) fn end_body(&mut self) -> Option<Releasing> {
        self.span.on_hold_ended();
        let mode = self.lease().spec.policy.release;
        let releasing = self.begin_release(mode)?;
        if mode == ReleaseMode::Background {
            return None;
        }
        self.span.awaits_release();
        Some(releasing)
    }

    /// The release that [`end_body`](Self::end_body) started has ended.
    #[cfg(any(feature = "actix", feature = "tower"))]
    pub(crate) fn on_body_released(&mut self, released: &Result<(), LockError>) {
        self.span.on_released(released);
    }

    pub(crate) fn loss_error(&self, loss: Loss) -> LockError {
        let error = lost_error(loss);
        self.locate(match self.lease().unconfirmed() {
            Some(cause) if loss == Loss::Expired => error.because(cause),
            _ => error,
        })
    }

    pub(crate) fn locate(&self, error: LockError) -> LockError {
        let spec = &self.lease().spec;
        error.at(spec.label.lock_name()).of_keys(&spec.keys).in_pool(self.core.name())
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("keys", &self.keys())
            .field("fence", &self.fence())
            .field("pool", self.core.name())
            .field("valid_for", &self.valid_for())
            .finish_non_exhaustive()
    }
}

/// The future of [`LockGuard::lost`]. It does not keep the lock held.
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
        if this.guard.core.is_inherited() || this.guard.lease().is_overdue() {
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
    LockError::new(ErrorKind::Released, "the lock was released by its holder, and not lost before")
        .remedy("end the task that waits for a loss; `is_lost()` is true only for a loss")
}

#[cold]
fn no_fence(what: &str) -> LockError {
    LockError::new(ErrorKind::Config, format!("the grant has no fence, which {what} needs"))
        .remedy("leave `.fencing(false)` out of the request; a function with the attribute gets a fence with `guard = lock`")
}

#[cold]
fn no_pins() -> LockError {
    LockError::new(ErrorKind::Config, "the store of the pool keeps no fences for pins")
        .remedy("add `?pin=on` to the `postgres://` or `mysql://` URL of every process; other stores have fences and sequencers")
}

#[cold]
fn unclaimed() -> LockError {
    let cause = "the lock was granted and released again: the acquire was not polled until `wait` and one ttl were over";
    LockError::new(ErrorKind::Conflict, cause)
        .remedy("poll the future of an acquire until it is ready: `tokio::spawn` it, or `await` it before other work")
}

#[cold]
fn lost_error(loss: Loss) -> LockError {
    let (cause, remedy) = match loss {
        Loss::Expired => (
            "the lock was lost: the store did not confirm a renewal before the lease ran out",
            "check the store, the network to it, and whether the process stood still (stopped, suspended or without processor time); a longer ttl rides out longer pauses",
        ),
        Loss::Taken => (
            "the lock was lost: the store reports that this owner does not hold it",
            "the key was deleted or overwritten, or the store lost its data; check the fence where you write",
        ),
        Loss::TtlOver => (
            "the lock was released: its ttl is over and it is not renewed",
            "raise the ttl, or have the lease renewed with `renew = true`",
        ),
        Loss::MaxHold => {
            ("the lock was released: its max_hold is over", "raise `max_hold`, or split the work")
        }
        Loss::PoolClosed => (
            "the lock was released: the pool shut down, and its grace was over",
            "allow a longer grace, or make the body shorter",
        ),
        Loss::FoundAtRelease => return LockError::lost_before_release(),
    };
    let is_closed = loss == Loss::PoolClosed;
    let kind = if is_closed { ErrorKind::PoolClosed } else { ErrorKind::Lost };
    LockError::new(kind, cause).remedy(remedy)
}
