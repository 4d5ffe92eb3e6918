//! Connections on the runtimes of callers.
//!
//! A request from a tokio runtime travels over a connection with its I/O task on that runtime, so that it wakes no other
//! thread. Requests that must outlive or outrun a caller, and all pushes, stay on the connection of the driver.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::runtime::{self, Handle};

use crate::backend::redis::conn::link_io::LinkIo;
use crate::backend::redis::diagnostics::Info;
use crate::backend::redis::net::io_task::IoTask;
use crate::base::clock::{Instant, TwoClocks};
use crate::base::mutex::{Mutex, MutexGuard};
use crate::exec::foreground::{Foreground, ForegroundPlace};

/// The connections on the runtimes of callers, beside one connection of the driver. They end with that connection.
#[derive(Default)]
pub(super) struct Foregrounds(Vec<(runtime::Id, CallerState)>);

enum CallerState {
    /// Requests of this runtime are counted. A program that locks a few times needs no further connection.
    Counting { requests: u32, since: TwoClocks },
    /// `pause` is the pause after a failure.
    Opening { pause: Duration },
    Up {
        link: ForegroundLink,
        requests: Foreground,
        since: Instant,
        used_at: Instant,
        pause: Duration,
    },
    /// No connection is opened before this moment.
    Down { until: Instant, pause: Duration },
}

/// Runtimes without an I/O driver. None is tried twice, whatever pool it uses.
static UNFIT: Mutex<Vec<runtime::Id>> = Mutex::new(Vec::new());

fn unfit() -> MutexGuard<'static, Vec<runtime::Id>> {
    UNFIT.lock()
}

/// How the opening of a connection has ended.
pub(super) enum OpenOutcome {
    Link(ForegroundLink),
    Failed,
    /// It has panicked, as tokio does on a runtime without an I/O driver.
    Panicked,
}

impl OpenOutcome {
    /// The outcome of an opening that has made `link`, or is dropped without a link.
    pub(super) fn new(link: Option<ForegroundLink>) -> Self {
        match link {
            Some(link) => Self::Link(link),
            None if std::thread::panicking() => Self::Panicked,
            None => Self::Failed,
        }
    }

    pub(super) fn link(self) -> Option<ForegroundLink> {
        match self {
            Self::Link(link) => Some(link),
            Self::Failed | Self::Panicked => None,
        }
    }
}

/// An open connection on the runtime of a caller. Dropping it closes the connection.
pub(super) struct ForegroundLink {
    pub(super) io: Arc<LinkIo>,
    pub(super) _task: IoTask,
}

/// What to do with the requests of a runtime.
#[derive(Debug)]
pub(super) enum Advice {
    Use(ForegroundPlace),
    /// The caller of [`Foregrounds::advice`] opens a connection. The driver's connection serves meanwhile.
    Open,
    UseDriver,
}

/// Whether two connections lead to the same process, by its `run_id`. False if the user may not read that.
pub(super) async fn are_of_one_server(one: &LinkIo, other: &LinkIo) -> bool {
    let run_id = async |io: &LinkIo| {
        let mut info = redis::cmd("INFO");
        let answer = io.send(info.arg("server")).await;
        Info::of(&answer.and_then(Value::extract_error)).run_id().map(str::to_owned)
    };
    let (one, other) = tokio::join!(run_id(one), run_id(other));
    one.is_some() && one == other
}

impl Foregrounds {
    const REQUESTS_BEFORE: u32 = 32;
    /// The pause after a failure. It doubles with each further failure.
    const PAUSE: Duration = Duration::from_secs(1);
    const LONGEST_PAUSE: Duration = Duration::from_secs(10 * 60);
    /// After this time a connection that ends is a new failure.
    const STEADY: Duration = Duration::from_secs(60);
    /// The server may have closed a connection of a runtime that has not polled it for this long.
    const IDLE: Duration = Duration::from_secs(10);
    /// For at most this number of runtimes, connections are open or requests are counted.
    const MOST: usize = 64;

