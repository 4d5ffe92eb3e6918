//! The settings of a pool by name, and where each of them is set.

/// A setting of a pool.
#[derive(Debug)]
pub(crate) struct PoolSetting {
    /// As in a URL or a variable.
    pub(crate) name: &'static str,
    /// The method of the builder.
    method: &'static str,
    /// What the variable of the default pool is called after `LOCK_`.
    pub(crate) variable: Option<&'static str>,
}

impl PoolSetting {
    const fn new(name: &'static str, variable: Option<&'static str>) -> Self {
        Self { name, method: name, variable }
    }

    /// Where a program sets it. `variable` names one of the pool.
    pub(crate) fn remedy(&self, variable: impl FnOnce(&str) -> String) -> String {
        let by_code = format!("call `PoolBuilder::{}`", self.method);
        match self.variable {
            Some(setting) => format!("set {}, or {by_code}", variable(setting)),
            None => by_code,
        }
    }
}

/// What belongs to the pool, and not to the URL of its store.
pub(crate) const POOL_SETTINGS: [PoolSetting; 18] = [
    PoolSetting { name: "prefix", method: "key_prefix", variable: Some("PREFIX") },
    PoolSetting::new("key_prefix", Some("PREFIX")),
    PoolSetting::new("ttl", Some("TTL")),
    PoolSetting::new("wait", Some("WAIT")),
    PoolSetting::new("request_timeout", Some("REQUEST_TIMEOUT")),
    PoolSetting::new("max_waiters", Some("MAX_WAITERS")),
    PoolSetting::new("on_outage", Some("ON_OUTAGE")),
    PoolSetting::new("owner_info", Some("OWNER_INFO")),
    PoolSetting::new("lock_order", None),
    PoolSetting::new("retry_delay", None),
    PoolSetting::new("retry_count", None),
    PoolSetting::new("first_renewal", None),
    PoolSetting::new("linger", None),
    PoolSetting::new("drift_factor", None),
    PoolSetting::new("local_handoff_limit", None),
    PoolSetting::new("barging_window", None),
    PoolSetting::new("node_timeout", None),
    PoolSetting::new("connection_per_runtime", None),
];

/// A setting of a pool and of a URL.
pub(crate) const CONNECT_TIMEOUT: PoolSetting = PoolSetting::new("connect_timeout", None);
