//! Connects to one of several servers.

use std::time::Duration;

use tokio::time::timeout;

use crate::backend::sql::job::closed;
use crate::backend::{BackendError, FailureKind};

/// The first session that `open` returns for one of `servers`, and the position of its server. Begins at `last`; each server has
/// the whole time `limit`. The error is that of the last server.
pub(crate) async fn first_opened<S, F>(
    database: &str,
    servers: &[String],
    last: usize,
    limit: Duration,
    open: impl Fn(usize) -> F,
) -> Result<(usize, S), BackendError>
where
    F: Future<Output = Result<S, BackendError>>,
{
    let mut failed = closed();
    for at in (0..servers.len()).map(|step| (last + step) % servers.len()) {
        let opened = timeout(limit, open(at)).await.unwrap_or_else(|_| {
            let server = &servers[at];
            let message =
                format!("{database} at {server} has not accepted a connection within {limit:?}");
            Err(BackendError::new(FailureKind::NotApplied, message)
                .remedy("check host, port and network, or raise `connect_timeout` of the pool"))
        });
        match opened {
            Ok(session) => return Ok((at, session)),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}
