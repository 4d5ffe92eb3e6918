//! Requests and replies that get lost, late or cut off.

#![allow(clippy::disallowed_methods)]

use std::collections::BTreeSet;
use std::time::Duration;

use lock_runtime::{LockError, LockGuard, LockPool, distributed_lock};
use lock_tests::history::{History, Recorder, now_ns};
use lock_tests::monitor::{Caller, Ran};
use lock_tests::prelude::*;
use lock_tests::proxy::{Action, Command, Direction, Trap};
use lock_tests::{FaultProxy, Monitor, RedisServer, Worker, eventually, eventually_async};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

/// How long one request may take.
const REQUEST_TIMEOUT: Duration = ms(800);
/// The same for releases that meet a fault. A release has twice that: for a try without an answer, and then for a new
/// connection on a busy machine.
const LONG_REQUEST_TIMEOUT: Duration = ms(1_600);
/// Far longer than a test takes: a key that is gone earlier was cleaned up.
const LONG: Duration = ms(60_000);

/// A client behind a faulty proxy, and one with a direct connection.
struct Bench {
    server: RedisServer,
    proxy: FaultProxy,
    pool: LockPool,
    other: LockPool,
}

impl Bench {
    async fn new() -> Self {
        Self::with(REQUEST_TIMEOUT).await
    }

    async fn with(request_timeout: Duration) -> Self {
        let server = server();
        let proxy = FaultProxy::start(&server);
        // A wait in which a request without an answer leaves time for the next one.
        let pool = LockPool::builder(proxy.url()).wait(ms(20_000));
        let pool = pool.request_timeout(request_timeout).connect().await.unwrap();
        let other = LockPool::connect(&server.url()).await.unwrap();
        Self { server, proxy, pool, other }
    }

    /// Makes `action` happen to the next command about `key` by the faulty client.
    fn on_next(&self, key: &str, action: Action) -> Trap {
        let key = key.to_owned();
        self.proxy.on_next(move |command| command.mentions(&key), action)
    }

    fn holder(&self, key: &str) -> Option<String> {
        Some(self.server.cli(&["GET", key])).filter(|holder| holder != "(nil)")
    }

    /// The owner token of the holder.
    fn token(&self, key: &str) -> Option<String> {
        let holder = self.holder(key)?;
        Some(token_of(&holder).expect("the value begins with a token").to_owned())
    }

    async fn until_free(&self, key: &str, within: Duration) {
        eventually_async(within, "the key is free", async || self.holder(key).is_none()).await;
    }
}

macro_rules! script {
    ($($file:literal),*) => {
        concat!($(include_str!(concat!("../../lock-runtime/src/backend/redis/protocol/", $file))),*)
    };
}

const ACQUIRE: &str = script!("fence.lua", "acquire.lua");
const RENEW: &str = script!("renew.lua");
const RELEASE: &str = script!("release.lua");
/// Requests to the wait queue.
const LINE: &str = script!("fence.lua", "wait_queue.lua");

/// A server that knows the scripts, so that the first request is the one that counts.
fn server() -> RedisServer {
    let server = RedisServer::start();
    for script in [ACQUIRE, RENEW, RELEASE, LINE] {
        assert_eq!(server.cli(&["SCRIPT", "LOAD", script]), sha(script));
    }
    server
}

/// An owner token and the channel of its pool.
/// The owner token at the head of a value, which may tell of its process behind it.
fn token_of(value: &str) -> Option<&str> {
    let hex = |part: &str, len| part.len() == len && part.bytes().all(|b| b.is_ascii_hexdigit());
    let token = value.split(' ').next()?;
    let (owner, channel) = token.split_once('@')?;
    (hex(owner, 32) && hex(channel, 16)).then_some(token)
}

fn sha(script: &str) -> String {
    redis::Script::new(script).get_hash().to_owned()
}

/// Commands about `key` that clients sent, without those of scripts.
fn sent(monitor: &Monitor<'_>, key: &str) -> Vec<Ran> {
    let about = |ran: &Ran| ran.by != Caller::Script && ran.args[1..].iter().any(|arg| arg == key);
    monitor.settled().into_iter().filter(about).collect()
}