    /// Counts a request from `caller`, the runtime of this thread.
    pub(super) fn advice(&mut self, caller: &Handle, now: Instant) -> Advice {
        let id = caller.id();
        let Some((_, state)) = self.0.iter_mut().find(|(runtime, _)| *runtime == id) else {
            self.insert(id);
            return Advice::UseDriver;
        };
        match state {
            CallerState::Up { link, requests, used_at, .. } if !link.io.has_ended() => {
                let idle_for = now.since(std::mem::replace(used_at, now));
                if idle_for < Self::IDLE {
                    return Advice::Use(requests.begin());
                }
            }
            CallerState::Up { since, pause, .. } => {
                // A runtime that is often blocked would have its requests repeated by the driver each time.
                let is_steady = now.since(*since) >= Self::STEADY;
                let pause = if is_steady { Self::PAUSE } else { Self::longer(*pause) };
                *state = CallerState::Down { until: now + pause, pause };
            }
            CallerState::Counting { requests, since } => {
                *requests += 1;
                if *requests >= Self::REQUESTS_BEFORE
                    && !unfit().contains(&id)
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
                *state = CallerState::Opening { pause: Self::longer(*pause) };
                return Advice::Open;
            }
            CallerState::Opening { .. } | CallerState::Down { .. } => {}
        }
        Advice::UseDriver
    }

    fn longer(pause: Duration) -> Duration {
        pause.saturating_mul(2).min(Self::LONGEST_PAUSE)
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

    /// The opening of a connection for the runtime `caller` has ended. Returns a link that is not needed.
    pub(super) fn opened(
        &mut self,
        caller: runtime::Id,
        opened: OpenOutcome,
        now: Instant,
    ) -> Option<ForegroundLink> {
        if let OpenOutcome::Panicked = opened {
            let mut unfit = unfit();
            if unfit.len() >= Self::MOST {
                unfit.remove(0);
            }
            unfit.push(caller);
        }
        let mut states = self.0.iter_mut();
        let Some((_, state)) = states.find(|(runtime, _)| *runtime == caller) else {
            return opened.link();
        };
        let CallerState::Opening { pause } = *state else { return opened.link() };
        *state = match opened {
            OpenOutcome::Link(link) => {
                let requests = Foreground::default();
                CallerState::Up { link, requests, since: now, used_at: now, pause }
            }
            OpenOutcome::Failed => CallerState::Down { until: now + pause, pause },
            OpenOutcome::Panicked => CallerState::Counting { requests: 0, since: TwoClocks::now() },
        };
        None
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Builder;

    use super::*;

    /// Whether the advice for one of the next `requests` of `caller`, made at `now`, is to open a connection.
    fn is_told_to_open(
        foregrounds: &mut Foregrounds,
        caller: &Handle,
        requests: u32,
        now: Instant,
    ) -> bool {
        (0..requests).any(|_| matches!(foregrounds.advice(caller, now), Advice::Open))
    }

    #[test]
    fn a_failed_opening_is_repeated_and_a_panic_is_not() {
        // Without a paused clock, and without I/O.
        let runtime = Builder::new_current_thread().build().unwrap();
        let caller = runtime.handle().clone();
        let mut foregrounds = Foregrounds::default();
        let mut now = Instant::ORIGIN;
        let mut told = false;
        while !told {
            // The two clocks are compared over a millisecond of real time.
            told = is_told_to_open(&mut foregrounds, &caller, Foregrounds::REQUESTS_BEFORE, now);
        }
        let mut pause = Foregrounds::PAUSE;
        for _ in 0..20 {
            assert!(foregrounds.opened(caller.id(), OpenOutcome::Failed, now).is_none());
            let early = now + (pause - Duration::from_millis(1));
            assert!(!is_told_to_open(&mut foregrounds, &caller, 100, early));
            now = now + pause;
            assert!(is_told_to_open(&mut foregrounds, &caller, 1, now));
            assert!(!is_told_to_open(&mut foregrounds, &caller, 100, now), "one at a time");
            pause = (pause * 2).min(Foregrounds::LONGEST_PAUSE);
        }
        assert!(foregrounds.opened(caller.id(), OpenOutcome::Panicked, now).is_none());
        now = now + Foregrounds::LONGEST_PAUSE * 10;
        assert!(!is_told_to_open(&mut foregrounds, &caller, 100, now));
    }
}
