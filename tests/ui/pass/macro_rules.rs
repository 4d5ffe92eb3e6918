#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

macro_rules! locked {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),*), $key:literal) => {
        $(#[$meta])*
        #[distributed_lock(key = $key, ttl = "5s")]
        $vis async fn $name($($arg: $type),*) -> Result<(), LockError> {
            Ok(())
        }
    };
}

locked!(#[must_use = "settled"]
    pub(crate) fn settle(id: u64, name: &str), "settle:<id>:<name>");
locked!(fn refund(), "refund");

macro_rules! methods {
    ($type:ident, $field:ident, $wait:expr, $guard:ident) => {
        impl $type {
            #[distributed_lock(key = "m:<self.id>", wait = $wait, guard = $guard)]
            async fn $field(&self, amount: u64) -> Result<u64, LockError> {
                let lock = amount;
                Ok(self.id + lock + u64::from($guard.is_held()))
            }

            #[distributed_lock(key = "n:<amount>:<self.id>")]
            async fn fixed(&mut self, mut amount: u64) -> Result<u64, LockError> {
                amount += self.id;
                Ok(amount)
            }
        }
    };
}

struct Service {
    id: u64,
}

methods!(Service, add, std::time::Duration::from_secs(1), held);

macro_rules! attach {
    ($item:item) => {
        #[distributed_lock(key = "item")]
        $item
    };
}

attach! {
    async fn attached() -> Result<(), LockError> {
        Ok(())
    }
}

macro_rules! around {
    ($body:block) => {
        #[distributed_lock(key = "block")]
        async fn around() -> Result<u8, LockError> $body
    };
}

around!({ Ok(1) });

fn main() {}
