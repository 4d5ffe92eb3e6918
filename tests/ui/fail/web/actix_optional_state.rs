use actix_web::web::{Data, Path};
use lock_runtime::{LockError, distributed_lock};

struct Settings {
    tenant: Option<String>,
}

#[distributed_lock(key = "<settings.tenant>:<id>")]
async fn settle(settings: Data<Settings>, id: Path<u64>) -> Result<String, LockError> {
    Ok(format!("{:?}: {id}", settings.tenant))
}

fn main() {
    let _ = actix_web::web::resource("/{id}").to(settle);
}
