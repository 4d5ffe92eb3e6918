//! Every way out of a body, and of a guard, frees the lock. `tests/api` has the same for Redis.

use std::sync::Arc;

use lock_tests::exits::{Api, EXITS, Scene};
use lock_tests::{Engine, EngineKind};

macro_rules! exits {
    ($($engine:ident $kind:ident),*) => {
        $(
            mod $engine {
                use super::*;

                #[test]
                fn of_an_annotated_function() {
                    free_the_lock(EngineKind::$kind, Api::Attribute);
                }

                #[test]
                fn of_run() {
                    free_the_lock(EngineKind::$kind, Api::Run);
                }

                #[test]
                fn of_a_guard() {
                    free_the_lock(EngineKind::$kind, Api::Guard);
                }
            }
        )*
    };
}

exits!(postgres Postgres, mysql Mysql, etcd Etcd, zookeeper ZooKeeper);

fn free_the_lock(kind: EngineKind, api: Api) {
    let engine = Arc::new(Engine::shared(kind));
    for (id, (name, exit)) in (0..).zip(EXITS) {
        println!("{name}");
        let looked_at = engine.clone();
        let taken = move |key: &str| looked_at.holder(key).is_some();
        exit(&Scene::new(api, &engine.url(), id, taken));
    }
    assert_eq!(engine.owners(), 0);
}
