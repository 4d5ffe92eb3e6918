//! Requests on their way to a connection.

use tokio::sync::oneshot;

use crate::backend::{
    AcquireOutcome, AcquireRequest, BackendError, FailureKind, LeaseRef, LeaseStatus,
    ReleaseOutcome, ReleaseRequest, Warning,
};

/// Takes the answer to a request.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, BackendError>>;

/// A request, and where its answer goes.
pub(crate) type Pending<R, T> = (R, Reply<T>);

/// A request of any kind.
pub(crate) enum Job {
    Acquire(Pending<AcquireRequest, AcquireOutcome>),
    Release(Pending<ReleaseRequest, ReleaseOutcome>),
    Renew(Pending<LeaseRef, LeaseStatus>),
    IsHeld(Pending<LeaseRef, LeaseStatus>),
    Health(Reply<Vec<Warning>>),
    Probe(Reply<()>),
    /// Delete rows that are no longer needed.
    Sweep,
}

impl Job {
    /// Answers that the request was not sent, because of `error`.
    pub(crate) fn fail(self, error: &BackendError) {
        let error = error.clone().before_sending();
        match self {
            Self::Acquire((_, reply)) => answer(reply, Err(error)),
            Self::Release((_, reply)) => answer(reply, Err(error)),
            Self::Renew((_, reply)) | Self::IsHeld((_, reply)) => answer(reply, Err(error)),
            Self::Health(reply) => answer(reply, Err(error)),
            Self::Probe(reply) => answer(reply, Err(error)),
            Self::Sweep => {}
        }
    }
}

/// Jobs by kind.
#[derive(Default)]
pub(crate) struct Jobs {
    pub(crate) acquires: Vec<Pending<AcquireRequest, AcquireOutcome>>,
    pub(crate) releases: Vec<Pending<ReleaseRequest, ReleaseOutcome>>,
    pub(crate) renewals: Vec<Pending<LeaseRef, LeaseStatus>>,
    pub(crate) reads: Vec<Pending<LeaseRef, LeaseStatus>>,
    pub(crate) health: Vec<Reply<Vec<Warning>>>,
    pub(crate) probes: Vec<Reply<()>>,
    pub(crate) sweeps: bool,
}

impl Jobs {
    /// Leaves out acquires that nothing waits for any more, because their call was dropped. Releases are sent all the
    /// same.
    pub(crate) fn sorted(jobs: impl Iterator<Item = Job>) -> Self {
        let mut sorted = Self::default();
        for job in jobs {
            match job {
                Job::Acquire((_, reply)) if reply.is_closed() => {}
                Job::Acquire(pending) => sorted.acquires.push(pending),
                Job::Release(pending) => sorted.releases.push(pending),
                Job::Renew(pending) => sorted.renewals.push(pending),
                Job::IsHeld(pending) => sorted.reads.push(pending),
                Job::Health(reply) => sorted.health.push(reply),
                Job::Probe(reply) => sorted.probes.push(reply),
                Job::Sweep => sorted.sweeps = true,
            }
        }
        sorted
    }
}

/// Sends an answer. A caller that was dropped takes none.
pub(crate) fn answer<T>(reply: Reply<T>, outcome: Result<T, BackendError>) {
    let _ = reply.send(outcome);
}

/// Sends the same failure to all.
pub(crate) fn fail_all<R, T>(
    pending: impl IntoIterator<Item = Pending<R, T>>,
    error: &BackendError,
) {
    for (_, reply) in pending {
        answer(reply, Err(error.clone()));
    }
}

/// The failure of a request whose connection took no answer to it.
#[cold]
pub(crate) fn no_answer() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "PostgreSQL did not answer in time")
}
