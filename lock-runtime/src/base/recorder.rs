//! Which recorder of the facade crate `metrics` the running code has.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use metrics::with_recorder;

/// The recorder that metrics go to now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recorder {
    None,
    /// That of the program. It stays until the process ends, and so do the handles that it makes.
    OfProgram,
    /// One that this thread has for a while, in a test. The next one may have the same address.
    OfThread,
}

/// The address of the program's recorder; 0 until it is known.
static OF_PROGRAM: AtomicUsize = AtomicUsize::new(0);

#[inline]
pub(crate) fn present() -> Recorder {
    match with_recorder(address) {
        0 => Recorder::None,
        address if address == OF_PROGRAM.load(Ordering::Relaxed) => Recorder::OfProgram,
        address => other(address),
    }
}

/// 0 if there is no recorder: the crate has a zero-sized static in its place. A recorder of the program is in a box, where
/// a zero-sized value has its alignment as its address.
fn address(recorder: &dyn metrics::Recorder) -> usize {
    let address = std::ptr::from_ref(recorder).cast::<()>().addr();
    let is_boxed = address == align_of_val(recorder);
    if size_of_val(recorder) > 0 || is_boxed { address } else { 0 }
}

#[cold]
fn other(address: usize) -> Recorder {
    if OF_PROGRAM.load(Ordering::Relaxed) == 0 {
        // A new thread has no recorder of its own.
        let asked = thread::Builder::new().spawn(|| with_recorder(self::address));
        if let Some(of_program) = asked.ok().and_then(|asked| asked.join().ok()) {
            OF_PROGRAM.store(of_program, Ordering::Relaxed);
        }
    }
    let is_of_program = OF_PROGRAM.load(Ordering::Relaxed) == address;
    if is_of_program { Recorder::OfProgram } else { Recorder::OfThread }
}
