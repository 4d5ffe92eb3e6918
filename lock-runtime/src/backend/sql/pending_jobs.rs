//! The jobs that the batches of a connection leave for later ones.

use std::mem::take;
use std::time::Duration;

use crate::backend::BackendError;
use crate::backend::sql::claim_queue::ClaimQueue;
use crate::backend::sql::job::Jobs;
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

    /// Takes the acquires, releases and renewals of `jobs`, and begins a turn.
    pub(crate) fn begin_turn(&mut self, jobs: &mut Jobs) {
        self.claims.add(take(&mut jobs.claims));
        self.renewals.add(take(&mut jobs.renewals));
        if jobs.closes {
            self.claims.close();
        }
        self.claims.begin();
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