/// The owner tokens that were used on `key`.
fn owners(monitor: &Monitor<'_>, key: &str) -> BTreeSet<String> {
    let args = sent(monitor, key).into_iter().flat_map(|ran| ran.args);
    args.filter_map(|arg| token_of(&arg).map(str::to_owned)).collect()
}

mod lost_reply {
    use super::*;

    /// The server has granted; the reply is lost.
    async fn check_retry(action: Action, fencing: bool) {
        let bench = Bench::new().await;
        let monitor = Monitor::start(&bench.server);
        let trap = bench.on_next("k", action);
        let guard = bench.pool.lock("k").ttl(LONG).fencing(fencing).acquire().await.unwrap();
        assert!(trap.sprung());
        assert!(guard.is_held());
        assert_eq!(guard.fence().is_some(), fencing);
        guard.verify().await.unwrap();
        let token = bench.token("k").unwrap();
        assert_eq!(owners(&monitor, "k"), BTreeSet::from([token]), "one token for all tries");
        let tries = sent(&monitor, "k").iter().filter(|ran| ran.name() != "MGET").count();
        assert!(tries >= 2, "{tries} tries");
        assert!(bench.other.lock("k").try_acquire().await.unwrap().is_none());
        guard.release().await.unwrap();
        assert_eq!(bench.holder("k"), None);
    }

    async fn check_single_try(action: Action, fencing: bool) {
        let bench = Bench::new().await;
        let trap = bench.on_next("k", action);
        let error =
            bench.pool.lock("k").ttl(LONG).fencing(fencing).try_acquire().await.unwrap_err();
        assert!(trap.sprung());
        assert!(error.is_backend(), "{error}");
        bench.until_free("k", ms(10_000)).await;
        // The next waiter gets the lock.
        let guard = bench.pool.lock("k").acquire().await.unwrap();
        guard.release().await.unwrap();
    }

    macro_rules! for_each_way {
        ($($name:ident: $action:ident, fencing $fencing:literal;)*) => {
            $(
                mod $name {
                    use super::*;

                    #[tokio::test]
                    async fn a_grant_without_a_reply_is_found_by_the_retry() {
                        check_retry(Action::$action, $fencing).await;
                    }

                    #[tokio::test]
                    async fn a_single_try_without_a_reply_leaves_nothing_behind() {
                        check_single_try(Action::$action, $fencing).await;
                    }
                }
            )*
        };
    }

    for_each_way! {
        silent_set: DropReply, fencing false;
        silent_script: DropReply, fencing true;
        cut_set: CutBeforeReply, fencing false;
        cut_script: CutBeforeReply, fencing true;
    }

    /// An answer to an earlier request arrives behind the one that is lost. So the connection is silent only after the
    /// release was sent again.
    #[tokio::test]
    async fn a_connection_that_falls_silent_between_two_tries_is_replaced() {
        let server = server();
        let proxy = FaultProxy::start(&server);
        let builder = LockPool::builder(proxy.url()).request_timeout(LONG_REQUEST_TIMEOUT);
        let pool = builder.connection_per_runtime(false).connect().await.unwrap();
        let guard = pool.lock("k").ttl(LONG).fencing(false).acquire().await.unwrap();
        let monitor = Monitor::start(&server);
        proxy.delay(Direction::ToClient, ms(600));
        let earlier = tokio::spawn(pool.lock("earlier").ttl(LONG).fencing(false).acquire());
        let is_sent = async || !sent(&monitor, "earlier").is_empty();
        eventually_async(ms(5_000), "it is under way", is_sent).await;
        let trap = proxy.on_next(|command| command.mentions("k"), Action::DropReply);
        let release = tokio::spawn(guard.release());
        eventually_async(ms(5_000), "the reply is lost", async || trap.sprung()).await;
        proxy.delay(Direction::ToClient, Duration::ZERO);
        release.await.unwrap().unwrap();
        earlier.await.unwrap().unwrap().release().await.unwrap();
    }

    /// A proxy that answers in place of a silent server.
    #[tokio::test]
    async fn the_error_of_a_proxy_without_an_answer_leaves_nothing_behind() {
        let timed_out = Action::AnswerWith(b"-ERR Connection timed out\r\n");
        check_single_try(timed_out, false).await;
        check_single_try(timed_out, true).await;
        check_retry(timed_out, true).await;
    }

