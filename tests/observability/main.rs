//! Events, spans and metrics: their content, that the guide names each, and what they never contain.

#![allow(clippy::disallowed_methods)]

mod documented;
mod events;
mod faulty;
mod grafana;
mod guide;
mod lock_order;
mod lockctl;
mod locks_page;
mod metered;
mod prometheus;
mod seen;
mod sites;
mod spans;
mod subscribers;
