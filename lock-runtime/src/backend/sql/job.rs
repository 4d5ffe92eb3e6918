//! Requests on their way to a connection.

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;

use crate::backend::sql::listed_keys::ListedRow;
use crate::backend::{
    AcquireOutcome, AcquireRequest, BackendError, FailureKind, Inspection, LeaseRef, LeaseStatus,
    ReleaseOutcome, ReleaseRequest, Warning,
};
use crate::base::key::Key;

/// Takes the answer to a request.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, BackendError>>;

/// A request, and where its answer goes.
pub(crate) type PendingRequest<R, T> = (R, Reply<T>);

/// Requests of one kind.
pub(crate) type JobRequests<R, T> = Vec<PendingRequest<R, T>>;

pub(crate) type Acquires = JobRequests<AcquireRequest, AcquireOutcome>;
pub(crate) type Releases = JobRequests<ReleaseRequest, ReleaseOutcome>;
pub(crate) type Renewals = JobRequests<LeaseRef, LeaseStatus>;
pub(crate) type Reads = JobRequests<LeaseRef, LeaseStatus>;

/// An acquire or a release.
pub(crate) enum Claim {
    Acquire(PendingRequest<AcquireRequest, AcquireOutcome>),
    Release(PendingRequest<ReleaseRequest, ReleaseOutcome>),
}

/// A request of any kind.
pub(crate) enum StoreJob {
    Acquire(PendingRequest<AcquireRequest, AcquireOutcome>),
    Release(PendingRequest<ReleaseRequest, ReleaseOutcome>),
    Renew(PendingRequest<LeaseRef, LeaseStatus>),
    IsHeld(PendingRequest<LeaseRef, LeaseStatus>),
    Inspect(PendingRequest<Key, Inspection>),
    /// A page of keys, starting at this one. Other jobs are done between two pages.
    List(PendingRequest<Vec<u8>, Vec<ListedRow>>),
    Health(Reply<Vec<Warning>>),
    Probe(Reply<()>),
    /// Close the connection.
    Close,
}

impl StoreJob {
    /// Answers that the request was not sent, because of `error`.
    pub(crate) fn fail(self, error: &BackendError) {
        let error = error.clone().before_sending();
        match self {
            Self::Acquire((_, reply)) => answer(reply, Err(error)),
            Self::Release((_, reply)) => answer(reply, Err(error)),
            Self::Renew((_, reply)) | Self::IsHeld((_, reply)) => answer(reply, Err(error)),
            Self::Inspect((_, reply)) => answer(reply, Err(error)),
            Self::List((_, reply)) => answer(reply, Err(error)),
            Self::Health(reply) => answer(reply, Err(error)),
            Self::Probe(reply) => answer(reply, Err(error)),
            Self::Close => {}
        }
    }
}

/// Jobs by kind.
#[derive(Default)]
pub(crate) struct Jobs {
    /// In the order in which they were requested.
    pub(crate) claims: Vec<Claim>,
    pub(crate) renewals: Renewals,
    pub(crate) reads: Reads,
    pub(crate) inspections: Vec<PendingRequest<Key, Inspection>>,
    pub(crate) lists: Vec<PendingRequest<Vec<u8>, Vec<ListedRow>>>,
    pub(crate) health: Vec<Reply<Vec<Warning>>>,
    pub(crate) probes: Vec<Reply<()>>,
    pub(crate) closes: bool,
}

impl Jobs {
    /// Sorts `jobs` by their kinds.
    pub(crate) fn of(jobs: impl Iterator<Item = StoreJob>) -> Self {
        let mut sorted = Self::default();
        jobs.for_each(|job| sorted.add(job));
        sorted
    }

    /// Leaves out renewals, reads, inspections and pages that nothing waits for any more, because their call was
    /// dropped. Releases are sent anyway.
    fn add(&mut self, job: StoreJob) {
        match job {
            StoreJob::Renew((_, reply)) | StoreJob::IsHeld((_, reply)) if reply.is_closed() => {}
            StoreJob::Inspect((_, reply)) if reply.is_closed() => {}
            StoreJob::List((_, reply)) if reply.is_closed() => {}
            StoreJob::Acquire(pending) => self.claims.push(Claim::Acquire(pending)),
            StoreJob::Release(pending) => self.claims.push(Claim::Release(pending)),
            StoreJob::Renew(pending) => self.renewals.push(pending),
            StoreJob::IsHeld(pending) => self.reads.push(pending),
            StoreJob::Inspect(pending) => self.inspections.push(pending),
            StoreJob::List(pending) => self.lists.push(pending),
            StoreJob::Health(reply) => self.health.push(reply),
            StoreJob::Probe(reply) => self.probes.push(reply),
            StoreJob::Close => self.closes = true,
        }
    }
}

/// Sends an answer. A dropped caller receives none.
pub(crate) fn answer<T>(reply: Reply<T>, outcome: Result<T, BackendError>) {
    let _ = reply.send(outcome);
}

/// Sends the same failure to all.
pub(crate) fn fail_all<R, T>(
    pending: impl IntoIterator<Item = PendingRequest<R, T>>,
    error: &BackendError,
) {
    for (_, reply) in pending {
        answer(reply, Err(error.clone()));
    }
}

/// Fails the requests that have arrived after the one that closes the connection.
pub(crate) fn refuse_rest(inbox: &mut UnboundedReceiver<StoreJob>) {
    inbox.close();
    while let Ok(job) = inbox.try_recv() {
        job.fail(&closed());
    }
}

/// The failure of a request after the end of the pool.
#[cold]
pub(crate) fn closed() -> BackendError {
    BackendError::new(FailureKind::NotApplied, "the connections to the database are closed")
}

/// The failure of an acquire that a release undoes before it is sent.
#[cold]
pub(crate) fn undone_before_sending() -> BackendError {
    BackendError::new(FailureKind::NotApplied, "released before the request was sent")
}

/// The failure of a request to a server that the other connection of the pool has left.
#[cold]
pub(crate) fn moved() -> BackendError {
    let message = "the other connection of the pool has moved to another server";
    BackendError::new(FailureKind::NotApplied, message)
}

/// The failure of a request without the tables, where connections make them.
#[cold]
pub(crate) fn dropped_tables() -> BackendError {
    let message = "the tables of the locks were dropped";
    BackendError::new(FailureKind::NotApplied, message)
        .remedy("with `create=on` the next connection makes them again; other processes lose locks with them")
}

/// The failure of a request whose connection took no answer to it.
#[cold]
pub(crate) fn no_answer() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "the database did not answer in time")
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    #[test]
    fn a_request_behind_the_end_of_the_pool_was_not_sent() {
        let (jobs, mut inbox) = mpsc::unbounded_channel();
        let (reply, mut answer) = oneshot::channel();
        assert!(jobs.send(StoreJob::Probe(reply)).is_ok());
        refuse_rest(&mut inbox);
        assert_eq!(answer.try_recv().unwrap().unwrap_err().kind(), FailureKind::NotApplied);
        assert!(jobs.is_closed());
    }
}
