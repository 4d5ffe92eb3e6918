//! Connections on the runtimes of callers.
//!
//! A request from a tokio runtime travels over a connection whose I/O task is on that runtime, so that no other thread has to
//! wake up for it. What must outlive or outrun a caller, and all pushes, stay on the connection of the driver.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use tokio::runtime::{self, Handle};

use crate::backend::redis::conn::link_io::LinkIo;
use crate::backend::redis::diagnostics::Info;
use crate::backend::redis::net::io_task::IoTask;
use crate::base::clock::{Instant, TwoClocks};
use crate::exec::foreground::Foreground;

/// The connections on the runtimes of callers, beside one connection of the driver. They end with it.
#[derive(Default)]
pub(super) struct Foregrounds(Vec<(runtime::Id, CallerState)>);

enum CallerState {
    /// Requests of this runtime are counted. A program that locks a few times needs no further connection.
    Counting {
        requests: u32,
        since: TwoClocks,
    },
    Opening,
    Up(ForegroundLink, Arc<Foreground>),
    /// None is opened before this moment.
    Down(Instant),
}

/// An open connection on the runtime of a caller. Dropping it closes the connection.
pub(super) struct ForegroundLink {
    pub(super) io: Arc<LinkIo>,
    pub(super) _task: IoTask,
}

/// What to do with the requests of a runtime.
#[derive(Debug)]
pub(super) enum Advice {
    Use(Arc<Foreground>),
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
    const RETRY_AFTER: Duration = Duration::from_secs(1);

    /// Counts a request from `caller`, the runtime of this thread.
    pub(super) fn advice(&mut self, caller: &Handle, now: Instant) -> Advice {
        let id = caller.id();
        let Some((_, state)) = self.0.iter_mut().find(|(runtime, _)| *runtime == id) else {
            // Runtimes come and go.
            self.0.retain(|(_, it)| !matches!(it, CallerState::Up(link, _) if link.io.has_ended()));
            self.0.push((id, CallerState::Counting { requests: 1, since: TwoClocks::now() }));
            return Advice::UseDriver;
        };
        match state {
            CallerState::Up(link, foreground) if !link.io.has_ended() => {
                return Advice::Use(foreground.clone());
            }
            CallerState::Up(..) => *state = CallerState::Down(now + Self::RETRY_AFTER),
            CallerState::Counting { requests, since } => {
                *requests += 1;
                if *requests >= Self::REQUESTS_BEFORE
                    && let Some(agree) = since.agree()
                {
                    if agree {
                        *state = CallerState::Opening;
                        return Advice::Open;
                    }
                    // A clock that a test has paused would jump while the connection is opened.
                    (*requests, *since) = (1, TwoClocks::now());
                }
            }
            CallerState::Down(until) if now >= *until => {
                *state = CallerState::Opening;
                return Advice::Open;
            }
            CallerState::Opening | CallerState::Down(_) => {}
        }
        Advice::UseDriver
    }

    /// The open connection of the runtime `caller`.
    pub(super) fn of(&self, caller: runtime::Id) -> Option<&Arc<LinkIo>> {
        self.0.iter().find_map(|(runtime, state)| match state {
            CallerState::Up(link, _) if *runtime == caller => Some(&link.io),
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
        let Some((_, state)) = self.0.iter_mut().find(|(id, _)| *id == runtime.id()) else {
            return link;
        };
        *state = match link {
            Some(link) => CallerState::Up(link, Foreground::new(runtime.clone())),
            None => CallerState::Down(now + Self::RETRY_AFTER),
        };
        None
    }
}
