//! The annotated functions of a program, before their first call.

use std::sync::LazyLock;

use lock_runtime::{LockError, LockPool, Renew, Wait, call_sites, distributed_lock};
use lock_tests::prelude::*;

use crate::metered::{RECORDED, value};
use crate::seen::{Traced, watch};

// Most of these are never called.

#[distributed_lock(key = "listed:<id>", pool = "sites", ttl = "5s", wait = "forever", renew = "1s")]
async fn listed(id: u64) -> Result<(), LockError> {
    Ok(())
}

struct Orders {
    locks: LockPool,
}

impl Orders {
    #[distributed_lock(keys = ["a:<id>", "b"], pool = self.locks, name = "orders", max_hold = "9s")]
    async fn method<T: Send>(&self, id: u64, other: T) -> Result<T, LockError> {
        Ok(other)
    }
}

#[distributed_lock(key = "shared:<id>", pool = "sites")]
async fn one(id: u64) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "shared:<id>", pool = "sites")]
async fn another(id: u64) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "meant:<id>", pool = "sites", name = "both")]
async fn meant(id: u64) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "meant:<id>", pool = "sites", name = "both")]
async fn also_meant(id: u64) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = key, pool = "sites")]
async fn computed(key: String) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = key, pool = "sites")]
async fn computed_otherwise(key: String) -> Result<(), LockError> {
    Ok(())
}

/// The functions exist, so that the compiler has no complaint.
fn uncalled() {
    drop((listed(1), one(1), another(1), meant(1), also_meant(1)));
    drop(computed_otherwise(String::new()));
}

#[test]
fn all_functions_are_known_before_the_first_call() {
    let sites = call_sites();
    let of = |function: &str| {
        let of_function = |site: &&lock_runtime::CallSite| {
            site.module() == module_path!() && site.function() == function
        };
        let found: Vec<_> = sites.iter().filter(of_function).collect();
        assert_eq!(found.len(), 1, "{function} in {sites:#?}");
        *found[0]
    };
    let site = of("listed");
    assert_eq!((site.template(), site.pool()), ("listed:<id>", Some("sites")));
    assert_eq!(site.name(), concat!(module_path!(), "::listed"));
    assert!(site.file().ends_with("observability/sites.rs") && site.line() > 10, "{site:?}");
    assert_eq!((site.ttl(), site.wait()), (Some(ms(5_000)), Some(Wait::Forever)));
    assert_eq!((site.renew(), site.max_hold()), (Some(Renew::Every(ms(1_000))), None));
    let method = of("method");
    assert_eq!((method.template(), method.pool()), ("a:<id>, b", None));
    assert_eq!((method.name().as_str(), method.max_hold()), ("orders", Some(ms(9_000))));
    assert_eq!(of("computed").template(), "key");
    // Sites of other modules too, in an order.
    assert!(sites.len() >= 10, "{sites:#?}");
    assert!(sites.is_sorted_by_key(|site| (site.file(), site.line())));
    let _ = uncalled;
}

#[tokio::test]
async fn functions_with_one_template_are_named_when_their_pool_is_installed() {
    watch();
    LazyLock::force(&RECORDED);
    lock_runtime::install("sites", memory().await).unwrap();
    let traced = Traced::of("sites").await_event("functions share a template").await;
    let shared = traced.one("functions share a template");
    shared.has(&[("lock", "shared:<id>")]);
    let functions = &shared.fields["functions"];
    for function in ["sites::one (", "sites::another (", "sites.rs:"] {
        assert!(functions.contains(function), "{functions}");
    }
    // Their metrics exist, at zero.
    for template in ["listed:<id>", "shared:<id>", "meant:<id>"] {
        let labels = [("pool", "sites"), ("template", template)];
        for name in ["lock.attempts", "lock.held", "lock.losses", "lock.wait.duration"] {
            assert_eq!(value(name, &labels), 0.0, "{name} {template}");
        }
    }
    let orders = Orders { locks: memory().await };
    assert_eq!(orders.method(1, 7).await.unwrap(), 7);
    assert!(computed(String::new()).await.is_err(), "an empty key");
}
