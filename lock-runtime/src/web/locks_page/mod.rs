//! A page with the locks of this process, for axum and actix-web.

#[cfg(feature = "actix")]
mod actix;
mod assets;
#[cfg(feature = "axum")]
mod axum;
mod events;
mod html;
mod operator;
mod query;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use crate::api::named_pools;
use crate::api::pool::LockPool;
use crate::base::clock::{Clock, Instant};
use crate::base::error::LockError;
use crate::base::mutex::Mutex;
use crate::base::owner_tag::OwnerTag;
use crate::lock::snapshot::Snapshot;
use crate::web::locks_page::html::{Document, Forced, Lookup};
use crate::web::locks_page::operator::Authorization;
use crate::web::locks_page::query::Query;

pub use crate::web::locks_page::operator::PageRequest;

/// A page that shows the locks of this process, and those of any process for a key that is looked up.
///
/// It lists what [`snapshot`](LockPool::snapshot) returns: held locks with function, fence, time and number of waits, and
/// the keys that tasks wait for. A form looks up one key in the store with [`inspect`](LockPool::inspect). The page follows
/// changes within a second through server-sent events, and works without JavaScript too. With a hundred thousand locks the
/// changes come later, because the search for them takes at most a tenth of the time of a thread. It changes nothing, except for
/// operators of [`allow_release`](Self::allow_release).
///
/// Scripts and styles are separate files, so the page works under the strict content policy that it is sent with. All its
/// links are relative to the last segment of its path: a proxy may change the segments before it.
///
/// **Keys are shown in full, and a looked-up key is part of the URL.** Mount it where only operators have access: behind
/// the authentication of the service, or on a listener that is not public.
///
/// ```
/// # #[cfg(feature = "axum")] {
/// use lock_runtime::web::LocksPage;
///
/// let routes: axum::Router = axum::Router::new().nest("/locks", LocksPage::new().into_router());
/// # }
/// ```
///
/// With actix-web: `App::new().service(LocksPage::new().into_scope("/locks"))`.
#[derive(Clone, Debug, Default)]
#[must_use = "it is mounted by `into_router` or `into_scope`"]
pub struct LocksPage {
    /// Empty for all installed pools.
    pools: Vec<LockPool>,
    authorization: Option<Authorization>,
    last: Arc<Mutex<Option<Fingerprint>>>,
}

/// A number that changes with what is held and waited for, and not with time alone. There is one for all open pages.
#[derive(Clone, Copy, Debug)]
struct Fingerprint {
    /// It is good enough until then.
    stands_until: Instant,
    /// How long a page may show it: times change.
    shown_for: Duration,
    /// `None` if nothing is held or waited for.
    number: Option<u64>,
}

/// How long a fingerprint is good enough. One that takes long is taken for a tenth of the time, because it blocks a thread
/// of the server.
const FINGERPRINT_AGE: Duration = Duration::from_millis(200);

/// Times on the page are at most this old while anything is held or waited for, unless the locks are very many.
const OLDEST: Duration = Duration::from_secs(1);

/// The stream of changes.
const EVENTS: &str = "events";

const HTML: &str = "text/html; charset=utf-8";
/// The longest form, in bytes.
const LONGEST_FORM: usize = 16 * 1024;

const TEXT: &str = "text/plain; charset=utf-8";
const EVENT_STREAM: &str = "text/event-stream";

/// The answer to a form that is refused.
const REFUSED: &str = "This request may not release locks: it was not sent by an operator, or came from a page of another site.\n";

/// The headers of every response of the page.
const HEADERS: [(&str, &str); 5] = [
    ("cache-control", "no-store, no-transform"),
    // A proxy passes events on as they come.
    ("x-accel-buffering", "no"),
    // With `no-referrer` a form of the page would have no origin. No other site gets the URL, which may have a key.
    ("referrer-policy", "same-origin"),
    ("x-content-type-options", "nosniff"),
    (
        "content-security-policy",
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; form-action 'self'; \
         base-uri 'none'; frame-ancestors 'self'; require-trusted-types-for 'script'",
    ),
];

