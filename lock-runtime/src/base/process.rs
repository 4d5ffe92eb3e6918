//! In which process something came to be. A fork copies the memory of a process and one of its threads: what hangs on
//! the other threads, or is to be unique, is of no use in the child.

use once_cell::sync::OnceCell;

/// The process that made a value. Whether it is the running one costs one load.
#[derive(Clone, Debug)]
pub(crate) struct Process(#[cfg(unix)] Option<forkguard::atfork::Guard>);

impl Process {
    /// The running process.
    pub(crate) fn current() -> Self {
        Self(
            // Without memory for a handler forks go unnoticed.
            #[cfg(unix)]
            forkguard::atfork::Guard::try_new().ok(),
        )
    }

    /// False in a process that was forked from the one which made the value.
    #[inline]
    pub(crate) fn is_current(&self) -> bool {
        #[cfg(unix)]
        return self.0.clone().is_none_or(|mut guard| !guard.detected_fork());
        #[cfg(not(unix))]
        true
    }
}

/// A value of which each process makes its own, as a lazy static does. A fork copies it; the child passes the copy by
/// and does not drop it.
#[derive(Debug)]
pub(crate) struct OfProcess<T> {
    made: OnceCell<(Process, T)>,
    /// For a process that was forked from the one that made this.
    next: OnceCell<Box<Self>>,
}

impl<T> OfProcess<T> {
    pub(crate) const fn new() -> Self {
        Self { made: OnceCell::new(), next: OnceCell::new() }
    }

    /// The value, which `make` makes if the running process has none yet.
    pub(crate) fn get_or_try_init<E>(&self, make: impl Fn() -> Result<T, E>) -> Result<&T, E> {
        let mut place = self;
        loop {
            let made = || make().map(|value| (Process::current(), value));
            let (process, value) = place.made.get_or_try_init(made)?;
            if process.is_current() {
                return Ok(value);
            }
            place = place.next.get_or_init(|| Box::new(Self::new()));
        }
    }

    /// As [`get_or_try_init`](Self::get_or_try_init), where nothing can fail.
    pub(crate) fn get_or_init(&self, make: impl Fn() -> T) -> &T {
        match self.get_or_try_init(|| Ok::<_, std::convert::Infallible>(make())) {
            Ok(value) => value,
            Err(never) => match never {},
        }
    }

    /// The value, if the running process has made it.
    pub(crate) fn get(&self) -> Option<&T> {
        let mut place = self;
        loop {
            let (process, value) = place.made.get()?;
            if process.is_current() {
                return Some(value);
            }
            place = place.next.get()?;
        }
    }

    /// Whether a process has made one from which the running one was forked.
    pub(crate) fn is_inherited(&self) -> bool {
        self.made.get().is_some_and(|(process, _)| !process.is_current())
    }
}