    /// The server disappears after the grant: the ttl cleans up.
    #[tokio::test]
    async fn what_cannot_be_taken_back_is_gone_after_the_ttl() {
        let bench = Bench::new().await;
        bench.proxy.refuse(true);
        let trap = bench.on_next("k", Action::CutBeforeReply);
        let asked = now_ns();
        let request = bench.pool.lock("k").ttl(ms(2000)).wait(ms(500));
        assert!(request.acquire().await.unwrap_err().is_backend());
        assert!(trap.sprung());
        assert!(bench.holder("k").is_some());
        let guard = bench.other.lock("k").wait(ms(10_000)).acquire().await.unwrap();
        let waited = Duration::from_nanos(now_ns() - asked);
        assert!(waited >= ms(1900) && waited < ms(8000), "{waited:?}");
        guard.release().await.unwrap();
    }
}

mod late_request {
    use super::*;

    /// One try with a delayed request; the client gives up.
    async fn give_up(bench: &Bench, ttl: Duration, fencing: bool) {
        let trap = bench.on_next("k", Action::HoldRequest);
        let error = bench.pool.lock("k").ttl(ttl).fencing(fencing).try_acquire().await.unwrap_err();
        assert!(trap.sprung());
        assert!(error.is_backend(), "{error}");
        assert_eq!(bench.holder("k"), None);
    }

    /// The delayed request arrives.
    async fn arrive(bench: &Bench, monitor: &Monitor<'_>, token: &str) {
        bench.proxy.release_held();
        eventually_async(ms(5000), "the late request arrives", async || {
            sent(monitor, "k")
                .iter()
                .any(|ran| asks(ran) && ran.args.iter().any(|arg| token_of(arg) == Some(token)))
        })
        .await;
    }

    fn asks(ran: &Ran) -> bool {
        ran.name() == "SET" || ran.args[1] == sha(ACQUIRE)
    }

    /// The only token that the faulty client has used so far, by its clean-up.
    async fn token_of_the_clean_up(monitor: &Monitor<'_>) -> String {
        let mut token = None;
        eventually_async(ms(5000), "the clean-up begins", async || {
            token = owners(monitor, "k").pop_first();
            token.is_some()
        })
        .await;
        token.unwrap()
    }

    async fn check_found_busy(fencing: bool) {
        let bench = Bench::new().await;
        let monitor = Monitor::start(&bench.server);
        give_up(&bench, LONG, fencing).await;
        let token = token_of_the_clean_up(&monitor).await;
        let guard = bench.other.lock("k").ttl(LONG).acquire().await.unwrap();
        arrive(&bench, &monitor, &token).await;
        guard.verify().await.unwrap();
        assert_ne!(bench.token("k"), Some(token));
        guard.release().await.unwrap();
        assert_eq!(bench.holder("k"), None);
    }

    async fn check_taken_back(fencing: bool) {
        let bench = Bench::new().await;
        let monitor = Monitor::start(&bench.server);
        give_up(&bench, LONG, fencing).await;
        let token = token_of_the_clean_up(&monitor).await;
        arrive(&bench, &monitor, &token).await;
        bench.until_free("k", ms(10_000)).await;
        // The next acquire succeeds well before the end of the ttl.
        let guard = bench.other.lock("k").acquire().await.unwrap();
        guard.release().await.unwrap();
    }

    /// After the end of the clean-up: the ttl ends the grant.
    async fn check_expires(fencing: bool) {
        let bench = Bench::new().await;
        let monitor = Monitor::start(&bench.server);
        let ttl = ms(1000);
        give_up(&bench, ttl, fencing).await;
        let token = token_of_the_clean_up(&monitor).await;
        // The clean-up ends when the store would have forgotten the grant.
        bench.pool.shutdown(ms(10_000)).await;
        sleep(ttl).await;
        arrive(&bench, &monitor, &token).await;
        bench.until_free("k", ttl + ms(5000)).await;
    }

