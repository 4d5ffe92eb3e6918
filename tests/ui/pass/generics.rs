#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use std::fmt::Display;

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "a:<id>")]
async fn bounded<T, const N: usize>(id: T, items: [u8; N]) -> Result<usize, LockError>
where
    T: Clone + Display + Send,
{
    drop(id.clone());
    Ok(items.len())
}

#[distributed_lock(key = "b:<name>")]
async fn lifetimes<'a, 'b: 'a>(name: &'a str, other: &'b str) -> Result<&'a str, LockError> {
    Ok(if name.is_empty() { other } else { name })
}

#[distributed_lock(key = "c:<name>")]
async fn elided(name: &str) -> Result<&str, LockError> {
    Ok(name)
}

struct Holder<T>(T);

impl<T: Display> Holder<T> {
    #[distributed_lock(key = "d:<self.0>")]
    async fn get(&self) -> Result<&T, LockError> {
        Ok(&self.0)
    }
}

fn main() {}
