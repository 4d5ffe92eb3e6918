//! Distributed locks: as an attribute on an async function, or as a guard.
//!
//! ```
//! use lock_runtime::{LockError, distributed_lock};
//!
//! #[distributed_lock(key = "order:<id>", ttl = "5s")]
//! async fn settle(id: u64) -> Result<(), LockError> {
//!     // runs only while the lock is held
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), LockError> {
//! lock_runtime::init("memory://").await?; // or "redis://127.0.0.1:6379"
//! settle(42).await?;
//! # Ok(())
//! # }
//! ```
//!
//! * [`distributed_lock`] is the attribute.
//! * [`init`], [`install`] and [`shutdown`] manage the pools of annotated functions.
//! * [`LockPool::lock`] is the same without the attribute; it returns a [`LockGuard`].
//! * [`LockError`] names what went wrong, and [`Fence`] keeps late writes out.
//! * [`backend::Backend`] is the trait of a custom store.
//! * [`guide`] has chapters on stores, guarantees, Redis, waiting, testing, web frameworks, jobs and consumers, events and
//!   metrics, the program `lockctl`, costs, and migration.
//!
//! # Guarantees
//!
//! A lease is valid until the send time of its last confirmed request plus the ttl, less 1 % and 2 ms of drift. The clock
//! counts suspended time, and stopping needs no reply. An annotated body is dropped a tenth of the ttl earlier (at most
//! 500 ms), and is never polled again.
//!
//! Renewals run on a thread of their own while the lock is held. Every exit releases the lock: awaited when the body
//! returns, in the background on panic and cancellation. [`guide::guarantees`] lists what can lead to two holders.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `macros` | yes | the attribute |
//! | `redis` | yes | `redis://`, `redis+sentinel://`, `redis+cluster://` and `redlock://` URLs |
//! | `rediss` | | `rediss://` URLs: Redis over TLS, with rustls |
//! | `postgres` | | `postgres://` URLs, and `LockGuard::pin_sql` of that store |
//! | `postgres-tls` | | `sslmode=require` in `postgres://` URLs |
//! | `mysql` | | `mysql://` URLs: MySQL and MariaDB |
//! | `mysql-tls` | | `ssl-mode=required` in `mysql://` URLs |
//! | `etcd` | | `etcd://` URLs |
//! | `etcd-tls` | | `etcds://` URLs: etcd over TLS |
//! | `zookeeper` | | `zookeeper://` URLs |
//! | `zookeeper-tls` | | `zookeepers://` URLs: ZooKeeper over TLS |
//! | `axum` | | [`web`]: a [`LockError`] as an axum response, locks on routes, a page that shows the locks; with `tower` |
//! | `actix` | | [`web`]: a [`LockError`] as an actix-web response, a middleware that locks a resource, a page that shows the locks |
//! | `tower` | | [`web`]: a layer that locks a service with the types of the `http` crate |
//! | `serde` | | [`Fence`], [`Snapshot`], [`Inspection`], [`Finding`] and [`Sequencer`] can be serialized |
//! | `metrics` | | metrics of locks and stores, through the facade crate of that name |
//! | `lockctl` | | the program of that name, which shows and manages the locks of a store; with all stores |
//! | `testing` | | pools for tests, the conformance suite for stores, and a store that fails on demand |
#![cfg_attr(docsrs, feature(doc_cfg))]

mod api;
mod attribute;
pub mod backend;
mod base;
mod exec;
mod lease;
mod lock;
#[cfg(test)]
mod model_tests;
mod queue;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(any(feature = "actix", feature = "tower"))]
pub mod web;

#[doc(hidden)]
pub mod __private;

