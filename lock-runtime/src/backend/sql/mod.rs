//! What stores on a database have in common: a wait for a connection, requests in batches and their order, names of tables, TLS
//! by URL.

pub(crate) mod claim_queue;
pub(crate) mod encryption;
pub(crate) mod error_text;
pub(crate) mod first_opened;
pub(crate) mod inspected_rows;
pub(crate) mod job;
pub(crate) mod listed_keys;
pub(crate) mod locked_rows;
pub(crate) mod pending_jobs;
pub(crate) mod pin;
pub(crate) mod queued;
pub(crate) mod renewal_queue;
pub(crate) mod reopen;
pub(crate) mod sender;
pub(crate) mod store;
pub(crate) mod stored_info;
pub(crate) mod sweep;
pub(crate) mod tables;
pub(crate) mod url_params;
