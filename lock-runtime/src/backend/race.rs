//! Attempts with several servers, of which the first success counts.

use std::time::Duration;

use tokio::time::sleep;

use crate::backend::first_ended::first_ended;

/// When the next attempt begins, alongside the unanswered ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// The wait for one candidate before the next one is tried.
    pub(crate) next: Duration,
    /// The wait after the last candidate before all are tried again. That is repeated until the timeout of the caller.
    pub(crate) again: Option<Duration>,
}

/// Returns the first success. The next candidate is tried after [`Pace::next`], or immediately if an attempt fails. If all
/// fail, the result has all errors in the order of their arrival. Dropping the future ends all attempts.
pub(crate) async fn race<C: Copy, T, E, F>(
    candidates: &[C],
    pace: Pace,
    attempt: impl Fn(C) -> F,
) -> Result<T, Vec<E>>
where
    F: Future<Output = Result<T, E>>,
{
    let mut waiting = candidates.iter();
    let (mut attempts, mut failures) = (Vec::new(), Vec::new());
    loop {
        if let Some(candidate) = waiting.next() {
            attempts.push(Box::pin(attempt(*candidate)));
        }
        if attempts.is_empty() {
            return Err(failures);
        }
        let is_last = waiting.len() == 0;
        let pause = if is_last { pace.again } else { Some(pace.next) };
        tokio::select! {
            ended = first_ended(&mut attempts) => match ended {
                Ok(success) => return Ok(success),
                Err(error) => failures.push(error),
            },
            () = sleep(pause.unwrap_or_default()), if pause.is_some() => {
                if is_last {
                    waiting = candidates.iter();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::Mutex;

    use tokio::time::Instant;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// The result of a race, and when each candidate was tried. 1 never answers, 2 refuses immediately, others are reached
    /// after four seconds.
    async fn raced(
        candidates: &[u16],
        pace: Pace,
    ) -> (Result<u16, Vec<u16>>, Vec<(u16, Duration)>) {
        #[allow(clippy::disallowed_methods)]
        let (began, tried) = (Instant::now(), Mutex::new(Vec::new()));
        let attempt = |candidate| {
            tried.lock().unwrap().push((candidate, began.elapsed()));
            async move {
                match candidate {
                    1 => pending().await,
                    2 => Err(2),
                    other => {
                        sleep(4 * SECOND).await;
                        Ok(other)
                    }
                }
            }
        };
        let limit = 60 * SECOND;
        let result = tokio::time::timeout(limit, race(candidates, pace, attempt)).await;
        (result.unwrap_or(Err(vec![1])), tried.into_inner().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_one_is_tried_beside_one_without_an_answer() {
        let pace = Pace { next: SECOND, again: None };
        let (result, tried) = raced(&[1, 1, 3], pace).await;
        assert_eq!(result, Ok(3));
        assert_eq!(tried, [(1, Duration::ZERO), (1, SECOND), (3, 2 * SECOND)]);
        // The first attempt is still awaited, although the next one is tried as well.
        let (result, tried) = raced(&[3, 4], pace).await;
        assert_eq!((result, tried), (Ok(3), vec![(3, Duration::ZERO), (4, SECOND)]));
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_one_is_tried_at_once_behind_a_refusal() {
        let pace = Pace { next: SECOND, again: None };
        let (result, tried) = raced(&[2, 3], pace).await;
        assert_eq!((result, tried), (Ok(3), vec![(2, Duration::ZERO), (3, Duration::ZERO)]));
        assert_eq!(raced(&[2, 2], pace).await.0, Err(vec![2, 2]));
        assert_eq!(raced(&[], pace).await.0, Err(Vec::new()));
    }

    #[tokio::test(start_paused = true)]
    async fn candidates_without_an_answer_are_tried_again_if_the_pace_says_so() {
        let (_, tried) = raced(&[1], Pace { next: SECOND, again: None }).await;
        assert_eq!(tried.len(), 1);
        let (_, tried) = raced(&[1, 1], Pace { next: SECOND, again: Some(20 * SECOND) }).await;
        let times: Vec<_> = tried.iter().map(|(_, at)| at.as_secs()).collect();
        assert_eq!(times, [0, 1, 21, 22, 42, 43]);
    }
}
