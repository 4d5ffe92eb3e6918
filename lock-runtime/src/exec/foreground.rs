//! The runtime of a caller that has a connection of its own to the store.

use std::any::Any;
use std::sync::Arc;

use once_cell::sync::OnceCell;
use tokio::runtime::Handle;

/// A runtime with a connection of its own, while that is open.
#[derive(Debug)]
pub struct Foreground {
    runtime: Handle,
    /// What the pool keeps for this runtime.
    attachment: OnceCell<Arc<dyn Any + Send + Sync>>,
}

impl Foreground {
    pub(crate) fn new(runtime: Handle) -> Arc<Self> {
        Arc::new(Self { runtime, attachment: OnceCell::new() })
    }

    /// What the pool keeps for this runtime, made by `make` at the first call. `None` if it has another type.
    pub(crate) fn attached<T: Send + Sync + 'static>(
        &self,
        make: impl FnOnce(&Handle) -> T,
    ) -> Option<Arc<T>> {
        let attached = self.attachment.get_or_init(|| Arc::new(make(&self.runtime)));
        attached.clone().downcast().ok()
    }
}
