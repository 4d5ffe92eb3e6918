//! A connection that is opened again after its end.

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::sleep;

use crate::backend::BackendError;
use crate::backend::backoff::Backoff;
use crate::backend::queue_events::QueueEvents;
use crate::backend::sql::job::StoreJob;

/// Repeats `open` until it succeeds, with a pause before each try. Meanwhile requests fail immediately by `error`, why the last
/// connection has ended, or by the failure of the last try. `None` if the pool is closed.
pub(crate) async fn reopened<S, F>(
    inbox: &mut UnboundedReceiver<StoreJob>,
    events: &QueueEvents,
    backoff: &mut Backoff,
    mut error: BackendError,
    open: impl Fn() -> F,
) -> Option<S>
where
    F: Future<Output = Result<S, BackendError>>,
{
    let open = &open;
    let opened_after = |pause| async move {
        sleep(pause).await;
        open().await
    };
    let mut attempt = Box::pin(opened_after(backoff.next()));
    loop {
        tokio::select! {
            opened = &mut attempt => match opened {
                Ok(session) => return Some(session),
                Err(failed) => {
                    events.disconnected(&failed);
                    error = failed;
                    attempt.set(opened_after(backoff.next()));
                }
            },
            job = inbox.recv() => match job? {
                StoreJob::Close => return None,
                job => job.fail(&error),
            },
        }
    }
}