impl LocksPage {
    /// A page of all installed pools: those of [`init`](crate::init()) and [`install`](crate::install()).
    pub fn new() -> Self {
        Self::default()
    }

    /// Shows this pool, and others that are added the same way, in place of the installed ones.
    pub fn pool(mut self, pool: &LockPool) -> Self {
        self.pools.push(pool.clone());
        // A clone may show other pools.
        self.last = Arc::default();
        self
    }

    /// Lets operators take a lock from its holder, with [`force_release`](LockPool::force_release). After the lookup of a
    /// key that is held, the page has a button for it. The button names the owner and the pool that are shown: a later
    /// owner keeps the lock. Within a process the lock may have passed to another task, which then loses it.
    ///
    /// `authorize` is called with each request for the page. It returns the name of the operator, or `None` for a request
    /// that may only read. It must not block. The event `released by force` has the name in its field `by`. Forms that a
    /// browser sends for pages of other sites are refused before the call. A proxy in front has to leave the header `host`
    /// unchanged.
    ///
    /// ```
    /// use lock_runtime::web::LocksPage;
    ///
    /// /// Inserted by the authentication of the service.
    /// #[derive(Clone)]
    /// struct User {
    ///     name: String,
    ///     may_release: bool,
    /// }
    ///
    /// let page = LocksPage::new().allow_release(|request| {
    ///     request.extension::<User>().filter(|user| user.may_release).map(|user| user.name)
    /// });
    /// # drop(page);
    /// ```
    pub fn allow_release(
        mut self,
        authorize: impl Fn(&PageRequest<'_>) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        self.authorization = Some(Authorization(Arc::new(authorize)));
        self
    }

    /// The name of the operator that sends this request.
    fn operator(&self, request: PageRequest<'_>) -> Option<String> {
        self.authorization.as_ref().and_then(|authorization| (authorization.0)(&request))
    }

    /// The operator that sends this form; `None` if it has to be refused.
    fn sender(&self, request: PageRequest<'_>) -> Option<String> {
        // Another site must not call the application in the name of its visitor.
        if request.is_of_this_site() { self.operator(request) } else { None }
    }

    fn pools(&self) -> Vec<LockPool> {
        let mut pools = if self.pools.is_empty() { named_pools::all() } else { self.pools.clone() };
        pools.sort_by_key(|pool| pool.core().name().clone());
        pools
    }

    fn snapshots(&self) -> Vec<Snapshot> {
        self.pools().iter().map(LockPool::snapshot).collect()
    }

    /// The page, for a request to `path` with this query.
    async fn html(&self, path: &str, query: Option<&str>, may_release: bool) -> String {
        let query = Query::parse(query.unwrap_or_default());
        let index = query.pool.unwrap_or_default();
        let lookup = match (query.key.filter(|key| !key.is_empty()), self.pool_at(index)) {
            (None, _) => Lookup::None,
            (Some(_), None) => Lookup::NoPool,
            (Some(key), Some(pool)) => look_up(&pool, index, key, may_release, None).await,
        };
        self.document(path, lookup)
    }

    /// Takes the lock of the key in the query from the owner in `form`. Returns the page, like [`html`](Self::html), with
    /// the outcome.
    async fn release(&self, path: &str, query: Option<&str>, form: &str, operator: &str) -> String {
        let Query { pool: index, key, .. } = Query::parse(query.unwrap_or_default());
        let (index, key) = (index.unwrap_or_default(), key.unwrap_or_default());
        let Query { owner, pool_name, .. } = Query::parse(form);
        let (owner, pool_name) = (owner.unwrap_or_default(), pool_name.unwrap_or_default());
        // Another pool may be at this index by now.
        let is_named = |pool: &LockPool| **pool.core().name() == *pool_name;
        let Some(pool) = self.pool_at(index).filter(is_named) else {
            return self.document(path, Lookup::NoPool);
        };
        let forced = match release_from(&pool, &key, &owner, operator).await {
            Ok(true) => Forced::Released,
            Ok(false) => Forced::NotHeld,
            Err(error) => Forced::Failed(error),
        };
        self.document(path, look_up(&pool, index, key, true, Some(forced)).await)
    }

    fn document(&self, path: &str, lookup: Lookup) -> String {
        let folder = path.rsplit('/').next().unwrap_or_default();
        Document { folder, snapshots: &self.snapshots(), lookup }.to_string()
    }

    fn pool_at(&self, index: usize) -> Option<LockPool> {
        self.pools().into_iter().nth(index)
    }

    fn fingerprint(&self) -> Fingerprint {
        let mut last = self.last.lock();
        let now = Clock::Boot.now();
        let recent = last.filter(|last| now < last.stands_until);
        *last.insert(recent.unwrap_or_else(|| {
            let number = fingerprint(&self.snapshots());
            let took = Clock::Boot.now().since(now);
            Fingerprint::new(now, took, number)
        }))
    }
}

impl Fingerprint {
    /// A fingerprint that was begun at `now` and took this time.
    fn new(now: Instant, took: Duration, number: Option<u64>) -> Self {
        let pause = took.saturating_mul(10);
        let stands_until = now + FINGERPRINT_AGE.max(pause);
        Self { stands_until, shown_for: OLDEST.max(pause), number }
    }
}

/// What the store says about `key`. `index` is that of the pool on the page.
async fn look_up(
    pool: &LockPool,
    index: usize,
    key: String,
    may_release: bool,
    forced: Option<Forced>,
) -> Lookup {
    let answer = Box::new(pool.inspect(key.as_str()).await);
    let may_release = may_release.then(|| pool.core().name().clone());
    Lookup::Answer { index, key, answer, may_release, forced }
}

/// Takes the lock from its holder. `false` if the holder is not `owner`.
async fn release_from(
    pool: &LockPool,
    key: &str,
    owner: &str,
    operator: &str,
) -> Result<bool, LockError> {
    let holder = pool.inspect(key).await?.holder;
    let is_meant = |tag: &OwnerTag| tag.to_string() == owner;
    match holder.filter(|holder| holder.owner.as_ref().is_some_and(is_meant)) {
        Some(holder) => pool.force_release_by(operator, key, &holder).await,
        None => Ok(false),
    }
}

/// `None` if there is nothing.
fn fingerprint(snapshots: &[Snapshot]) -> Option<u64> {
    let mut hasher = DefaultHasher::new();
    let mut is_empty = true;
    for snapshot in snapshots {
        snapshot.pool.hash(&mut hasher);
        for held in &snapshot.held {
            (&held.keys, held.owner, held.fence, held.waiting, held.lingers).hash(&mut hasher);
            is_empty = false;
        }
        for waited in &snapshot.waiting {
            (&waited.key, waited.waiting).hash(&mut hasher);
            is_empty = false;
        }
    }
    (!is_empty).then(|| hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Within the time for which the first fingerprint is good enough.
    #[tokio::test]
    async fn clones_with_other_pools_have_fingerprints_of_their_own() {
        let held = LockPool::connect("memory://").await.unwrap();
        let idle = LockPool::connect("memory://").await.unwrap();
        let page = LocksPage::new();
        let (of_held, of_idle) = (page.clone().pool(&held), page.pool(&idle));
        let guard = held.lock("k").acquire().await.unwrap();
        assert_eq!(of_idle.fingerprint().number, None);
        assert!(of_held.fingerprint().number.is_some());
        guard.release().await.unwrap();
    }

    #[test]
    fn a_fingerprint_is_taken_for_a_tenth_of_the_time_at_most() {
        let now = Clock::Boot.now();
        let (fast, slow) = (Duration::from_millis(1), Duration::from_millis(300));
        let fingerprint = Fingerprint::new(now, fast, None);
        assert_eq!(fingerprint.stands_until, now + FINGERPRINT_AGE);
        assert_eq!(fingerprint.shown_for, OLDEST);
        let fingerprint = Fingerprint::new(now, slow, None);
        assert_eq!(fingerprint.stands_until, now + slow * 10);
        assert_eq!(fingerprint.shown_for, slow * 10);
    }
}
