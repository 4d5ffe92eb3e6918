//! How large an annotated function's future is, beside the same function without the attribute.

use lock_runtime::{LockError, distributed_lock};

/// Bytes of the two futures of one function.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// What the function does or takes.
    pub what: &'static str,
    /// Without the attribute.
    pub plain: usize,
    /// With it.
    pub locked: usize,
}

/// A small body, and one that takes 1 KiB by value.
#[must_use]
pub fn sizes() -> [Sizes; 2] {
    let bytes = [0; 1024];
    [
        Sizes {
            what: "small body",
            plain: size_of_val(&plain_small(1)),
            locked: size_of_val(&locked_small(1)),
        },
        Sizes {
            what: "argument of 1 KiB",
            plain: size_of_val(&plain_large(1, bytes)),
            locked: size_of_val(&locked_large(1, bytes)),
        },
    ]
}

async fn plain_small(id: u64) -> Result<u64, LockError> {
    tokio::task::yield_now().await;
    Ok(id)
}

#[distributed_lock(key = "order:<id>", ttl = "5s")]
async fn locked_small(id: u64) -> Result<u64, LockError> {
    tokio::task::yield_now().await;
    Ok(id)
}

async fn plain_large(id: u64, bytes: [u8; 1024]) -> Result<u64, LockError> {
    tokio::task::yield_now().await;
    Ok(id + u64::from(bytes[7]))
}

#[distributed_lock(key = "order:<id>", ttl = "5s")]
async fn locked_large(id: u64, bytes: [u8; 1024]) -> Result<u64, LockError> {
    tokio::task::yield_now().await;
    Ok(id + u64::from(bytes[7]))
}
