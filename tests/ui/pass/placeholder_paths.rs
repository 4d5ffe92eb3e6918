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

fn main() {}
