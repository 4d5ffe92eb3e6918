//! One file for each scenario.

pub(crate) mod annotated;
pub(crate) mod between;
pub(crate) mod cost;
pub(crate) mod crowd;
pub(crate) mod first_renewal;
pub(crate) mod handoff;
pub(crate) mod held;
pub(crate) mod held_stores;
pub(crate) mod hot;
pub(crate) mod low_load;
pub(crate) mod memory;
pub(crate) mod quorum;
pub(crate) mod stores;
pub(crate) mod uncontended;

use lock_tests::RedisServer;
use lock_tests::monitor::{Caller, Monitor};

/// Runs `work` under `MONITOR`, and returns the number of commands that clients have sent meanwhile.
pub(crate) fn commands_sent(server: &RedisServer, work: impl FnOnce()) -> usize {
    let monitor = Monitor::start(server);
    work();
    monitor.settled().iter().filter(|ran| ran.by != Caller::Script).count()
}
