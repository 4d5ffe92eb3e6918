//! Threads and timers: where futures run, when they run, and what they tell the program's log.

pub(crate) mod batcher;
pub(crate) mod driver;
pub(crate) mod driver_answer;
pub(crate) mod event_thread;
pub(crate) mod events;
// Of stores with connections.
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
pub(crate) mod foreground;
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
pub(crate) mod inline_task;
pub(crate) mod panic_boundary;
pub(crate) mod round_trip;
pub(crate) mod throttle;
pub(crate) mod timer_queue;