/// Chapters of the guide, one module each.
// The files are only part of the documentation; their examples need the attribute and the testing tools.
#[cfg(all(
    doc,
    any(
        not(doctest),
        all(
            feature = "actix",
            feature = "axum",
            feature = "macros",
            feature = "mysql",
            feature = "postgres",
            feature = "testing"
        )
    )
))]
pub mod guide {
    #[doc = include_str!("../docs/choosing-a-store.md")]
    pub mod choosing_a_store {}
    #[doc = include_str!("../docs/settings.md")]
    pub mod settings {}
    #[doc = include_str!("../docs/guarantees.md")]
    pub mod guarantees {}
    #[doc = include_str!("../docs/redis.md")]
    pub mod redis {}
    #[doc = include_str!("../docs/postgres.md")]
    pub mod postgres {}
    #[doc = include_str!("../docs/mysql.md")]
    pub mod mysql {}
    #[doc = include_str!("../docs/etcd.md")]
    pub mod etcd {}
    #[doc = include_str!("../docs/zookeeper.md")]
    pub mod zookeeper {}
    #[doc = include_str!("../docs/waiting.md")]
    pub mod waiting {}
    #[doc = include_str!("../docs/testing.md")]
    pub mod testing {}
    #[doc = include_str!("../docs/web.md")]
    pub mod web {}
    #[doc = include_str!("../docs/jobs.md")]
    pub mod jobs {}
    #[doc = include_str!("../docs/observability.md")]
    pub mod observability {}
    #[doc = include_str!("../docs/lockctl.md")]
    pub mod lockctl {}
    #[doc = include_str!("../docs/performance.md")]
    pub mod performance {}
    #[doc = include_str!("../docs/migrating.md")]
    pub mod migrating {}

    #[cfg(doctest)]
    #[doc = include_str!("../README.md")]
    mod readme {}
}

