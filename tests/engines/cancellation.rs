//! An acquire that is dropped leaves nothing behind. `tests/api` has the same for Redis.

use std::sync::Arc;

use lock_tests::dropped_acquires::{self, DroppedCall, PROMPT, Rivals, of_several_keys_behind};
use lock_tests::{Engine, EngineKind, eventually_async};

on_each_engine!(
    dropped_while_the_key_is_free,
    dropped_while_another_pool_holds_it,
    dropped_behind_a_local_task,
    several_keys_with_the_middle_one_held_elsewhere,
    several_keys_with_the_middle_one_held_here,
);

/// `run` has the state of the annotated function.
const CALLS: [DroppedCall; 3] =
    [DroppedCall::Acquire, DroppedCall::TryAcquire, DroppedCall::Attribute];

struct Scene {
    engine: Arc<Engine>,
    rivals: Rivals,
}

impl Scene {
    async fn new(kind: EngineKind) -> Self {
        let engine = Arc::new(Engine::shared(kind));
        let looked_at = engine.clone();
        let rivals = Rivals::new(&engine.url(), move |key| looked_at.holder(key)).await;
        Self { engine, rivals }
    }

    /// Longer than the interval of renewals, and far shorter than the ttl.
    async fn ends_empty(self) {
        let empty = async || self.engine.owners() == 0;
        eventually_async(PROMPT, "nothing is left in the store", empty).await;
    }
}

async fn dropped_while_the_key_is_free(kind: EngineKind) {
    let scene = Scene::new(kind).await;
    for call in CALLS {
        dropped_acquires::while_the_key_is_free(&scene.rivals, call).await;
    }
    scene.ends_empty().await;
}

async fn dropped_while_another_pool_holds_it(kind: EngineKind) {
    let scene = Scene::new(kind).await;
    for call in CALLS {
        dropped_acquires::while_another_pool_holds_it(&scene.rivals, call).await;
    }
    scene.ends_empty().await;
}

async fn dropped_behind_a_local_task(kind: EngineKind) {
    let scene = Scene::new(kind).await;
    for call in CALLS {
        dropped_acquires::behind_a_local_task(&scene.rivals, call).await;
    }
    scene.ends_empty().await;
}

async fn several_keys_with_the_middle_one_held_elsewhere(kind: EngineKind) {
    let scene = Scene::new(kind).await;
    of_several_keys_behind(&scene.rivals, &scene.rivals.theirs).await;
    scene.ends_empty().await;
}

async fn several_keys_with_the_middle_one_held_here(kind: EngineKind) {
    let scene = Scene::new(kind).await;
    of_several_keys_behind(&scene.rivals, &scene.rivals.ours).await;
    scene.ends_empty().await;
}