    /// The retry was granted meanwhile, and released: the first request brings the key back.
    async fn check_behind_the_release(fencing: bool) {
        let bench = Bench::new().await;
        let monitor = Monitor::start(&bench.server);
        let trap = bench.on_next("k", Action::HoldRequest);
        let guard = bench.pool.lock("k").ttl(LONG).fencing(fencing).acquire().await.unwrap();
        assert!(trap.sprung());
        let token = bench.token("k").unwrap();
        guard.release().await.unwrap();
        assert_eq!(bench.holder("k"), None);

        let asked =
            |ran: &&Ran| asks(ran) && ran.args.iter().any(|arg| token_of(arg) == Some(&token));
        let before = sent(&monitor, "k").iter().filter(asked).count();
        bench.proxy.release_held();
        eventually_async(ms(5000), "the late request arrives", async || {
            sent(&monitor, "k").iter().filter(asked).count() > before
        })
        .await;
        bench.until_free("k", ms(10_000)).await;
        let guard = bench.other.lock("k").acquire().await.unwrap();
        guard.release().await.unwrap();
    }

    macro_rules! for_each_request {
        ($($name:ident: fencing $fencing:literal;)*) => {
            $(
                mod $name {
                    use super::*;

                    #[tokio::test]
                    async fn behind_another_grant_it_changes_nothing() {
                        check_found_busy($fencing).await;
                    }

                    #[tokio::test]
                    async fn what_it_takes_is_taken_back() {
                        check_taken_back($fencing).await;
                    }

                    #[tokio::test]
                    async fn what_it_takes_after_the_clean_up_expires() {
                        check_expires($fencing).await;
                    }

                    #[tokio::test]
                    async fn behind_the_release_of_its_retry_it_is_taken_back() {
                        check_behind_the_release($fencing).await;
                    }
                }
            )*
        };
    }

    for_each_request! {
        set: fencing false;
        script: fencing true;
    }
}

/// One fault at each request of a hold, of each kind.
mod whole_cycle {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Request {
        Acquire,
        Renew,
        Release,
    }

    fn script(request: Request) -> &'static str {
        match request {
            Request::Acquire => ACQUIRE,
            Request::Renew => RENEW,
            Request::Release => RELEASE,
        }
    }

    /// The body ends when a renewal has come through that was sent after the fault.
    #[distributed_lock(key = "k", ttl = "10s", renew = "200ms", wait = "20s", pool = pool, guard = guard)]
    async fn hold(pool: &LockPool, trap: &Trap, awaited: bool) -> Result<(), LockError> {
        if awaited {
            eventually_async(ms(5000), "the fault", async || trap.sprung()).await;
        }
        let until = now_ns() + u64::try_from(guard.valid_for().as_nanos()).unwrap();
        eventually_async(ms(10_000), "a renewal", async || {
            now_ns() + u64::try_from(guard.valid_for().as_nanos()).unwrap() > until + 100_000_000
        })
        .await;
        guard.verify().await
    }

    async fn check(request: Request, action: Action) {
        let is_release = request == Request::Release;
        let bench =
            Bench::with(if is_release { LONG_REQUEST_TIMEOUT } else { REQUEST_TIMEOUT }).await;
        let monitor = Monitor::start(&bench.server);
        let matches = move |command: &Command| {
            command.mentions("k") && command.arg(1) == sha(script(request))
        };
        let trap = bench.proxy.on_next(matches, action);
        hold(&bench.pool, &trap, request == Request::Renew).await.unwrap();
        assert!(trap.sprung());
        assert_eq!(bench.holder("k"), None, "released before the caller goes on");
        assert_eq!(owners(&monitor, "k").len(), 1, "{:#?}", sent(&monitor, "k"));

        let guard = bench.other.lock("k").ttl(LONG).acquire().await.unwrap();
        bench.proxy.release_held();
        let arrived = |ran: &&Ran| ran.args[1] == sha(script(request));
        eventually_async(ms(5000), "what was held arrives", async || {
            let by_us = sent(&monitor, "k").iter().filter(arrived).count();
            action != Action::HoldRequest || by_us >= 2
        })
        .await;
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
        let report = bench.pool.shutdown(ms(10_000)).await;
        assert_eq!((report.abandoned, bench.holder("k")), (0, None));
    }

    macro_rules! each {
        ($($name:ident: $request:ident $action:ident;)*) => {
            $(
                #[tokio::test]
                async fn $name() {
                    check(Request::$request, Action::$action).await;
                }
            )*
        };
    }

    each! {
        an_acquire_without_a_reply: Acquire DropReply;
        an_acquire_with_a_late_reply: Acquire HoldReply;
        an_acquire_with_a_cut_reply: Acquire CutBeforeReply;
        a_late_acquire: Acquire HoldRequest;
        an_acquire_cut_off: Acquire CutBeforeForward;
        a_renewal_without_a_reply: Renew DropReply;
        a_renewal_with_a_late_reply: Renew HoldReply;
        a_renewal_with_a_cut_reply: Renew CutBeforeReply;
        a_late_renewal: Renew HoldRequest;
        a_renewal_cut_off: Renew CutBeforeForward;
        a_release_without_a_reply: Release DropReply;
        a_release_with_a_late_reply: Release HoldReply;
        a_release_with_a_cut_reply: Release CutBeforeReply;
        a_late_release: Release HoldRequest;
        a_release_cut_off: Release CutBeforeForward;
    }

    /// The release of a guard succeeds: a try with a lost reply has freed the lock.
    #[tokio::test]
    async fn a_release_with_a_lost_reply_is_ok() {
        for action in [Action::DropReply, Action::CutBeforeReply] {
            let bench = Bench::with(LONG_REQUEST_TIMEOUT).await;
            let guard = bench.pool.lock("k").ttl(LONG).acquire().await.unwrap();
            let trap = bench.on_next("k", action);
            guard.release().await.unwrap();
            assert!(trap.sprung());
            assert_eq!(bench.holder("k"), None);
        }
    }
}

