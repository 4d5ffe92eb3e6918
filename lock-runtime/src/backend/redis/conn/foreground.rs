//! Connections on the runtimes of callers.
//!
//! A request from a tokio runtime travels over a connection with its I/O task on that runtime, so that it wakes no other
//! thread. What must outlive or outrun a caller, and all pushes, stay on the connection of the driver.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use tokio::runtime::{self, Handle};

use crate::backend::redis::conn::link_io::LinkIo;
use crate::backend::redis::diagnostics::Info;
use crate::backend::redis::net::io_task::IoTask;
use crate::base::clock::{Instant, TwoClocks};
use crate::exec::foreground::{Foreground, ForegroundRequest};

/// The connections on the runtimes of callers, beside one connection of the driver. They end with it.
#[derive(Default)]
pub(super) struct Foregrounds(Vec<(runtime::Id, CallerState)>);

enum CallerState {
    /// Requests of this runtime are counted. A program that locks a few times needs no further connection.
    Counting {
        requests: u32,
        since: TwoClocks,
    },
    /// `pause` is that after a failure.
    Opening {
        pause: Duration,
    },
    Up {
        link: ForegroundLink,
        requests: Foreground,
        used_at: Instant,
    },
    /// None is opened before this moment.
    Down {
        until: Instant,
        pause: Duration,
    },
}

/// An open connection on the runtime of a caller. Dropping it closes the connection.
pub(super) struct ForegroundLink {
    pub(super) io: Arc<LinkIo>,
    pub(super) _task: IoTask,
}

/// What to do with the requests of a runtime.
#[derive(Debug)]
pub(super) enum Advice {
    Use(ForegroundRequest),
    /// The caller of [`Foregrounds::advice`] opens a connection. The driver's serves meanwhile.
    Open,
    UseDriver,
}

/// Whether two connections lead to the same process, by its `run_id`. False if the user may not read that.
pub(super) async fn are_of_one_server(
    one: &MultiplexedConnection,
    other: &MultiplexedConnection,
) -> bool {
    let run_id = async |mut requests: MultiplexedConnection| {
        let mut info = redis::cmd("INFO");
        let answer = requests.req_packed_command(info.arg("server")).await;
        Info::of(&answer.and_then(Value::extract_error)).run_id().map(str::to_owned)
    };
    let (one, other) = tokio::join!(run_id(one.clone()), run_id(other.clone()));
    one.is_some() && one == other
}

impl Foregrounds {
    const REQUESTS_BEFORE: u32 = 32;
    /// After a failure. It doubles with each further one.
    const PAUSE: Duration = Duration::from_secs(1);
    const LONGEST_PAUSE: Duration = Duration::from_secs(10 * 60);
    /// The server may have closed a connection of a runtime that has not polled it for so long.
    const IDLE: Duration = Duration::from_secs(10);
    /// Of these runtimes, connections are open or counted for.
    const MOST: usize = 64;

    /// Counts a request from `caller`, the runtime of this thread.
    pub(super) fn advice(&mut self, caller: &Handle, now: Instant) -> Advice {
        let id = caller.id();
        let Some((_, state)) = self.0.iter_mut().find(|(runtime, _)| *runtime == id) else {
            self.insert(id);
            return Advice::UseDriver;
        };
        match state {
            CallerState::Up { link, requests, used_at } if !link.io.has_ended() => {
                let idle_for = now.since(std::mem::replace(used_at, now));
                if idle_for < Self::IDLE {
                    return requests.begin().map_or(Advice::UseDriver, Advice::Use);
                }
            }
            CallerState::Up { .. } => {
                *state = CallerState::Down { until: now + Self::PAUSE, pause: Self::PAUSE };
            }
            CallerState::Counting { requests, since } => {
                *requests += 1;
                if *requests >= Self::REQUESTS_BEFORE
                    && let Some(agree) = since.agree()
                {
                    if agree {
                        *state = CallerState::Opening { pause: Self::PAUSE };
                        return Advice::Open;
                    }
                    // A clock that a test has paused would jump while the connection is opened.
                    (*requests, *since) = (1, TwoClocks::now());
                }
            }
            CallerState::Down { until, pause } if now >= *until => {
                let pause = pause.saturating_mul(2).min(Self::LONGEST_PAUSE);
                *state = CallerState::Opening { pause };
                return Advice::Open;
            }
            CallerState::Opening { .. } | CallerState::Down { .. } => {}
        }
        Advice::UseDriver
    }

    /// Begins to count. Runtimes come and go: those without an open connection make room.
    fn insert(&mut self, id: runtime::Id) {
        let is_in_use = |state: &CallerState| match state {
            CallerState::Up { link, .. } => !link.io.has_ended(),
            CallerState::Opening { .. } => true,
            CallerState::Counting { .. } | CallerState::Down { .. } => false,
        };
        if self.0.len() >= Self::MOST {
            self.0.retain(|(_, state)| is_in_use(state));
        }
        if self.0.len() < Self::MOST {
            let counting = CallerState::Counting { requests: 1, since: TwoClocks::now() };
            self.0.push((id, counting));
        }
    }

    /// The open connection of the runtime `caller`.
    pub(super) fn of(&self, caller: runtime::Id) -> Option<&Arc<LinkIo>> {
        self.0.iter().find_map(|(runtime, state)| match state {
            CallerState::Up { link, .. } if *runtime == caller && !link.io.has_ended() => {
                Some(&link.io)
            }
            _ => None,
        })
    }

    /// The connection for `runtime` has been opened, or `None`: it could not be. Returns a link that is not needed.
    pub(super) fn opened(
        &mut self,
        runtime: &Handle,
        link: Option<ForegroundLink>,
        now: Instant,
    ) -> Option<ForegroundLink> {
        let mut states = self.0.iter_mut();
        let Some((_, state)) = states.find(|(id, _)| *id == runtime.id()) else { return link };
        let CallerState::Opening { pause } = *state else { return link };
        *state = match link {
            Some(link) => CallerState::Up { link, requests: Foreground::default(), used_at: now },
            None => CallerState::Down { until: now + pause, pause },
        };
        None
    }
}
