//! Requests in flight on the connection of a caller's runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How a request is sent over such a connection.
#[derive(Debug)]
pub enum ForegroundPlace {
    /// Immediately.
    Alone(ForegroundRequest),
    /// In the next batch of the runtime.
    InBatch,
}

/// The requests in flight on one such connection.
#[derive(Debug, Default)]
pub(crate) struct Foreground(Arc<AtomicUsize>);

/// A place for one request, until it is dropped.
#[derive(Debug)]
pub struct ForegroundRequest(Arc<AtomicUsize>);

impl Foreground {
    /// More requests at the same time are cheaper in a batch.
    const MOST: usize = 2;

    /// The place of the next request.
    pub(crate) fn begin(&self) -> ForegroundPlace {
        let more = |count: usize| (count < Self::MOST).then_some(count + 1);
        match self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => ForegroundPlace::Alone(ForegroundRequest(self.0.clone())),
            Err(_) => ForegroundPlace::InBatch,
        }
    }
}

impl Drop for ForegroundRequest {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_gives_its_place_back() {
        let foreground = Foreground::default();
        let begin = || match foreground.begin() {
            ForegroundPlace::Alone(request) => Some(request),
            ForegroundPlace::InBatch => None,
        };
        let mut requests: Vec<_> = std::iter::from_fn(begin).collect();
        assert_eq!(requests.len(), Foreground::MOST);
        drop(requests.pop());
        requests.extend(begin());
        assert_eq!(requests.len(), Foreground::MOST, "dropped at once");
        assert!(begin().is_none());
    }
}
