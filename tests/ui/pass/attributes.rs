#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

/// Documented.
#[distributed_lock(key = "a")]
#[must_use = "asked for"]
#[inline]
async fn outer() -> Result<(), LockError> {
    Ok(())
}

#[allow(clippy::mixed_attributes_style, unused_variables)]
#[distributed_lock(key = "b")]
pub(crate) async fn inner() -> Result<(), LockError> {
    #![allow(unused_mut)]
    let mut unused = 1;
    Ok(())
}

#[distributed_lock(key = "c")]
async unsafe fn dangerous() -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "d")]
#[distributed_lock(key = "e", pool = "other")]
async fn both() -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "f:<id>")]
async fn with_attributed_parameter(#[allow(unused_variables)] id: u64) -> Result<(), LockError> {
    Ok(())
}

fn main() {}
