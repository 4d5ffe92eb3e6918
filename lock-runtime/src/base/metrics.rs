//! What a pool measures, through the facade crate `metrics`. Without the feature of that name everything here is empty.

use std::fmt;
use std::sync::Arc;
#[cfg(feature = "metrics")]
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(feature = "metrics")]
use std::time::Duration;

#[cfg(feature = "metrics")]
use once_cell::sync::OnceCell;

use crate::base::measurement::Measurement;
#[cfg(feature = "metrics")]
use crate::base::measurement::{StoreOperation, StoreResult};
#[cfg(feature = "metrics")]
use crate::base::metric_handles::{LockHandles, PoolHandles, StoreHandles, contained};
#[cfg(feature = "metrics")]
use crate::base::recorder::{Recorder, present};

/// The measurements of one template.
#[derive(Clone, Default)]
pub(crate) struct LockMetrics {
    /// `None` without a recorder.
    #[cfg(feature = "metrics")]
    handles: Option<Arc<LockHandles>>,
}

impl LockMetrics {
    /// Whether anything is recorded. Values that only a measurement needs are computed after it.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        #[cfg(feature = "metrics")]
        return self.handles.is_some();
        #[cfg(not(feature = "metrics"))]
        false
    }

    #[inline]
    pub(crate) fn record(&self, measurement: Measurement) {
        #[cfg(feature = "metrics")]
        if let Some(handles) = &self.handles {
            contained(|| handles.record(measurement));
        }
        let _ = measurement;
    }
}

impl fmt::Debug for LockMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockMetrics").finish_non_exhaustive()
    }
}

/// The measurements of a pool and its store.
///
/// Handles are made outside of all locks, because that runs code of the program's recorder. Made twice at the same time,
/// they lead to the same metrics.
#[derive(Default)]
pub(crate) struct PoolMetrics {
    /// Those of the program's recorder, before the pool has a name.
    #[cfg(feature = "metrics")]
    unnamed: PoolHandles,
    #[cfg(feature = "metrics")]
    named: OnceCell<(Arc<str>, PoolHandles)>,
    #[cfg(feature = "metrics")]
    is_down: AtomicBool,
}

impl PoolMetrics {
    /// The pool has this name from now on.
    pub(crate) fn set_pool(&self, name: &Arc<str>) {
        #[cfg(feature = "metrics")]
        let _ = self.named.set((name.clone(), PoolHandles::default()));
        let _ = name;
    }

    /// The measurements of the locks of `template`.
    #[inline]
    pub(crate) fn of(&self, template: &'static str) -> LockMetrics {
        #[cfg(feature = "metrics")]
        {
            let recorder = present();
            if recorder == Recorder::None {
                return LockMetrics::default();
            }
            LockMetrics { handles: contained(|| Some(self.handles_of(recorder, template))) }
        }
        #[cfg(not(feature = "metrics"))]
        {
            let _ = template;
            LockMetrics::default()
        }
    }

    /// The metrics of the store exist from now on.
    #[cfg(feature = "metrics")]
    pub(crate) fn announce_store(&self) {
        contained(|| self.with_store(|_| ()));
    }

    /// Whether calls to the store are recorded.
    #[cfg(feature = "metrics")]
    pub(crate) fn measures_store(&self) -> bool {
        present() != Recorder::None
    }

    /// A call to the store has ended after `taken`.
    #[cfg(feature = "metrics")]
    pub(crate) fn store_call(
        &self,
        operation: StoreOperation,
        result: StoreResult,
        taken: Duration,
    ) {
        contained(|| self.with_store(|store| store.call(operation, result, taken)));
    }

    /// Whether the store answers. [`publish_status`](Self::publish_status) tells the recorder.
    pub(crate) fn set_store_up(&self, is_up: bool) {
        #[cfg(feature = "metrics")]
        self.is_down.store(!is_up, Ordering::SeqCst);
        let _ = is_up;
    }

    /// Records whether the store answers. It runs code of the recorder, so no lock is held meanwhile.
    pub(crate) fn publish_status(&self) {
        #[cfg(feature = "metrics")]
        contained(|| self.with_store(|store| self.publish(store)));
    }
}

#[cfg(feature = "metrics")]
impl PoolMetrics {
    fn present_handles(&self) -> (Option<&Arc<str>>, &PoolHandles) {
        match self.named.get() {
            Some((name, handles)) => (Some(name), handles),
            None => (None, &self.unnamed),
        }
    }

    fn handles_of(&self, recorder: Recorder, template: &'static str) -> Arc<LockHandles> {
        let (pool, handles) = self.present_handles();
        let make = || Arc::new(LockHandles::new(pool, template));
        match recorder {
            Recorder::OfProgram => handles.of(template, make),
            Recorder::OfThread | Recorder::None => make(),
        }
    }

    fn with_store(&self, code: impl FnOnce(&StoreHandles)) {
        let (pool, handles) = self.present_handles();
        match present() {
            Recorder::None => {}
            Recorder::OfThread => code(&StoreHandles::new(pool)),
            Recorder::OfProgram => {
                let (store, is_new) = handles.store(|| StoreHandles::new(pool));
                if is_new {
                    self.publish(store);
                }
                code(store);
            }
        }
    }

    /// Repeated until nothing has changed meanwhile: the last value stays, whichever thread records it.
    fn publish(&self, store: &StoreHandles) {
        loop {
            let is_down = self.is_down.load(Ordering::SeqCst);
            store.set_up(!is_down);
            if is_down == self.is_down.load(Ordering::SeqCst) {
                return;
            }
        }
    }
}

impl fmt::Debug for PoolMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolMetrics").finish_non_exhaustive()
    }
}
