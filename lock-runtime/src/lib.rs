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
//! * [`init`], [`install`] and [`shutdown`] look after the pools that annotated functions use.
//! * [`LockPool::lock`] is the same without the attribute; it gives a [`LockGuard`].
//! * [`LockError`] says what went wrong, [`Fence`] keeps late writers out.
//! * [`backend::Backend`] is what a store of your own implements.
//!
//! # What is kept
//!
//! A lease is believed until the send time of its last confirmed request plus the ttl, less 1 % and 2 ms
//! of drift, on a clock that counts suspend; no answer is needed to stop believing. An annotated body
//! is told a tenth of the ttl earlier (500 ms at most), by being dropped, and is never polled again.
//! A renewals renews the lease from a thread of its own while the lock is held. The lock is released
//! on every way out: awaited when the body returns, in the background on panic and cancellation.
//!
//! # Features
//!
//! * `macros` (default): the attribute.
//! * `redis` (default): `redis://` URLs.
//! * `rediss`: `rediss://` URLs, TLS by rustls.
//! * `testing`: the conformance suite for backends, and a backend that fails on demand.
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

#[cfg(all(doctest, feature = "macros", feature = "testing"))]
#[doc = include_str!("../../README.md")]
mod readme {}

#[doc(hidden)]
pub mod __private;

pub use api::guard::{LockGuard, Lost};
pub use api::named_pools::{init, init_from_env, install, pool, shutdown, shutdown_on_signal};
pub use api::pool::{Health, LockPool, PoolBuilder};
pub use api::request::LockRequest;
pub use attribute::key_template::KeyPart;
pub use attribute::return_type::FromLockError;
pub use backend::credentials::Credentials;
pub use base::error::{ErrorKind, LockError, Progress};
pub use base::fence::Fence;
pub use base::key::Key;
pub use base::options::{OnLost, ReleaseMode, Renew, Wait};
pub use lock::shutdown::ShutdownReport;
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
/// Works on free functions, methods with any receiver, trait implementations (native and
/// `#[async_trait]`), generic functions, and `fn` that return an `async move` block; above
/// `#[tokio::main]` and `#[tokio::test]`, and beside `#[tracing::instrument]` in either order.
///
/// # Arguments
///
/// | argument | syntax | default | meaning |
/// |---|---|---|---|
/// | `key` | `"order:<id>"`, or an expression that is `Into<`[`Key`]`>` | required, or `keys` | what is locked; rendered once, before the body |
/// | `keys` | `["acct:<from>", "acct:<to>"]`, or an expression | | several keys, all or none; sorted, so that two callers cannot deadlock |
/// | `ttl` | `"5s"` `"1m30s"` `"250ms"`, or a `Duration` expression | the pool's, 30 s | length of the lease: how long a crashed holder blocks the others; no limit on the body |
/// | `wait` | `"0s"` `"2s"` `"forever"`, or an expression | the pool's, 3 s | how long to wait for the lock; `"0s"` is one try |
/// | `renew` | `true` `false` `"1s"` | `true`, a third of the ttl | interval of the renewals; `false` makes the ttl a hard limit on the body |
/// | `max_hold` | duration | none | after this time the lease counts as lost, although it could be renewed |
/// | `min_hold` | duration | `"0s"` | the key stays locked for at least this time, also after the body's end |
/// | `on_conflict` | `"error"` `"skip"` or an async function with the same arguments | `"error"` | what an acquire that did not succeed in time returns |
/// | `on_lost` | `"cancel"` `"notify"` | `"cancel"` | a lost lease drops the body at its next await, or is only visible through the guard |
/// | `release` | `"await"` `"background"` | `"await"` | whether the result waits until the store has freed the lock |
/// | `on_error` | path or closure `Fn(`[`LockError`]`) -> R` | [`FromLockError`] | builds the return value where its type cannot carry a [`LockError`] |
/// | `pool` | `"name"`, or an expression that is a [`LockPool`] | `"default"` | which pool |
/// | `guard` | identifier that is a `&`[`LockGuard`] in the body | none | fence, `is_held()` and `lost()` for the body |
/// | `when` | bool expression over the arguments | `true` | `false`: the body runs without the lock |
/// | `reentrant` | bool | `false` | this task holds the key already: error at once, or pass through |
/// | `retry_delay`, `retry_count` | duration, number | the pool's | polling, where the store cannot notify |
/// | `name` | text | `module::function` | label in events |
/// | `crate` | path | `::lock_runtime` | path of this crate, if it is renamed |
///
/// `reentrant = true` excludes `max_hold`, `min_hold` and a `renew` other than `true`; what else a call that passes
/// through keeps is told at [`LockRequest::reentrant`].
///
/// # Placeholders
///
/// `<path>` where path begins with a name that the parameters bind, or `self`, and goes on with fields
/// (`.id`), tuple fields (`.0`), indices (`[0]`) and methods without arguments (`.name()`). `<<` and `>>`
/// are brackets. Behind a placeholder comes a separator or the end. Values are escaped so that
/// different arguments never give the same key; an empty value is [`ErrorKind::InvalidKey`].
///
/// # Cancel safety
///
/// Dropping the call at any await leaves nothing behind: waiting, it leaves the line and takes back what
/// the store may have granted; in the body, the body is dropped first and then the lock released.
/// The body's locals, and the arguments it mentions, drop before the release; arguments that it does not
/// mention drop after it.
#[cfg(feature = "macros")]
pub use lock_macros::distributed_lock;
