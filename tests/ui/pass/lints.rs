#![forbid(
    unsafe_code,
    unused_braces,
    unused_variables,
    unused_mut,
    unused_must_use,
    unreachable_code
)]
#![deny(warnings, unused, nonstandard_style, future_incompatible, rust_2018_idioms)]
#![deny(
    unused_qualifications,
    unused_results,
    let_underscore_drop,
    single_use_lifetimes,
    missing_docs
)]
#![deny(
    elided_lifetimes_in_paths,
    trivial_casts,
    trivial_numeric_casts,
    unused_lifetimes,
    unreachable_pub
)]
#![deny(
    clippy::all,
    clippy::pedantic,
    clippy::nursery,
    clippy::shadow_unrelated
)]
#![deny(clippy::implicit_return, clippy::allow_attributes, clippy::std_instead_of_core)]
#![allow(dead_code, clippy::implicit_return, clippy::std_instead_of_core)]
//! Lints that look at generated code.

use std::time::Duration;

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "a:<id>", ttl = "5s", on_conflict = "skip", guard = lock)]
async fn settle(id: u64, mut name: String) -> Result<(), LockError> {
    name.push('x');
    if lock.is_held() {
        return Ok(());
    }
    drop(name);
    Ok(())
}

#[distributed_lock(key = "b:<id>", on_error = |_| (), when = id > 1, ttl = Duration::from_secs(1))]
async fn unit(id: u64) {
    drop(std::future::ready(id.to_string()).await);
}

#[distributed_lock(keys = ["c:<id>", "d"], pool = "other", retry_count = 3)]
async fn keys(id: u64) -> Result<impl Sized, LockError> {
    Ok(id)
}

#[distributed_lock(key = "e")]
async fn never_returns() -> Result<(), LockError> {
    loop {
        std::future::ready(()).await;
    }
}

fn main() {}
