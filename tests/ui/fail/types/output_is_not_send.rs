use std::error::Error;

use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>")]
async fn settle(id: u64) -> Result<(), Box<dyn Error>> {
    Err(format!("{id} is unknown").into())
}

fn sendable(_: impl Send) {}

fn starts() {
    sendable(settle(1));
}

fn main() {}
