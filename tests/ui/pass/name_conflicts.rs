#![deny(warnings)]
#![allow(dead_code, unused_macros)]

use self::lock_runtime::distributed_lock;

mod std {}
mod core {}
mod alloc {}

mod lock_runtime {
    pub(super) use ::lock_runtime::distributed_lock;
}

struct Result;
struct Option;
struct Duration;
struct Site;
struct Call;
struct Key;
struct KeyWriter;
struct LockGuard;
struct Some;
struct None;
struct Ok;
struct Err;
struct Future;
trait FromLockError {}
trait Into {}

macro_rules! line {
    () => {
        compile_error!("user's line!")
    };
}
macro_rules! file {
    () => {
        compile_error!("user's file!")
    };
}
macro_rules! module_path {
    () => {
        compile_error!("user's module_path!")
    };
}

static __SITE: u8 = 1;

#[distributed_lock(key = "a:<id>", ttl = "5s", wait = "forever", guard = lock)]
async fn settle(id: u64) -> ::core::result::Result<u8, ::lock_runtime::LockError> {
    let _ = lock.is_held();
    ::core::result::Result::Ok(__SITE)
}

#[distributed_lock(key = "b:<__site>:<__key>:<__call>", when = __when)]
async fn arguments(
    __site: u8,
    __key: u8,
    __call: u8,
    __entry: u8,
    __error: u8,
    __when: bool,
    __guard: u8,
) -> ::core::result::Result<u8, ::lock_runtime::LockError> {
    ::core::result::Result::Ok(__site + __key + __call + __entry + __error + __guard)
}

fn main() {}
