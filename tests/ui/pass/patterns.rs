#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

struct Path<T>(T);

struct Order {
    id: u64,
    lines: Vec<u8>,
}

#[distributed_lock(key = "a:<id>")]
async fn tuple_struct(Path(id): Path<u64>) -> Result<u64, LockError> {
    Ok(id)
}

#[distributed_lock(key = "b:<a>:<b>:<first>")]
async fn nested((a, Path(b)): (u8, Path<u8>), [first, ..]: [u8; 3]) -> Result<u8, LockError> {
    Ok(a + b + first)
}

#[distributed_lock(key = "c:<id>:<kind>")]
async fn fields(Order { id, lines: mut all, .. }: Order, kind: &str) -> Result<usize, LockError> {
    all.push(u8::from(id == 0));
    Ok(all.len() + kind.len())
}

#[distributed_lock(key = "d:<count>")]
async fn mutable(mut count: u64, _: u64, _unused: u8) -> Result<u64, LockError> {
    count += 1;
    Ok(count)
}

fn main() {}
