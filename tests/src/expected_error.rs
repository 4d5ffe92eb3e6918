//! The required content of an error, for every reply of the store: its kind, the place, the cause and a remedy, but no
//! secret. An error comes in time and without a panic.

use std::error::Error;
use std::future::Future;
use std::sync::{Mutex, Once};
use std::thread;
use std::time::Duration;

use lock_runtime::{ErrorKind, LockError, LockPool, PoolBuilder};

use crate::eventually_async;
use crate::logs::Logs;
use crate::server::{Config, RedisServer};

/// A password that must not be shown anywhere.
pub const CANARY: &str = "c4n4ry-0f-th3-c0alm1ne";
/// The requested lock.
pub const KEY: &str = "order:7";
/// The default request timeout.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// The default connect timeout.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// What a busy machine may add to any time limit.
pub const NOISE: Duration = Duration::from_secs(2);

/// The required content of an error.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedError<'a> {
    /// The kind of the error.
    pub kind: ErrorKind,
    /// The pool that it names.
    pub pool: Option<&'a str>,
    /// The key that it names.
    pub template: Option<&'a str>,
}

impl<'a> ExpectedError<'a> {
    /// Of this kind; it names neither pool nor key.
    pub fn of(kind: ErrorKind) -> Self {
        Self { kind, pool: None, template: None }
    }

    /// By the store of this pool, about [`KEY`].
    pub fn by(pool: &'a str) -> Self {
        Self { kind: ErrorKind::Backend, pool: Some(pool), template: Some(KEY) }
    }

    /// Checks all of it, and that the text contains each of `says`.
    ///
    /// # Panics
    ///
    /// With the text, if something is missing or shown that must not be.
    #[track_caller]
    pub fn check(self, case: &str, error: &LockError, says: &[&str]) {
        let text = error.to_string();
        let case = case.replace(CANARY, "<password>");
        println!("{case}\n    {text}");
        assert_eq!(error.kind(), self.kind, "{case}: {text}");
        assert_eq!(error.pool(), self.pool, "{case}: {text}");
        assert_eq!(error.template(), self.template, "{case}: {text}");
        for place in [self.pool, self.template].into_iter().flatten().filter(|it| !it.is_empty()) {
            assert!(text.contains(&format!("`{place}`")), "{case}: {text}: where?");
        }
        for words in says {
            assert!(text.contains(words), "{case}: {text}: {words}?");
        }
        let remedy = text.rsplit_once("; ").map(|(_, remedy)| remedy);
        assert!(remedy.is_some_and(|remedy| remedy.len() > 20), "{case}: {text}: what to do?");
        assert!(!text.contains(['\n', '\r']), "{case}: {text:?}");
        unshown(&case, &chain(error));
        unlogged(&case);
        assert_eq!(*PANICS.lock().unwrap(), [""; 0], "{case}");
    }
}

/// Checks the kind of an error, that its text contains each of `texts`, and that it shows no password.
///
/// # Panics
///
/// With the text, if something is missing or shown that must not be.
#[track_caller]
pub fn says(case: &str, error: &LockError, kind: ErrorKind, texts: &[&str]) {
    let text = error.to_string();
    unshown(case, &chain(error));
    println!("{case}\n    {text}");
    assert_eq!(error.kind(), kind, "{case}: {text}");
    for expected in texts {
        assert!(text.contains(expected), "{case}: `{expected}` is missing in: {text}");
    }
}

/// All texts of an error and of its causes.
pub fn chain(error: &LockError) -> String {
    let mut shown = format!("{error} {error:?} {error:#?}");
    let mut cause: Option<&dyn Error> = error.source();
    while let Some(error) = cause {
        shown.push_str(&format!(" {error} {error:?} {error:#?}"));
        cause = error.source();
    }
    shown
}

/// Checks that `text` shows no password.
///
/// # Panics
///
/// With the line that does.
#[track_caller]
pub fn unshown(what: &str, text: &str) {
    // The password is not repeated in the failure either.
    let line = text.lines().find(|line| line.contains(CANARY));
    assert_eq!(line.map(|line| line.replace(CANARY, "<PASSWORD>")), None, "{what}");
}

/// Checks that no event since the last check, of any test, shows a password.
#[track_caller]
fn unlogged(what: &str) {
    static CHECKED: Mutex<usize> = Mutex::new(0);
    let new = {
        let mut checked = CHECKED.lock().unwrap();
        let (new, end) = Logs::global().since(*checked);
        *checked = end;
        new
    };
    unshown(what, &new);
}

/// Panics of the driver, which its tasks catch, without planned panics of tests.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn watch_for_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let planned = info.location().is_some_and(|place| place.file().starts_with("tests/"));
            if thread::current().name() == Some("lock-driver") && !planned {
                PANICS.lock().unwrap().push(info.to_string());
            }
            default(info);
        }));
    });
}

/// A server with the password [`CANARY`].
pub fn with_password() -> Config {
    RedisServer::builder().password(CANARY)
}

/// A connected pool of this name.
///
/// # Panics
///
/// When it does not connect or the name is taken.
pub async fn installed(name: &str, builder: PoolBuilder) -> LockPool {
    watch_for_panics();
    Logs::global();
    let pool = builder.connect().await.unwrap();
    lock_runtime::install(name, pool.clone()).unwrap();
    pool
}

/// `CONFIG SET`.
///
/// # Panics
///
/// When the server does not take it.
#[track_caller]
pub fn set(server: &RedisServer, name: &str, value: &str) {
    assert_eq!(server.cli(&["CONFIG", "SET", name, value]), "OK");
}

/// Checks that the same pool serves, at once or soon.
///
/// # Panics
///
/// When it does not.
pub async fn works(pool: &LockPool) {
    eventually_async(Duration::from_secs(20), "the pool serves again", async || {
        let served = pool.lock("order:works").acquire().await;
        served.is_ok()
    })
    .await;
    for fencing in [true, false] {
        let request = pool.lock(KEY).fencing(fencing).wait(Duration::from_secs(20));
        let guard = request.acquire().await.unwrap();
        assert_eq!(guard.fence().is_some(), fencing);
        guard.release().await.unwrap();
    }
}

/// The outcome of `work`, within `limit`.
///
/// # Panics
///
/// When it does not.
pub async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> T {
    watch_for_panics();
    let outcome = tokio::time::timeout(limit + NOISE, work).await;
    outcome.unwrap_or_else(|_| panic!("not within {limit:?}"))
}
