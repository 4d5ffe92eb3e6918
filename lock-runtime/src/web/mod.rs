//! Locks of HTTP handlers and routes: responses for errors, a `tower` layer, an actix-web middleware, a page for operators.
//!
//! The features are `axum`, `actix` and `tower`; see [`guide::web`](crate::guide::web).

#[cfg(feature = "actix")]
mod actix;
#[cfg(feature = "axum")]
mod axum;
mod body_lock;
#[cfg(feature = "tower")]
mod layer;
#[cfg(feature = "tower")]
mod locked_body;
#[cfg(feature = "actix")]
mod locked_message_body;
#[cfg(any(feature = "actix", feature = "axum"))]
mod locks_page;
#[cfg(any(feature = "actix", feature = "axum"))]
mod path_template;
mod response;
mod route_lock;

#[cfg(feature = "actix")]
pub use actix::{LockMiddleware, LockedService, serve_actix};
#[cfg(feature = "tower")]
pub use layer::{LockLayer, LockService};
#[cfg(feature = "tower")]
pub use locked_body::LockedBody;
#[cfg(feature = "actix")]
pub use locked_message_body::LockedMessageBody;
#[cfg(any(feature = "actix", feature = "axum"))]
pub use locks_page::{LocksPage, PageRequest};