/// One fault at each request of a stepwise acquire of two keys; another owner holds the second one.
mod during_a_stepwise_acquire {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Request {
        /// For `a` alone, which is free.
        First,
        /// For `b` alone, in its wait queue.
        Second,
        /// For both, behind the grants of both.
        Both,
        /// The renewal of `a`.
        Renewal,
    }

    impl Request {
        fn is(self, command: &Command) -> bool {
            let mentions = (command.mentions("a"), command.mentions("b"));
            let renews = command.mentions(&sha(RENEW)) || command.mentions(RENEW);
            match self {
                Self::First => mentions == (true, false) && !renews,
                Self::Second => mentions == (false, true),
                Self::Both => mentions == (true, true),
                Self::Renewal => mentions == (true, false) && renews,
            }
        }
    }

    fn in_line(bench: &Bench, key: &str) -> String {
        bench.server.cli(&["ZCARD", &format!("{key}:lock_runtime:line")])
    }

    /// Runs up to the fault; returns the guard of `b`, if it is still held.
    async fn run_into(
        bench: &Bench,
        request: Request,
        action: Action,
    ) -> (JoinHandle<Result<LockGuard, LockError>>, Option<LockGuard>) {
        let mut held = Some(bench.other.lock("b").ttl(LONG).acquire().await.unwrap());
        let set = || bench.proxy.on_next(move |command| request.is(command), action);
        let mut trap = None;
        if request != Request::Both {
            trap = Some(set());
        }
        let ttl = if request == Request::Renewal { ms(900) } else { LONG };
        let acquiring = bench.pool.lock_all(["a", "b"]).ttl(ttl).wait(ms(20_000)).acquire();
        let waiting = tokio::spawn(acquiring);
        if request == Request::Both {
            eventually_async(ms(5_000), "it is queued", async || in_line(bench, "b") == "1").await;
            trap = Some(set());
            held.take().unwrap().release().await.unwrap();
        }
        let trap = trap.unwrap();
        eventually_async(ms(5_000), "the fault", async || trap.sprung()).await;
        (waiting, held)
    }

    async fn check_goes_on(request: Request, action: Action) {
        let bench = Bench::new().await;
        let (waiting, held) = run_into(&bench, request, action).await;
        if let Some(held) = held {
            eventually_async(ms(5_000), "it has the first key", async || {
                bench.holder("a").is_some_and(|holder| !holder.is_empty())
            })
            .await;
            held.release().await.unwrap();
        }
        let guard = waiting.await.unwrap().unwrap();
        guard.verify().await.unwrap();
        assert!(bench.other.lock("a").try_acquire().await.unwrap().is_none());
        assert!(bench.other.lock("b").try_acquire().await.unwrap().is_none());
        bench.proxy.release_held();
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
        until_nothing_is_left(&bench.server).await;
    }

