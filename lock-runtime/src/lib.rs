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
//! A watchdog renews the lease from a thread of its own while the lock is held. The lock is released
//! on every way out: awaited when the body returns, in the background on panic and cancellation.
//!
//! # Features
//!
//! * `macros` (default): the attribute.
//! * `redis` (default): `redis://` URLs.
//! * `rediss`: `rediss://` URLs, TLS by rustls.
//! * `testing`: the conformance suite for backends, and a backend that fails on demand.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod acquire;
pub mod backend;
mod bell;
mod call;
mod climb;
mod clock;
mod deadlines;
mod driver;
mod engine;
mod error;
mod fence;
mod global;
mod guard;
mod handoff;
mod jitter;
mod key;
mod lease;
mod locked;
mod nesting;
mod observe;
mod options;
mod outbox;
mod outcome;
mod owner;
mod place;
mod pool;
mod pursuit;
mod queue;
mod registry;
mod release;
mod request;
#[cfg(test)]
mod schedules;
mod site;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
mod turn;
mod watchdog;
mod word;

#[cfg(all(doctest, feature = "macros", feature = "testing"))]
#[doc = include_str!("../../README.md")]
mod readme {}

#[doc(hidden)]
pub mod __private;

pub use error::{ErrorKind, LockError};
pub use fence::Fence;
pub use global::{init, init_from_env, install, pool, shutdown, shutdown_on_signal};
pub use guard::{LockGuard, Lost};
pub use key::{Key, KeyPart};
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
/// | argument | syntax | default |
/// |---|---|---|
/// | `key` | `"order:<id>"`, or an expression that is `Into<`[`Key`]`>` | required, or `keys` |
/// | `keys` | `["acct:<from>", "acct:<to>"]`, or an expression | |
/// | `ttl` | `"5s"` `"1m30s"` `"250ms"`, or a `Duration` expression | the pool's, 30 s |
/// | `wait` | `"0s"` `"2s"` `"forever"`, or an expression | the pool's, 3 s |
/// | `renew` | `true` `false` `"1s"` | `true`, a third of the ttl |
/// | `max_hold`, `min_hold` | duration | none, zero |
/// | `on_conflict` | `"error"` `"skip"` or an async function with the same arguments | `"error"` |
/// | `on_lost` | `"cancel"` `"notify"` | `"cancel"` |
/// | `release` | `"await"` `"background"` | `"await"` |
/// | `on_error` | path or closure `Fn(`[`LockError`]`) -> R` | [`FromLockError`] |
/// | `pool` | `"name"`, or an expression that is a [`LockPool`] | `"default"` |
/// | `guard` | identifier that is a `&`[`LockGuard`] in the body | none |
/// | `when` | bool expression over the arguments | `true` |
/// | `reentrant` | bool | `false` |
/// | `retry_delay`, `retry_count` | duration, number | the pool's |
/// | `name` | text | `module::function` |
/// | `crate` | path | `::lock_runtime` |
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
pub use options::{OnLost, ReleaseMode, Renew, Wait};
pub use outcome::FromLockError;
pub use pool::{Health, LockPool, PoolBuilder, ShutdownReport};
pub use request::LockRequest;