pub use api::call_sites::{CallSite, call_sites};
pub use api::guard::{LockGuard, Lost};
pub use api::lock_changes::LockChanges;
pub use api::lock_order::{LockOrderInversion, LockedAt, lock_order_inversions};
pub use api::named_pools::{init, init_from_env, init_with, install, pool, shutdown};
pub use api::pool::{Health, LockPool, PoolBuilder};
pub use api::request::LockRequest;
pub use api::serve::{Served, Stopped, serve, serve_until, shutdown_on_signal};
pub use attribute::key_template::{Encoded, KeyPart};
pub use attribute::return_type::FromLockError;
pub use backend::credentials::Credentials;
pub use base::error::{ErrorKind, LockError, Progress};
pub use base::fence::Fence;
pub use base::fence_gate::{FenceGate, StaleFence};
pub use base::finding::{Finding, Verdict};
pub use base::inspection::{Inspection, LockHolder, WaitingOwner};
pub use base::key::Key;
pub use base::key_pattern::KeyList;
pub use base::lock_order::LockOrder;
pub use base::options::{OnLost, OnOutage, ReleaseMode, Renew, Wait};
pub use base::owner_info::OwnerInfo;
pub use base::owner_tag::OwnerTag;
pub use base::problem::Problem;
pub use base::sequencer::{InvalidSequencer, Sequencer};
pub use base::sql_dialect::SqlDialect;
pub use base::sql_fence_gate::SqlFenceGate;
pub use lock::shutdown::ShutdownReport;
pub use lock::snapshot::{HeldLock, Snapshot, WaitedKey};
/// Runs an async function only while a lock is held.
///
/// ```
/// use lock_runtime::{LockError, distributed_lock};
///
/// struct Order { id: u64 }
///
/// #[distributed_lock(key = "order:<order.id>", ttl = "5s", wait = "2s")]
/// async fn ship(order: &Order) -> Result<(), LockError> {
///     Ok(())
/// }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// #     lock_runtime::init("memory://").await.unwrap();
/// #     ship(&Order { id: 1 }).await.unwrap();
/// # }
/// ```
///
/// Works on free functions, methods with any receiver, trait implementations (native and `#[async_trait]`), generic
/// functions, and `fn` that return an `async move` block or a `Box::pin` of one. With `pool = expression` it goes
/// above `#[tokio::main]` and `#[tokio::test]`; otherwise lock a function that they call. It goes beside
/// `#[tracing::instrument]` in either order.
///
/// The call keeps the output while the lock is released. Its future is `Send` if the output is too: write
/// `Box<dyn Error + Send + Sync>`, not `Box<dyn Error>`, in a function for `tokio::spawn`.
///
/// # Arguments
///
/// | argument | syntax | default | meaning |
/// |---|---|---|---|
/// | `key` | `"order:<id>"`, or an expression that is `Into<`[`Key`]`>` | required, or `keys` | what is locked; rendered once, before the body |
/// | `keys` | `["acct:<from>", "acct:<to>"]`, or an expression | | all keys or none, at most 128; sorted, so that two callers cannot deadlock |
/// | `ttl` | `"5s"` `"1m30s"` `"250ms"`, or a `Duration` expression | the pool's, 30 s | length of the lease: how long a crashed holder blocks other callers; no limit on the body |
/// | `wait` | `"0s"` `"2s"` `"forever"`, or an expression | the pool's, 3 s | how long to wait for the lock; `"0s"` is one attempt |
/// | `renew` | `true` `false` `"1s"` (2 ms to ttl/2) | `true`, a third of the ttl | interval of the renewals; `false` makes the ttl a hard limit on the body |
/// | `max_hold` | duration | none | no renewal beyond it; the body is cancelled earlier, by a tenth of it or of a shorter ttl, at most 500 ms |
/// | `min_hold` | duration | `"0s"` | the key stays locked for at least this time, even after the body or the process has ended |
/// | `lock_delay` | duration | `"0s"` | a lost lease keeps the key locked for this much longer than its ttl; a release frees it immediately |
/// | `linger` | duration | the pool's, `"0s"` | the lock stays with the process for this long after the body, for its next call; released immediately when another process waits, if the store can tell (not `redlock://`) |
/// | `on_conflict` | `"error"` `"skip"`, or an async function with the same arguments | `"error"` | what the call returns if the lock is held by another owner for the whole of `wait` |
/// | `on_lost` | `"cancel"` `"notify"` | `"cancel"` | a lost lease drops the body at its next await; with `"notify"` the body goes on to its end, and the guard, if there is one, and the event `lost` tell |
/// | `release` | `"await"` `"background"` | `"await"` | whether the result waits until the store has freed the lock |
/// | `on_error` | path or closure `Fn(`[`LockError`]`) -> R`, or a block that ends in one | [`FromLockError`] | builds the return value where its type cannot carry a [`LockError`] |
/// | `pool` | `"name"`, or an expression that is a [`LockPool`] | `"default"` | which pool |
/// | `guard` | identifier that is a `&`[`LockGuard`] in the body | none | fence, `is_held()` and `lost()` for the body |
/// | `when` | bool expression over the arguments | `true` | `false`: the body runs without the lock |
/// | `reentrant` | bool | `false` | whether a call in a body that holds the key passes through, instead of failing immediately |
/// | `retry_delay`, `retry_count` | duration, number | the pool's | the pause between requests where the store cannot notify; a count ends the wait on every store |
/// | `name` | text | `module::function` | label in events |
/// | `crate` | path | `::lock_runtime` | path of this crate, if it is renamed |
///
/// A spawned task cannot borrow the guard. Take what it needs before: `let (fence, lost) = (lock.fence(), lock.lost());`.
///
/// `"skip"` returns the empty value of `()`, `Option<_>`, `Result<(), E>` or `Result<Option<_>, E>`. The first two cannot carry the
/// error of a store that is down, so they need `on_error` too.
///
/// An expression for `key` or `keys` may use `?`: its error is the result of the call, and nothing is locked. Its value is taken as it
/// is: an empty part, such as a header that is missing, is not refused.
///
/// A package that is renamed in `Cargo.toml`, as in `locks = { package = "lock-runtime", .. }`, needs `crate = locks`.
///
/// A fallback is called with the arguments by name, so no parameter may be a pattern such as `Path(id): Path<u64>`.
///
/// `on_error` is evaluated after the body: it can use what the body does not take. A block that ends in a closure is evaluated
/// before the keys, and keeps a copy for the closure: `on_error = { let id = id.clone(); move |error| .. }`.
///
/// `linger` cannot be combined with `keys`, `max_hold`, `min_hold` and `renew = false`. `reentrant = true` cannot be
/// combined with `max_hold`, a `min_hold` or `lock_delay` above zero, and a `renew` other than `true`.
/// [`LockRequest::reentrant`] has the rules for a call that passes through.
///
/// # Placeholders
///
/// A placeholder is `<path>`. The path begins with a name that the parameters bind, or `self`. It goes on with fields
/// (`.id`), tuple fields (`.0`), indices (`[0]`) and methods without arguments (`.name()`). `<<` and `>>`
/// are literal brackets. A placeholder is followed by a separator or the end.
///
/// The value is anything that implements `Display`. Values are escaped so that different arguments never give the same key.
/// An empty value is [`ErrorKind::InvalidKey`].
///
/// # Cancel safety
///
/// A call may be dropped at any await and leaves nothing behind. While it waits, it leaves the wait queue and releases
/// what the store may have granted. In the body, the body is dropped first and then the lock is released.
///
/// The body's locals, and the arguments that it uses, drop before the release. Arguments that it does not use drop after it. So does
/// what a pattern leaves in an argument: `ref name` moves nothing, nor does a field that the pattern does not bind.
///
/// The lock ends with the body. A stream, a future or a lazy iterator that the body returns runs without the lock.
#[cfg(feature = "macros")]
pub use lock_macros::distributed_lock;
