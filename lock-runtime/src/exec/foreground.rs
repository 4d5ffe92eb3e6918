//! Requests in flight on the connection of a caller's runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The requests in flight on one such connection.
#[derive(Debug, Default)]
pub(crate) struct Foreground(Arc<AtomicUsize>);

/// A place for one request, until it is dropped.
#[derive(Debug)]
pub struct ForegroundRequest(Arc<AtomicUsize>);

impl Foreground {
    /// More requests at once are cheaper in the batches of the driver.
    const MOST: usize = 4;

    /// `None` if there are enough.
    pub(crate) fn begin(&self) -> Option<ForegroundRequest> {
        let more = |count: usize| (count < Self::MOST).then_some(count + 1);
        let begun = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        begun.is_ok().then(|| ForegroundRequest(self.0.clone()))
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
        let mut requests: Vec<_> = std::iter::from_fn(|| foreground.begin()).collect();
        assert_eq!(requests.len(), Foreground::MOST);
        drop(requests.pop());
        assert!(foreground.begin().is_some(), "dropped at once");
        requests.extend(foreground.begin());
        assert!(foreground.begin().is_none());
    }
}
