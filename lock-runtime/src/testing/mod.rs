//! For tests of stores and of programs that lock: feature `testing`.
//!
//! * [`conformance`] is the suite that every [`Backend`](crate::backend::Backend) has to pass, ours and
//!   yours.
//! * [`Faulty`] wraps a backend and loses requests or replies where it is told to.
//! * Virtual time needs no type of its own: build the pool with
//!   [`on_current_runtime`](crate::PoolBuilder::on_current_runtime) under `#[tokio::test(start_paused = true)]`.

mod conformance;
mod faulty;
mod opened;

pub use conformance::{conformance, conformance_without_fences};
pub use faulty::{Fault, Faults, Faulty, Operation};
pub use opened::{Opened, open};