    async fn check_given_up(request: Request, action: Action) {
        let bench = Bench::new().await;
        let (waiting, held) = run_into(&bench, request, action).await;
        waiting.abort();
        drop(waiting.await);
        bench.proxy.release_held();
        if let Some(held) = held {
            eventually_async(ms(6_000), "the wait queue is empty", async || {
                in_line(&bench, "b") == "0"
            })
            .await;
            held.release().await.unwrap();
        }
        until_nothing_is_left(&bench.server).await;
        for key in ["a", "b"] {
            let guard = bench.other.lock(key).acquire().await.unwrap();
            guard.release().await.unwrap();
        }
    }

    /// All its requests were answered, so nothing is ambiguous.
    #[tokio::test]
    async fn a_key_and_a_position_are_given_back_after_an_outage() {
        let bench = Bench::new().await;
        let held = bench.other.lock("b").ttl(LONG).acquire().await.unwrap();
        let monitor = Monitor::start(&bench.server);
        let acquiring = bench.pool.lock_all(["a", "b"]).ttl(LONG).wait(ms(20_000)).acquire();
        let waiting = tokio::spawn(acquiring);
        let claims = || {
            let of_b = |ran: &&Ran| !ran.args.iter().any(|arg| arg == "a");
            sent(&monitor, "b").iter().filter(of_b).count()
        };
        // The second one asks for notifications. Its answer is in front of that to the next request.
        eventually_async(ms(5_000), "it is queued", async || claims() >= 2).await;
        bench.pool.health().await.unwrap();
        assert!(bench.holder("a").is_some());
        bench.proxy.refuse(true);
        bench.proxy.cut();
        waiting.abort();
        drop(waiting.await);
        // The undo has failed several times by then.
        sleep(ms(1_500)).await;
        bench.proxy.refuse(false);
        bench.until_free("a", ms(6_000)).await;
        let is_empty = async || in_line(&bench, "b") == "0";
        eventually_async(ms(6_000), "the wait queue is empty", is_empty).await;
        held.release().await.unwrap();
        until_nothing_is_left(&bench.server).await;
    }

    macro_rules! for_each_fault {
        ($($name:ident: $request:ident $action:ident;)*) => {
            $(
                mod $name {
                    use super::*;

                    #[tokio::test]
                    async fn both_keys_are_had() {
                        check_goes_on(Request::$request, Action::$action).await;
                    }

                    #[tokio::test]
                    async fn an_acquire_abandoned_then_leaves_nothing() {
                        check_given_up(Request::$request, Action::$action).await;
                    }
                }
            )*
        };
    }

    for_each_fault! {
        the_first_without_a_reply: First DropReply;
        the_first_with_a_late_reply: First HoldReply;
        the_first_with_a_cut_reply: First CutBeforeReply;
        the_first_late: First HoldRequest;
        the_first_cut_off: First CutBeforeForward;
        the_second_without_a_reply: Second DropReply;
        the_second_with_a_late_reply: Second HoldReply;
        the_second_with_a_cut_reply: Second CutBeforeReply;
        the_second_late: Second HoldRequest;
        the_second_cut_off: Second CutBeforeForward;
        both_without_a_reply: Both DropReply;
        both_with_a_late_reply: Both HoldReply;
        both_with_a_cut_reply: Both CutBeforeReply;
        both_late: Both HoldRequest;
        both_cut_off: Both CutBeforeForward;
        a_renewal_without_a_reply: Renewal DropReply;
        a_late_renewal: Renewal HoldRequest;
        a_renewal_cut_off: Renewal CutBeforeForward;
    }
}

mod late_grant {
    use super::*;

