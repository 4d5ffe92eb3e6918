#![deny(warnings, clippy::pedantic)]
#![allow(dead_code, clippy::manual_async_fn, clippy::type_complexity)]

use std::pin::Pin;

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "a:<id>")]
fn opaque(id: u64) -> impl Future<Output = Result<u64, LockError>> + Send {
    async move {
        if id == 0 {
            return Ok(0);
        }
        Ok(id)
    }
}

#[distributed_lock(key = "b:<id>", on_conflict = opaque)]
fn boxed(id: u64) -> impl Future<Output = Result<u64, LockError>> {
    async move { Ok(id) }
}

#[distributed_lock(key = "c:<id>")]
fn pinned(id: u64) -> Pin<Box<dyn Future<Output = Result<u64, LockError>> + Send>> {
    Box::pin(async move { Ok(id) })
}

/// The body uses nothing, and the key does.
#[distributed_lock(key = "d:<id>")]
fn unmoved(id: String) -> impl Future<Output = Result<(), LockError>> {
    async { Ok(()) }
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Later = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The only `Output` is one inside the result.
#[distributed_lock(key = "e:<id>")]
fn nested(id: String) -> BoxFuture<Result<Pin<Box<dyn Future<Output = ()> + Send>>, LockError>> {
    Box::pin(async move {
        let later: Later = Box::pin(async move { drop(id) });
        Ok(later)
    })
}

#[distributed_lock(key = "f:<id>")]
fn other_output(id: u64) -> BoxFuture<Result<Box<dyn std::ops::Mul<u8, Output = u8> + Send>, LockError>> {
    Box::pin(async move {
        let factor: Box<dyn std::ops::Mul<u8, Output = u8> + Send> = Box::new(1);
        Ok(factor)
    })
}

#[distributed_lock(key = "g:<id>")]
fn cast(id: u64) -> Pin<Box<dyn Future<Output = Result<u64, LockError>> + Send>> {
    Box::pin(async move { Ok(id) }) as _
}

macro_rules! block {
    ($body:block) => {
        #[distributed_lock(key = "h")]
        fn in_a_macro() -> impl Future<Output = Result<u8, LockError>> {
            async move $body
        }
    };
}

block!({ Ok(1) });

fn main() {}
