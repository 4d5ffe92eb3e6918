//! How large an annotated function's future is, beside the same function without the attribute.

use lock_runtime::{LockError, LockGuard, distributed_lock};

/// Bytes of the two futures of one function.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// What the function does or takes.
    pub what: &'static str,
    /// Without the attribute.
    pub plain: usize,
    /// With it.
    pub locked: usize,
    /// Bytes of the arguments, and of the guard, that the attribute keeps once more.
    pub kept_again: usize,
}

/// A small body, and ones that take 1 KiB by value.
#[must_use]
pub fn sizes() -> [Sizes; 4] {
    let bytes = [0; 1024];
    [
        Sizes {
            what: "small body",
            plain: size_of_val(&plain_small(1)),
            locked: size_of_val(&locked_small(1)),
            kept_again: 0,
        },
        Sizes {
            what: "argument of 1 KiB",
            plain: size_of_val(&plain_large(1, bytes)),
            locked: size_of_val(&locked_large(1, bytes)),
            kept_again: 0,
        },
        // Until the body begins, the arguments and the guard are beside the place of the body.
        Sizes {
            what: "argument of 1 KiB, with a guard",
            plain: size_of_val(&plain_large(1, bytes)),
            locked: size_of_val(&guarded_large(1, bytes)),
            kept_again: size_of_val(&bytes) + size_of::<LockGuard>(),
        },
        // The fallback has arguments and a future too.
        Sizes {
            what: "argument of 1 KiB, with a fallback",
            plain: size_of_val(&plain_large(1, bytes)),
            locked: size_of_val(&falling_back_large(1, bytes)),
            kept_again: 2 * size_of_val(&bytes),
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

#[distributed_lock(key = "order:<id>", ttl = "5s", guard = lock)]
async fn guarded_large(id: u64, bytes: [u8; 1024]) -> Result<u64, LockError> {
    tokio::task::yield_now().await;
    Ok(id + u64::from(bytes[7]) + u64::from(lock.is_held()))
}

#[distributed_lock(key = "order:<id>", ttl = "5s", on_conflict = plain_large)]
async fn falling_back_large(id: u64, bytes: [u8; 1024]) -> Result<u64, LockError> {
    tokio::task::yield_now().await;
    Ok(id + u64::from(bytes[7]))
}
