//! The jobs that the batches of a connection leave for later ones.

use std::time::Duration;

use crate::backend::BackendError;
use crate::backend::sql::claim_queue::ClaimQueue;
use crate::backend::sql::renewal_queue::RenewalQueue;
use crate::base::clock::Clock;

pub(crate) struct PendingJobs {
    pub(crate) claims: ClaimQueue,
    pub(crate) renewals: RenewalQueue,
}

impl PendingJobs {
    pub(crate) fn new(clock: Clock, request_timeout: Duration) -> Self {
        let claims = ClaimQueue::new(clock, request_timeout);
        Self { claims, renewals: RenewalQueue::default() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.claims.is_empty() && self.renewals.is_empty()
    }

    /// Answers all with the error of the connection, which has not sent them.
    pub(crate) fn fail(&mut self, error: &BackendError) {
        self.claims.fail(error);
        self.renewals.fail(error);
    }
}
