//! Threads and timers: where futures run, when they run, and what they tell the program's log.

pub(crate) mod batcher;
pub(crate) mod driver;
pub(crate) mod event_thread;
pub(crate) mod events;
pub(crate) mod foreground;
pub(crate) mod inline_task;
pub(crate) mod panic_boundary;
pub(crate) mod round_trip;
pub(crate) mod timer_queue;
