//! Detects forks. A fork copies the memory of a process and only one of its threads. Values that depend on the other
//! threads, or that must be unique, are not usable in the child.

use once_cell::sync::OnceCell;

/// The process that created a value. The check whether it is the running process costs one load.
#[derive(Clone, Debug)]
pub(crate) struct Process(#[cfg(unix)] Option<forkguard::atfork::Guard>);

impl Process {
    /// The running process.
    pub(crate) fn current() -> Self {
        Self(
            // If the handler cannot be allocated, forks are not detected.
            #[cfg(unix)]
            forkguard::atfork::Guard::try_new().ok(),
        )
    }

    /// False in a process that was forked from the one that created the value.
    #[inline]
    pub(crate) fn is_current(&self) -> bool {
        #[cfg(unix)]
        return self.0.clone().is_none_or(|mut guard| !guard.detected_fork());
        #[cfg(not(unix))]
        true
    }
}

/// A lazy static value, one per process. A fork copies it; the child ignores the copy and does not drop it.
#[derive(Debug)]
pub(crate) struct OfProcess<T> {
    created: OnceCell<(Process, T)>,
    /// The value of a process that was forked from the creator of this one.
    next: OnceCell<Box<Self>>,
}

impl<T> OfProcess<T> {
    pub(crate) const fn new() -> Self {
        Self { created: OnceCell::new(), next: OnceCell::new() }
    }

    /// The value. If the running process has none yet, `make` creates it.
    pub(crate) fn get_or_try_init<E>(&self, make: impl Fn() -> Result<T, E>) -> Result<&T, E> {
        let mut cell = self;
        loop {
            let create = || make().map(|value| (Process::current(), value));
            let (process, value) = cell.created.get_or_try_init(create)?;
            if process.is_current() {
                return Ok(value);
            }
            cell = cell.next.get_or_init(|| Box::new(Self::new()));
        }
    }

    /// Like [`get_or_try_init`](Self::get_or_try_init), with an infallible `make`.
    pub(crate) fn get_or_init(&self, make: impl Fn() -> T) -> &T {
        match self.get_or_try_init(|| Ok::<_, std::convert::Infallible>(make())) {
            Ok(value) => value,
            Err(never) => match never {},
        }
    }

    /// The value, if the running process has created it.
    pub(crate) fn get(&self) -> Option<&T> {
        let mut cell = self;
        loop {
            let (process, value) = cell.created.get()?;
            if process.is_current() {
                return Some(value);
            }
            cell = cell.next.get()?;
        }
    }

    /// Whether the value was created by a process from which the running one was forked.
    pub(crate) fn is_inherited(&self) -> bool {
        self.created.get().is_some_and(|(process, _)| !process.is_current())
    }
}
