#![no_implicit_prelude]
#![deny(warnings)]
#![allow(dead_code)]

use ::lock_runtime::distributed_lock;

#[distributed_lock(
    key = "a:<id>",
    ttl = "5s",
    wait = "1s",
    renew = "1s",
    on_conflict = "skip",
    on_lost = "notify",
    guard = lock
)]
async fn settle(id: u64) -> ::core::result::Result<(), ::lock_runtime::LockError> {
    let _ = lock.is_held();
    ::core::result::Result::Ok(())
}

#[distributed_lock(keys = ["b", "c:<id>"], on_error = |_| (), when = id > 1)]
async fn unit(id: u64) {}

fn main() {}
