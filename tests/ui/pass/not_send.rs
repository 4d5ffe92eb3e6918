#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use std::rc::Rc;

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "a:<name>")]
async fn local(name: Rc<str>) -> Result<usize, LockError> {
    let kept = Rc::clone(&name);
    std::future::ready(()).await;
    Ok(kept.len())
}

fn main() {}
