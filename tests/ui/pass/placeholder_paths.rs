#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

struct Line {
    sku: String,
}

struct Order {
    id: u64,
    lines: Vec<Line>,
    pair: (u32, (u8, char)),
    r#type: &'static str,
    r#gen: u8,
}

impl Line {
    fn sku(&self) -> &str {
        &self.sku
    }
}

#[distributed_lock(
    key = "<order.id>:<order.lines[0].sku>:<order.lines[at].sku()>:<order.pair.0>/<order.pair.1.1>:<order.type>:<order.gen>:<name>"
)]
async fn settle(order: Order, at: usize, name: &str) -> Result<u64, LockError> {
    let Order { id, .. } = order;
    Ok(id + name.len() as u64 + at as u64)
}

struct Name(str);

struct Counter {
    tenant: String,
    count: u64,
}

impl Name {
    #[distributed_lock(key = "name:<self.0>")]
    async fn reserve(&self) -> Result<(), LockError> {
        Ok(())
    }
}

impl Counter {
    fn next(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    #[distributed_lock(key = "<self.tenant>:<self.next()>")]
    async fn number(&mut self) -> Result<(), LockError> {
        Ok(())
    }
}

fn main() {}
