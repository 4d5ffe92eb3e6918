//! The first of several futures to end.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

/// Waits for one of `futures`, and removes it. Dropping the returned future leaves all of them as they are.
pub(crate) async fn first_ended<F: Future + ?Sized>(futures: &mut Vec<Pin<Box<F>>>) -> F::Output
where
    F::Output: Sized,
{
    poll_fn(|cx| {
        for at in 0..futures.len() {
            if let Poll::Ready(output) = futures[at].as_mut().poll(cx) {
                drop(futures.swap_remove(at));
                return Poll::Ready(output);
            }
        }
        Poll::Pending
    })
    .await
}
