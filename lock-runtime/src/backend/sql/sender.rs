//! The sending side of a connection.

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::backend::BackendError;
use crate::backend::sql::job::{Reply, StoreJob, closed, no_answer};

/// The most acquires or releases of one statement. Over a slow link, a connection serves as many in each round trip.
pub(crate) const CLAIMS: usize = 1_024;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Acquires and releases.
    Claims,
    /// Renewals, which must not wait behind acquires; notifications, reads and sweeps.
    Upkeep,
}

/// Sends jobs to the task of a connection. Dropping it ends the task immediately, and a statement that was sent may still run.
/// [`close`](Self::close) ends the task after pending releases.
pub(crate) struct JobSender {
    jobs: UnboundedSender<StoreJob>,
    task: AbortHandle,
}

impl Drop for JobSender {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl JobSender {
    pub(crate) fn new(jobs: UnboundedSender<StoreJob>, task: AbortHandle) -> Self {
        Self { jobs, task }
    }

    /// Sends `request` as a job, and returns where its answer arrives.
    pub(crate) fn send<T>(&self, job: impl FnOnce(Reply<T>) -> StoreJob) -> AwaitedAnswer<T> {
        let (reply, answer) = oneshot::channel();
        if let Err(unsent) = self.jobs.send(job(reply)) {
            unsent.0.fail(&closed());
        }
        AwaitedAnswer(answer)
    }

    /// Closes the connection after all releases that were requested before. Acquires that were not sent fail.
    pub(crate) async fn close(&self) {
        let _ = self.jobs.send(StoreJob::Close);
        self.jobs.closed().await;
    }
}

/// The answer to a request. Dropping it gives up the request.
pub(crate) struct AwaitedAnswer<T>(oneshot::Receiver<Result<T, BackendError>>);

impl<T> AwaitedAnswer<T> {
    pub(crate) async fn get(self) -> Result<T, BackendError> {
        self.0.await.unwrap_or_else(|_| Err(no_answer()))
    }
}
