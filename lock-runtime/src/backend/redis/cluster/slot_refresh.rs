//! Keeps the slot map up to date in the background.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{sleep, timeout};

use crate::backend::redis::cluster::seeds::{cluster_slots, first_map, usable_map};
use crate::backend::redis::cluster::servers::Servers;
use crate::backend::redis::net::handshake::PushSink;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::protocol::scripted_server::ScriptedServer;
use crate::backend::redis::slot_map::{Address, SlotRanges};

/// Minimum time between two refreshes.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Interval of refreshes that were not requested, while a server of the map is down.
const INTERVAL_WHILE_DOWN: Duration = Duration::from_millis(300);
/// The same while all servers are up.
const INTERVAL_WHILE_UP: Duration = Duration::from_secs(30);
/// How long one server may take to send the map before the next server is asked too.
const STAGGER: Duration = Duration::from_millis(250);
/// Minimum time between two wake-ups of all waiters. Many slots move one by one.
const RESYNC_INTERVAL: Duration = Duration::from_millis(500);

/// The refresh of the slot map: requests for it, and whether slots have moved.
pub(super) struct SlotRefresh {
    servers: Arc<Servers>,
    requested: Notify,
    /// Whether a slot has moved since all waiters were woken.
    has_moved: AtomicBool,
    /// The masters of the last map.
    masters: watch::Sender<Vec<Address>>,
}

impl SlotRefresh {
    pub(super) fn new(servers: Arc<Servers>) -> Self {
        let masters = watch::Sender::new(servers.slots.masters());
        Self { servers, requested: Notify::new(), has_moved: AtomicBool::new(false), masters }
    }

    /// The masters of the last map. The next reported change is one after this call.
    pub(super) fn masters(&self) -> watch::Receiver<Vec<Address>> {
        self.masters.subscribe()
    }

    /// Requests a refresh soon.
    pub(super) fn request(&self) {
        self.requested.notify_one();
    }

    /// A slot has moved: all waiters are woken soon, after a refresh.
    pub(super) fn note_move(&self) {
        self.has_moved.store(true, Ordering::Relaxed);
        self.request();
    }

    /// Refreshes the map until the task is aborted.
    pub(super) async fn run(self: Arc<Self>) {
        let clock = self.servers.shared.clock;
        let mut woken_at = None;
        for round in 0_usize.. {
            let pause = if self.has_moved.load(Ordering::Relaxed) {
                RESYNC_INTERVAL
            } else if self.servers.are_all_up() {
                INTERVAL_WHILE_UP
            } else {
                INTERVAL_WHILE_DOWN
            };
            tokio::select! {
                () = self.requested.notified() => {}
                () = sleep(pause) => {}
            }
            if let Some(map) = self.fetch(round).await {
                if self.servers.slots.replace(&map) {
                    self.note_move();
                }
                let masters = map.masters();
                self.servers.settle(&masters);
                self.masters.send_if_modified(|former| {
                    let changed = *former != masters;
                    *former = masters;
                    changed
                });
            }
            let now = clock.now();
            let may_wake = woken_at.is_none_or(|woken| now.since(woken) >= RESYNC_INTERVAL);
            if may_wake && self.has_moved.swap(false, Ordering::Relaxed) {
                woken_at = Some(now);
                // The former server of a slot sends its waiters no more messages.
                self.servers.shared.push_handler.resync();
            }
            sleep(MIN_INTERVAL).await;
        }
    }

    /// The map of a connected server, a different one in each round. Otherwise the map of a server in the URL or of a replica.
    async fn fetch(&self, round: usize) -> Option<SlotRanges> {
        let mut up = self.servers.opened();
        up.retain(|(_, server)| server.is_up());
        up.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let count = up.len().max(1);
        up.rotate_left(round % count);
        let limit = self.servers.shared.request_timeout;
        if let Some(map) = timeout(limit, first_answer(up, limit)).await.ok().flatten() {
            return Some(map);
        }
        let replicas = self.servers.slots.replicas();
        let replicas = replicas.iter().map(|address| self.servers.endpoint(address));
        let mut dialers = Vec::new();
        for endpoint in self.servers.seeds.iter().cloned().chain(replicas) {
            dialers.extend(Dialer::new(endpoint).await.ok());
        }
        first_map(dialers, self.servers.shared.limits.connect).await.ok()
    }
}

/// The first map that one of the `servers` sends. Each request continues until its answer, even if another server was faster: a
/// request without an answer counts as the silence of its connection.
async fn first_answer(
    servers: Vec<(Address, Arc<ScriptedServer>)>,
    limit: Duration,
) -> Option<SlotRanges> {
    let (found, mut maps) = mpsc::unbounded_channel();
    let (mut servers, mut found) = (servers.into_iter(), Some(found));
    loop {
        // Without a sender the channel ends with the last answer.
        let next = servers.next();
        found = found.filter(|_| next.is_some());
        if let (Some((address, server)), Some(found)) = (next, found.clone()) {
            tokio::spawn(async move {
                let answer = timeout(limit, server.connection().send(&cluster_slots())).await;
                let map = answer.ok().and_then(Result::ok);
                let _ = found.send(map.and_then(|answer| usable_map(&answer, &address)));
            });
        }
        tokio::select! {
            map = maps.recv() => match map {
                Some(None) => {}
                Some(map) => return map,
                None => return None,
            },
            () = sleep(STAGGER), if found.is_some() => {}
        }
    }
}
