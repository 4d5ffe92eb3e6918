use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>", on_conflict = "skip")]
async fn settle(id: u64) -> Option<u64> {
    Some(id)
}

fn main() {}
