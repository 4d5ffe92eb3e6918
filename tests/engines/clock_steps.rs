//! The clock of a database steps while a lock is held.

use lock_runtime::{FenceGate, LockPool};
use lock_tests::prelude::*;
use lock_tests::skew::Step;
use lock_tests::{Skew, SqlServer};

const KEY: &str = "order:1";

mod postgres {
    use super::*;

    #[tokio::test]
    async fn a_step_of_the_clock_is_told_and_fences_protect() {
        let clock = Skew::new();
        is_told_and_fences_protect(&SqlServer::postgres_with(&clock), &clock, "LK001").await;
    }
}

mod mysql {
    use super::*;

    #[tokio::test]
    async fn a_step_of_the_clock_is_told_and_fences_protect() {
        let clock = Skew::new();
        is_told_and_fences_protect(&SqlServer::mysql_with(&clock), &clock, "the_lock_is_lost")
            .await;
    }
}

/// A step by more than the ttl makes another holder. `refusal`: what a pin of the former one fails with.
async fn is_told_and_fences_protect(server: &SqlServer, clock: &Skew, refusal: &str) {
    let url = format!("{}&pin=on", server.url());
    let [one, other] = [patient(&url, ms(8_000)).await, patient(&url, ms(8_000)).await];
    assert_eq!(clock_warnings(&one).await, [""; 0]);
    let gate = FenceGate::new();
    let former = one.lock(KEY).acquire().await.unwrap();
    let (fence, pin) = (former.fence().unwrap(), former.pin_sql().unwrap());
    gate.admit(KEY, fence).unwrap();

    clock.step(ms(10_000), Step::Forward);
    for pool in [&one, &other] {
        let warnings = clock_warnings(pool).await;
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        assert!(warning.contains(" s ahead of this machine; synchronise"), "{warning}");
    }
    let next = joined("the next holder", acquire_in_task(&other, KEY)).await.1;
    assert!(next.fence() > Some(fence), "{:?} after {fence}", next.fence());
    gate.admit(KEY, next.fence().unwrap()).unwrap();
    gate.admit(KEY, fence).unwrap_err();
    let mut session = server.session().await;
    session.begin().await;
    let refused = session.try_run(&pin).await.unwrap_err();
    assert!(refused.contains(refusal), "{refused}");
    // MariaDB keeps the row of the fence locked until then.
    session.run("ROLLBACK").await;
    let loss = within(DEADLINE, "the former holder is told", former.lost()).await;
    assert!(loss.is_lost(), "{loss}");
    assert!(!former.is_held());
    assert!(next.is_held() && next.verify().await.is_ok());
    next.release().await.unwrap();

    // Ten seconds behind, where a free key is not held for the time of the step.
    let last = cycle(&other, KEY).await;
    clock.step(ms(20_000), Step::Back);
    let warnings = clock_warnings(&one).await;
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains(" s behind this machine; synchronise"), "{warning}");
    let later = one.lock(KEY).wait(ms(5_000)).acquire().await.unwrap();
    assert!(later.fence() > last, "{:?} after {last:?}", later.fence());
    // Otherwise a holder that ends without a release would keep the key for the time of the step.
    let holder = other.inspect(KEY).await.unwrap().holder.unwrap();
    assert!(holder.expires_in.is_some_and(|left| left <= ms(8_000)), "{holder:?}");
    later.release().await.unwrap();

    clock.step(ms(10_000), Step::Forward);
    assert_eq!(clock_warnings(&one).await, [""; 0]);
}

async fn clock_warnings(pool: &LockPool) -> Vec<String> {
    let warnings = pool.health().await.unwrap().warnings;
    let texts = warnings.iter().map(ToString::to_string);
    texts.filter(|text| text.starts_with("the clock of ")).collect()
}
