//! What `LockPool::force_release` does on any store.

use std::future::pending;

use lock_runtime::{ErrorKind, FenceGate, LockPool, Wait};
use tokio::sync::oneshot;

use crate::eventually_async;
use crate::prelude::*;

/// A lock is taken from a body that hangs, while another owner waits for it. The body is cancelled as lost, the waiter
/// has a greater fence, and a late write of the former holder is refused. The same release again leaves the new one
/// alone.
pub async fn is_taken_from_its_holder(url: &str) {
    let connect = || {
        let builder = LockPool::builder(url).key_prefix("forced:").ttl(ms(3_000));
        builder.wait(Wait::Forever).connect()
    };
    let [hanging, waiting, admin] =
        [connect().await.unwrap(), connect().await.unwrap(), connect().await.unwrap()];
    let (entered, has_entered) = oneshot::channel();
    let body = hanging.lock("order:1").run(async move {
        entered.send(()).unwrap();
        pending::<()>().await;
    });
    let body = tokio::spawn(body);
    within(DEADLINE, "the body begins", has_entered).await.unwrap();
    let former = hanging.snapshot().held[0].clone();
    let next = acquire_in_task(&waiting, "order:1");
    eventually_async(DEADLINE, "the second one waits", async || {
        !waiting.snapshot().waiting.is_empty()
    })
    .await;

    let holder = admin.inspect("order:1").await.unwrap().holder.unwrap();
    assert_eq!(holder.owner, Some(former.owner));
    assert!(admin.force_release("order:1", &holder).await.unwrap());
    let (_, next) = joined("the next one", next).await;
    assert!(next.fence() > former.fence, "{:?} behind {:?}", next.fence(), former.fence);
    let (gate, former_fence) = (FenceGate::new(), former.fence.unwrap());
    gate.admit("order:1", former_fence).unwrap();
    gate.admit("order:1", next.fence().unwrap()).unwrap();
    gate.admit("order:1", former_fence).expect_err("the write is late");
    let error = joined("the end of the body", body).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    assert!(error.body_started(), "{error}");

    let new = admin.inspect("order:1").await.unwrap().holder.unwrap();
    assert_ne!(new.owner, holder.owner);
    for _ in 0..10 {
        assert!(!admin.force_release("order:1", &holder).await.unwrap(), "it is another one");
    }
    next.verify().await.unwrap();
    next.release().await.unwrap();
    eventually_async(DEADLINE, "it is free", async || {
        admin.inspect("order:1").await.unwrap().is_free()
    })
    .await;
    assert!(!admin.force_release("order:1", &new).await.unwrap(), "it is free");
}
