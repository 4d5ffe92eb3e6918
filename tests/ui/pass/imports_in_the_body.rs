#![deny(warnings)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

mod shapes {
    pub struct Result;
    pub enum Shape {
        Ok,
        Err,
    }
}

#[distributed_lock(key = "a")]
async fn glob() -> Result<(), LockError> {
    #[allow(unused_imports)]
    use shapes::*;
    std::result::Result::Ok(())
}

#[distributed_lock(key = "b")]
async fn items() -> Result<u8, LockError> {
    struct Site;
    fn enter(_: Site) -> u8 {
        1
    }
    Ok(enter(Site))
}

fn main() {}