    #[tokio::test]
    async fn a_grant_whose_reply_comes_after_the_ttl_is_an_error() {
        for fencing in [false, true] {
            let server = server();
            let proxy = FaultProxy::start(&server);
            // A request timeout longer than the lease.
            let pool =
                LockPool::builder(proxy.url()).request_timeout(ms(5000)).connect().await.unwrap();
            let ttl = ms(400);
            let trap = proxy.on_next(|command| command.mentions("k"), Action::HoldReply);
            let asked = now_ns();
            let request = pool.lock("k").ttl(ttl).fencing(fencing).try_acquire();
            let request = tokio::spawn(request);
            eventually_async(ms(5000), "the grant", async || trap.sprung()).await;
            eventually_async(ms(5000), "the end of the ttl", async || {
                Duration::from_nanos(now_ns() - asked) > ttl
            })
            .await;
            proxy.release_held();
            assert!(request.await.unwrap().unwrap_err().is_backend());
            eventually(ttl + ms(5000), "nothing is left", || server.cli(&["EXISTS", "k"]) == "0");
            let guard = pool.lock("k").acquire().await.unwrap();
            guard.release().await.unwrap();
        }
    }

    /// The grant waits for its caller, which blocks its thread.
    #[tokio::test(flavor = "current_thread")]
    async fn a_grant_that_runs_out_before_its_caller_sees_it_is_an_error() {
        let server = RedisServer::start();
        let pool = LockPool::connect(&server.url()).await.unwrap();
        // The look at the grant must fall into it.
        let ttl = ms(1000);
        let request = tokio::spawn(pool.lock("k").ttl(ttl).renew(false).acquire());
        tokio::task::yield_now().await;
        eventually(ms(5000), "the grant", || server.cli(&["EXISTS", "k"]) == "1");
        std::thread::sleep(ttl);
        assert!(request.await.unwrap().unwrap_err().is_lost());
        eventually(ttl + ms(5000), "nothing is left", || server.cli(&["EXISTS", "k"]) == "0");
    }
}

/// A process that is stopped for twice the ttl during a hold.
#[tokio::test]
async fn a_frozen_holder_finds_its_lease_lost_when_it_resumes() {
    let server = RedisServer::start();
    let dir = tempfile::tempdir().unwrap();
    // The process takes a stall of this length for the freeze.
    let ttl = ms(2000);
    let program = env!("CARGO_BIN_EXE_frozen-holder");
    let holder = Worker::start(program, &[&server.url(), dir.path().to_str().unwrap(), "2000"]);
    holder.wait_for_line(ms(10_000), |line| line == "holding");
    // Renewals have begun.
    sleep(ttl / 2).await;
    let frozen_at = now_ns();
    holder.pause();

    let pool = LockPool::connect(&server.url()).await.unwrap();
    let recorder = Recorder::create(dir.path(), "other").unwrap();
    let mut takers = JoinSet::new();
    for key in ["guard", "body"] {
        let asked = now_ns();
        let guard = pool.lock(key).ttl(LONG).wait(ms(20_000)).acquire().await.unwrap();
        let fence = guard.fence().map(lock_runtime::Fence::get);
        let grant = recorder.granted(key, 0, asked, || guard.valid_for(), fence);
        takers.spawn(async move { (grant, guard) });
    }
    let taken = takers.join_all().await;
    let frozen_for = Duration::from_nanos(now_ns() - frozen_at);
    sleep((2 * ttl).saturating_sub(frozen_for)).await;
    holder.resume();

    let first = holder.wait_for_line(ms(10_000), |line| line.starts_with("first check"));
    assert_eq!(first, "first check: false");
    let ended = holder.wait_for_line(ms(10_000), |line| line.starts_with("body: "));
    assert_eq!(ended, "body: Lost");
    assert!(holder.wait_for_exit(ms(10_000)).success(), "{:#?}", holder.stderr());
    let polled = holder.stdout().iter().any(|line| line.contains("polled after"));
    assert!(!polled, "{:#?}", holder.stdout());
    for (grant, guard) in taken {
        guard.verify().await.unwrap();
        recorder.release(grant);
        guard.release().await.unwrap();
    }

    let history = History::read(dir.path()).unwrap();
    assert_eq!(history.grants().len(), 4);
    history.assert_safe();
    assert_eq!(
        history.naive_overlaps().len(),
        2,
        "without validity the lock would have been shared"
    );
}
