//! Tools for tests of stores and of programs that use locks: feature `testing`.
//!
//! * [`with_pool`] gives a test of annotated functions a pool of its own.
//! * [`conformance`] is the suite that every [`Backend`](crate::backend::Backend) has to pass.
//! * [`FaultyBackend`] wraps a backend and loses, delays or fails requests as planned.
//! * Virtual time needs no type of its own: build the pool with
//!   [`on_current_runtime`](crate::PoolBuilder::on_current_runtime) under `#[tokio::test(start_paused = true)]`.

mod conformance;
mod faulty;
mod open;

pub use crate::api::pool_override::with_pool;
pub use conformance::conformance;
pub use faulty::{Fault, FaultPlan, FaultyBackend, Operation};
pub use open::open_backend;
