//! Calls that run side by side.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::sleep;

pub(crate) type BoxedCall<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// How long calls may take while finished calls wait for them.
#[derive(Clone, Copy)]
pub(crate) struct StragglerLimit {
    pub(crate) limit: Duration,
    /// Whether the limit runs from the start, or from the end of the first call.
    pub(crate) from_start: bool,
}

/// Runs `calls` side by side. Drops calls that exceed the limit; their result is `None`.
pub(crate) async fn fan_out<T>(
    calls: Vec<BoxedCall<'_, T>>,
    stragglers: Option<StragglerLimit>,
) -> Vec<Option<T>> {
    let mut done: Vec<_> = calls.iter().map(|_| None).collect();
    let mut calls: Vec<_> = calls.into_iter().map(Some).collect();
    let mut timer: Option<Pin<Box<tokio::time::Sleep>>> = None;
    poll_fn(|cx| {
        let mut open = 0;
        for (place, done) in calls.iter_mut().zip(&mut done) {
            let Some(call) = place else { continue };
            match call.as_mut().poll(cx) {
                Poll::Ready(outcome) => {
                    *done = Some(outcome);
                    *place = None;
                }
                Poll::Pending => open += 1,
            }
        }
        if open == 0 {
            return Poll::Ready(());
        }
        match stragglers {
            Some(StragglerLimit { limit, from_start }) if from_start || open < calls.len() => {
                timer.get_or_insert_with(|| Box::pin(sleep(limit))).as_mut().poll(cx)
            }
            _ => Poll::Pending,
        }
    })
    .await;
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_call_over_the_limit_is_dropped() {
        let quick: BoxedCall<'_, _> = Box::pin(async { 1 });
        let slow: BoxedCall<'_, _> = Box::pin(async {
            sleep(Duration::from_secs(1)).await;
            2
        });
        let never: BoxedCall<'_, _> = Box::pin(std::future::pending());
        let limit = Duration::from_secs(3);
        let stragglers = Some(StragglerLimit { limit, from_start: false });
        assert_eq!(fan_out(vec![never, quick, slow], stragglers).await, [None, Some(1), Some(2)]);
        let never: BoxedCall<'_, _> = Box::pin(std::future::pending::<()>());
        let stragglers = Some(StragglerLimit { limit, from_start: true });
        assert_eq!(fan_out(vec![never], stragglers).await, [None]);
        assert_eq!(fan_out(Vec::<BoxedCall<'_, ()>>::new(), stragglers).await, []);
    }
}
