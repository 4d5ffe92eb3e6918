//! The locks of a Redis Cluster: each key is asked for at the server that has its slot.
//!
//! ```text
//! cluster   which slot, which server; redirections
//!   ├─ slots    the map, kept up by what servers say and by looks in the background
//!   └─ member   one per server ── server ── node
//! ```
//!
//! 1. **No request waits for the map.** It goes where the map says. `MOVED` mends the map and the request goes on
//!    in the same call, `ASK` sends it on once. Anything else that passes by itself is a failure
//!    that the pool repeats; it has the map looked up in the background.
//! 2. **A wrong map is no danger.** A server refuses keys of slots that it does not have, so two servers never keep
//!    the same lock, whatever we believe. Redis Cluster itself may lose a lock when a master dies before its
//!    replica has it; the fence is for that.
//! 3. **All keys of a lock are in one slot**, also its line and its fences, by a tag in front; see `names`.
//! 4. **A divided slot.** While a slot moves some of its keys are at either server, and what needs keys of both is
//!    refused until it is over (`TRYAGAIN`): a claim with a fence or in line, not a plain one, a renewal or a release.
//! 5. **One channel on all servers.** A script that calls somebody counts the listeners of its own server, so each
//!    connection listens. A message comes over every one of them, and counts where the slot is. From 7.0 on each connection
//!    has a channel in its shard besides, which is tried first; see `shard`.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use redis::Cmd;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use crate::backend::BackendConfig;
use crate::backend::redis::conn::push::{Home, Stray};
use crate::backend::redis::conn::shard_channel::Shard;
use crate::backend::redis::keyspace::Names;
use crate::backend::redis::net::handshake::ask_once;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::protocol::scripted::{Household, Server, Unfit, Way, note_calls};
use crate::backend::redis::routing::slots::{self, Address, Map, Slots};
use crate::backend::redis::server_error::{self, Redirect};
use crate::backend::redis::url::Endpoint;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, FailureKind, LeaseRef,
    LeaseStatus, Notifier, Owner, ReleaseOutcome, ReleaseRequest, Warning,
};
use crate::base::error::{ErrorKind, LockError};
use crate::base::jitter;
use crate::base::key::Key;

/// How often one request is sent on before it is a failure.
const MOST_HOPS: usize = 4;

/// The map is not looked up more often.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often it is looked up without being asked for, while a server of it is down and while all are up.
const LOOK_SICK: Duration = Duration::from_millis(300);
const LOOK_WELL: Duration = Duration::from_secs(30);
/// How long one server may take to tell the map before the next is asked.
const LOOK_PATIENCE: Duration = Duration::from_millis(250);
/// All who wait are not woken more often. A move of many slots goes slot by slot.
const WAKE_EVERY: Duration = Duration::from_millis(500);

/// What a server may need for each entry of a great many.
const EACH: Duration = Duration::from_micros(50);

pub(crate) type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

pub(crate) struct Cluster {
    shared: Arc<Shared>,
    /// The tasks of its own.
    tasks: [AbortHandle; 2],
}

struct Shared {
    /// The servers of the URL. They say how to log in, too.
    seeds: Vec<Endpoint>,
    household: Household,
    slots: Arc<Slots>,
    members: Mutex<Members>,
    /// In whose name is probed what may be done.
    probe: Owner,
    /// Has the map looked up.
    look: Notify,
    /// Whether a slot has moved since all who wait were woken.
    has_moved: AtomicBool,
}

enum Members {
    Open(HashMap<Address, Member>),
    Closed,
}

/// A server of the cluster, from the first try to reach it.
struct Member {
    state: watch::Receiver<State>,
    opener: AbortHandle,
}

#[derive(Clone)]
enum State {
    /// Tried for the first time.
    Opening,
    /// Not reached yet, and tried again.
    Failed(BackendError),
    /// Keeps itself up from now on.
    Open(Arc<Server>),
}

impl Drop for Member {
    fn drop(&mut self) {
        self.opener.abort();
    }
}

/// Where an entry goes next.
struct Road {
    /// Its place in the call.
    at: usize,
    slot: u16,
    address: Address,
    way: Way,
}

/// One entry of a call.
pub(crate) trait Entry: Clone + Send + Sync {
    type Outcome: Send;

    /// Whether there is another way for what fails because its keys are at two servers for the moment.
    const MAY_GO_APART: bool = false;

    fn keys(&self) -> &[Key];

    fn ask<'a>(
        server: &'a Server,
        way: Way,
        entries: &'a [Self],
    ) -> Boxed<'a, Vec<Result<Self::Outcome, BackendError>>>;
}

impl Entry for AcquireRequest {
    type Outcome = AcquireOutcome;

    fn keys(&self) -> &[Key] {
        &self.keys
    }

    fn ask<'a>(
        server: &'a Server,
        way: Way,
        claims: &'a [Self],
    ) -> Boxed<'a, Vec<Result<AcquireOutcome, BackendError>>> {
        Box::pin(server.acquire_by(way, claims))
    }
}

impl Entry for ReleaseRequest {
    type Outcome = ReleaseOutcome;

    fn keys(&self) -> &[Key] {
        &self.lease.keys
    }

    fn ask<'a>(
        server: &'a Server,
        way: Way,
        releases: &'a [Self],
    ) -> Boxed<'a, Vec<Result<ReleaseOutcome, BackendError>>> {
        Box::pin(server.release_by(way, releases))
    }
}

/// A lease to be renewed.
impl Entry for LeaseRef {
    type Outcome = LeaseStatus;

    /// Leases share a command, which fails as a whole.
    const MAY_GO_APART: bool = true;

    fn keys(&self) -> &[Key] {
        &self.keys
    }

    fn ask<'a>(
        server: &'a Server,
        way: Way,
        leases: &'a [Self],
    ) -> Boxed<'a, Vec<Result<LeaseStatus, BackendError>>> {
        Box::pin(server.renew_by(way, leases))
    }
}

/// A lease to be looked at.
#[derive(Clone)]
struct Look(LeaseRef);

impl Entry for Look {
    type Outcome = LeaseStatus;

    fn keys(&self) -> &[Key] {
        &self.0.keys
    }

    fn ask<'a>(
        server: &'a Server,
        way: Way,
        looks: &'a [Self],
    ) -> Boxed<'a, Vec<Result<LeaseStatus, BackendError>>> {
        Box::pin(async move {
            let leases: Vec<_> = looks.iter().map(|look| look.0.clone()).collect();
            server.holds_by(way, &leases).await
        })
    }
}

impl Cluster {
    pub(crate) async fn connect(url: &str, config: BackendConfig<'_>) -> Result<Self, LockError> {
        let (cluster, opened) = Self::begin(seeds(url)?, config).await?;
        opened.map_err(LockError::backend)?;
        Ok(cluster)
    }

    /// Connects, and goes on trying if that fails. The second is how the first try went.
    pub(crate) async fn begin(
        seeds: Vec<Endpoint>,
        config: BackendConfig<'_>,
    ) -> Result<(Self, Result<(), BackendError>), LockError> {
        let seeds: Result<Vec<_>, _> = seeds.into_iter().map(|seed| seed.of_pool(config)).collect();
        let seeds = seeds?;
        let config =
            config.with_connect_timeout(seeds.first().and_then(|seed| seed.connect_timeout));
        let (household, strays) = Household::new(Names::of_cluster(config.key_prefix), config)?;
        let mut dialers = Vec::with_capacity(seeds.len());
        for seed in &seeds {
            dialers.push(Dialer::new(seed.clone()).await?);
        }
        let first = first_map(dialers, config.connect_timeout).await;
        // Without a map nobody has any slot, and it is looked up until there is one.
        let map = first.as_ref().map_or_else(|_| Map::default(), Map::clone);
        let shared = Arc::new(Shared {
            seeds,
            household,
            slots: Arc::new(Slots::new(&map)),
            members: Mutex::new(Members::Open(HashMap::new())),
            probe: Owner::random()?,
            look: Notify::new(),
            has_moved: AtomicBool::new(false),
        });
        let opened = match first {
            Ok(map) => shared.open_all(&map.masters()).await,
            Err(error) => Err(error),
        };
        let looking = tokio::spawn(shared.clone().keep_looking()).abort_handle();
        let passing = tokio::spawn(shared.clone().pass_strays_on(strays)).abort_handle();
        Ok((Self { shared, tasks: [looking, passing] }, opened))
    }

    /// Sends each entry to where its slot is. One outcome each, in order.
    pub(crate) async fn serve<E: Entry>(
        &self,
        entries: &[E],
    ) -> Vec<Result<E::Outcome, BackendError>> {
        self.shared.serve(entries).await
    }

    /// A server for each of the slots.
    pub(crate) async fn servers(&self) -> Result<Vec<Arc<Server>>, BackendError> {
        let shared = &self.shared;
        let unserved = shared.slots.unserved();
        if unserved > 0 {
            shared.look.notify_one();
            return Err(no_server(format!("nobody has {unserved} slots of the Redis Cluster")));
        }
        let masters = shared.slots.masters();
        let open = |address| -> Boxed<'_, _> { Box::pin(shared.server(address)) };
        let opened = together(masters.iter().map(open).collect(), None).await;
        opened
            .into_iter()
            .flatten()
            .map(|server| server.map_err(|error| shared.noted(error)))
            .collect()
    }

    /// What it calls its servers, masters and replicas; nothing before the first map.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.shared.slots.ids()
    }

    /// What is wrong with connections that work.
    pub(crate) fn warning(&self) -> Option<Warning> {
        self.shared.seeds.iter().find_map(Endpoint::warning)
    }

    /// The server that has `keys`, as far as is known.
    pub(crate) fn server_of(&self, keys: &[Key]) -> Option<Address> {
        self.shared.slots.owner(slots::common(keys).ok()?)
    }

    /// Whether its servers tell of changes, those that can be reached.
    pub(crate) fn tells(&self) -> bool {
        let mut open = self.shared.open_members().into_iter().filter_map(|(_, server)| server);
        open.any(|server| server.is_up() && server.tells())
    }

    pub(crate) fn end(&self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        let members = std::mem::replace(&mut *self.shared.members(), Members::Closed);
        if let Members::Open(members) = members {
            members.into_values().filter_map(|member| member.server()).for_each(|it| it.end());
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl Cluster {
    /// Whether the server keeps wait queues for this pool.
    fn has_lines(&self) -> bool {
        match &*self.shared.members() {
            Members::Open(members) => {
                members.values().any(|member| match &*member.state.borrow() {
                    State::Open(server) => server.capabilities().wait_queue,
                    State::Opening | State::Failed(_) => false,
                })
            }
            Members::Closed => false,
        }
    }
}

impl Backend for Cluster {
    fn subscribe(&self, notifier: Notifier) {
        self.shared.household.ears.subscribe(notifier);
    }

    async fn acquire(
        &self,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        // Known to the end of the whole call: an answer may wait here for that of another server.
        let is_new =
            |claim: &&AcquireRequest| claim.attempt == 0 && claim.enqueue && claim.keys.len() == 1;
        let new = claims.iter().filter(is_new).map(|claim| claim.owner).collect();
        let newcomers = self.shared.household.ears.expect(new);
        let mut attempts = self.shared.serve(claims).await;
        note_calls(&newcomers, claims, &mut attempts);
        attempts
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        self.shared.serve(leases).await
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        self.shared.serve(releases).await
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let mut held = self.shared.serve(&[Look(lease.clone())]).await;
        held.pop().unwrap_or(Ok(LeaseStatus::NotHeld))
    }

    /// Of any server: the users are the same on all of them.
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.wait_queue = self.has_lines();
        capabilities
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        let servers = self.servers().await?;
        let mut asked: Vec<Boxed<'_, Result<Vec<Warning>, BackendError>>> = Vec::new();
        for server in &servers {
            asked.push(Box::pin(server.health()));
        }
        let mut warnings = Vec::new();
        for answer in together(asked, None).await.into_iter().flatten() {
            for warning in answer.map_err(|error| self.shared.noted(error))? {
                if !warnings.contains(&warning) {
                    warnings.push(warning);
                }
            }
        }
        Ok(warnings)
    }

    async fn close(&self) {
        self.end();
    }
}

impl Shared {
    /// Sends each entry to where its slot is. One outcome each, in order.
    async fn serve<E: Entry>(&self, entries: &[E]) -> Vec<Result<E::Outcome, BackendError>> {
        let mut outcomes: Vec<_> = entries.iter().map(|_| None).collect();
        let mut roads = Vec::with_capacity(entries.len());
        for (at, entry) in entries.iter().enumerate() {
            match self.road(at, entry.keys()) {
                Ok(road) => roads.push(road),
                Err(error) => outcomes[at] = Some(Err(error)),
            }
        }
        let mut hops = 0;
        let count = u32::try_from(entries.len()).unwrap_or(u32::MAX);
        while !roads.is_empty() {
            // Leases of one slot that lie together are renewed together.
            roads.sort_by(|a, b| (a.way, &a.address, a.slot).cmp(&(b.way, &b.address, b.slot)));
            let groups: Vec<_> =
                roads.chunk_by(|a, b| (a.way, &a.address) == (b.way, &b.address)).collect();
            let calls = groups.iter().map(|group| self.ask(entries, group)).collect();
            // One that does not answer must not take the others' answers along when the caller gives up.
            let lag = self.household.request_timeout / 8 + EACH * count;
            let others_wait = outcomes.iter().any(Option::is_some);
            let answers = together(calls, Some(Lag { lag, others_wait })).await;
            let mut sent_on = Vec::new();
            for (group, answer) in groups.into_iter().zip(answers) {
                let mut answer = answer.unwrap_or_default().into_iter();
                for road in group {
                    let outcome = answer.next().unwrap_or_else(|| Err(slow(&road.address)));
                    outcomes[road.at] = match outcome {
                        Ok(outcome) => Some(Ok(outcome)),
                        Err(error) => {
                            let next = self.redirected::<E>(road, &error);
                            match next.filter(|_| hops < MOST_HOPS) {
                                Some(next) => {
                                    sent_on.push(next);
                                    None
                                }
                                None => Some(Err(self.noted(error))),
                            }
                        }
                    };
                }
            }
            roads = sent_on;
            hops += 1;
        }
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|| Err(restless()))).collect()
    }

    fn road(&self, at: usize, keys: &[Key]) -> Result<Road, BackendError> {
        let slot = slots::common(keys).map_err(|(one, other)| divided(one, other))?;
        let Some(address) = self.slots.owner(slot) else {
            self.look.notify_one();
            return Err(no_server(format!("nobody has slot {slot} of the Redis Cluster")));
        };
        Ok(Road { at, slot, address, way: Way::Straight })
    }

    /// Sends the entries of `group` to their server, in one write.
    fn ask<'a, E: Entry>(
        &'a self,
        entries: &'a [E],
        group: &'a [Road],
    ) -> Boxed<'a, Vec<Result<E::Outcome, BackendError>>> {
        Box::pin(async move {
            let Some(Road { address, way, .. }) = group.first() else { return Vec::new() };
            let server = match self.server(address).await {
                Ok(server) => server,
                Err(error) => return group.iter().map(|_| Err(error.clone())).collect(),
            };
            if entries.len() == 1 {
                return E::ask(&server, *way, entries).await;
            }
            let mine: Vec<_> = group.iter().map(|road| entries[road.at].clone()).collect();
            E::ask(&server, *way, &mine).await
        })
    }

    /// Where an entry goes that was refused at `road` with `error`, if there is a better way.
    fn redirected<E: Entry>(&self, road: &Road, error: &BackendError) -> Option<Road> {
        let Road { at, slot, .. } = *road;
        match server_error::redirect(error) {
            Some(Redirect::Moved(to)) => {
                let address = Address::told(to, &road.address)?;
                self.note_move(self.slots.patch(slot, &address));
                Some(Road { at, slot, address, way: Way::Straight })
            }
            Some(Redirect::Ask(to)) => {
                let address = Address::told(to, &road.address)?;
                Some(Road { at, slot, address, way: Way::Asking })
            }
            None if E::MAY_GO_APART
                && road.way == Way::Straight
                && server_error::is_divided(error) =>
            {
                Some(Road { at, slot, address: road.address.clone(), way: Way::Apart })
            }
            None => None,
        }
    }

    fn note_move(&self, moved: bool) {
        if moved {
            self.has_moved.store(true, Ordering::Relaxed);
            self.look.notify_one();
        }
    }

    /// The error for the caller. Unless somebody has to do something about it, the map may be wrong.
    fn noted(&self, error: BackendError) -> BackendError {
        let error = if server_error::redirect(&error).is_some() { restless() } else { error };
        if error.kind() != FailureKind::Rejected {
            self.look.notify_one();
        }
        error
    }

    /// The server at `address`. Waits for the first try to reach it and no longer.
    async fn server(&self, address: &Address) -> Result<Arc<Server>, BackendError> {
        let mut state = self.member(address)?;
        let tried = state.wait_for(|state| !matches!(state, State::Opening)).await;
        match tried.as_deref() {
            Ok(State::Open(server)) => Ok(server.clone()),
            Ok(State::Failed(error)) => Err(error.clone()),
            Ok(State::Opening) | Err(_) => Err(closed()),
        }
    }

    fn member(&self, address: &Address) -> Result<watch::Receiver<State>, BackendError> {
        let mut members = self.members();
        let Members::Open(members) = &mut *members else { return Err(closed()) };
        if let Some(member) = members.get(address) {
            return Ok(member.state.clone());
        }
        let member = self.open(address);
        let state = member.state.clone();
        members.insert(address.clone(), member);
        Ok(state)
    }

    fn open(&self, address: &Address) -> Member {
        let endpoint = self.endpoint(address);
        let (household, probe) = (self.household.clone(), self.probe);
        let (slots, shard) = (self.slots.clone(), Shard::default());
        let home = Home::Node { slots, address: address.clone(), shard };
        let (tell, state) = watch::channel(State::Opening);
        let opening = async move {
            let mut pause = Duration::from_millis(5);
            for round in 0_usize.. {
                let opened = async {
                    let dialer = Dialer::new(endpoint.clone()).await;
                    let dialer = dialer
                        .map_err(|error| {
                            BackendError::new(FailureKind::Rejected, error.to_string())
                        })?
                        .of_a_shard();
                    let opened = Server::of(&household, dialer, home.clone(), probe).await;
                    opened.map_err(Unfit::into_error)
                };
                match opened.await {
                    Ok(server) => {
                        tell.send_replace(State::Open(Arc::new(server)));
                        if round > 0 {
                            household.ears.has_missed_something();
                        }
                        return;
                    }
                    Err(error) => tell.send_replace(State::Failed(error)),
                };
                sleep(jitter::below(pause)).await;
                pause = (pause * 2).min(Duration::from_millis(500));
            }
        };
        Member { state, opener: tokio::spawn(opening).abort_handle() }
    }

    /// How to reach `address`: as the servers of the URL.
    fn endpoint(&self, address: &Address) -> Endpoint {
        let Address { host, port } = address;
        Endpoint { host: host.to_string(), port: *port, ..self.seeds[0].clone() }
    }

    /// Opens connections to all of `masters`; to one at least, and to no one that refuses.
    async fn open_all(&self, masters: &[Address]) -> Result<(), BackendError> {
        let open = |address| -> Boxed<'_, _> { Box::pin(self.server(address)) };
        let opened = together(masters.iter().map(open).collect(), None).await;
        let mut is_open = false;
        let mut failure = None;
        for opened in opened.into_iter().flatten() {
            match opened {
                Ok(_) => is_open = true,
                Err(error) if error.kind() == FailureKind::Rejected => return Err(error),
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) if !is_open => Err(error),
            _ => Ok(()),
        }
    }

    /// Keeps the map up for the life of the cluster.
    async fn keep_looking(self: Arc<Self>) {
        let clock = self.household.clock;
        let mut woken_at = None;
        for round in 0_usize.. {
            let moved = self.has_moved.load(Ordering::Relaxed);
            let pause = match (moved, self.is_well()) {
                (true, _) => WAKE_EVERY,
                (false, true) => LOOK_WELL,
                (false, false) => LOOK_SICK,
            };
            tokio::select! {
                () = self.look.notified() => {}
                () = sleep(pause) => {}
            }
            if let Some(map) = self.look_up(round).await {
                let masters = map.masters();
                self.note_move(self.slots.replace(&map));
                self.settle(&masters);
            }
            let now = clock.now();
            let may_wake = woken_at.is_none_or(|woken| now.since(woken) >= WAKE_EVERY);
            if may_wake && self.has_moved.swap(false, Ordering::Relaxed) {
                woken_at = Some(now);
                // Those that wait at the server that had the slot are told nothing more there.
                self.household.ears.has_missed_something();
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// What a server says that is up, each time another; or else one of the URL, or a replica.
    async fn look_up(&self, round: usize) -> Option<Map> {
        let mut up: Vec<_> = self
            .open_members()
            .into_iter()
            .filter(|(_, server)| server.as_ref().is_some_and(|server| server.is_up()))
            .collect();
        up.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let count = up.len().max(1);
        up.rotate_left(round % count);
        for (address, server) in up {
            let Some(server) = server else { continue };
            let answer = timeout(LOOK_PATIENCE, server.send(&cluster_slots())).await;
            if let Ok(Ok(answer)) = answer
                && let Some(map) = useful(Map::parse(&answer, &address))
            {
                return Some(map);
            }
        }
        let replicas = self.slots.replicas();
        let replicas = replicas.iter().map(|address| self.endpoint(address));
        let mut dialers = Vec::new();
        for endpoint in self.seeds.iter().cloned().chain(replicas) {
            dialers.extend(Dialer::new(endpoint).await.ok());
        }
        first_map(dialers, self.household.limits.connect).await.ok()
    }

    /// Opens connections to masters that are new, and drops those that are gone. One that is up stays:
    /// a slot may be on the way to it.
    fn settle(&self, masters: &[Address]) {
        for master in masters {
            let _ = self.member(master);
        }
        if let Members::Open(members) = &mut *self.members() {
            members.retain(|address, member| masters.contains(address) || member.is_up());
        }
    }

    fn is_well(&self) -> bool {
        let masters = self.slots.masters();
        let open = self.open_members();
        let is_up = |server: Option<&Arc<Server>>| server.is_some_and(|server| server.is_up());
        masters.iter().all(|address| {
            is_up(open.iter().find(|(open, _)| open == address).and_then(|(_, it)| it.as_ref()))
        }) && self.slots.unserved() == 0
    }

    fn open_members(&self) -> Vec<(Address, Option<Arc<Server>>)> {
        match &*self.members() {
            Members::Open(members) => {
                members.iter().map(|(address, member)| (address.clone(), member.server())).collect()
            }
            Members::Closed => Vec::new(),
        }
    }

    /// Passes on what was granted to owners that had given up by then.
    async fn pass_strays_on(self: Arc<Self>, mut strays: mpsc::UnboundedReceiver<Stray>) {
        // Makes the shortest grant for whoever is next.
        const UNKNOWN: Duration = Duration::from_secs(1);
        while let Some(Stray { key, owner }) = strays.recv().await {
            let lease = LeaseRef {
                keys: Arc::new([Key::from(key)]),
                owner,
                ttl: UNKNOWN,
                min_hold: Duration::ZERO,
            };
            let (free_after, barging_window) = (Duration::ZERO, Duration::ZERO);
            let release = ReleaseRequest { lease, free_after, successor: None, barging_window };
            // Should it fail, the grant runs out by itself.
            let _ = timeout(self.household.request_timeout, self.serve(&[release])).await;
        }
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member {
    fn server(&self) -> Option<Arc<Server>> {
        match &*self.state.borrow() {
            State::Open(server) => Some(server.clone()),
            State::Opening | State::Failed(_) => None,
        }
    }

    fn is_up(&self) -> bool {
        self.server().is_some_and(|server| server.is_up())
    }
}

/// How long calls may last that others wait for.
#[derive(Clone, Copy)]
pub(crate) struct Lag {
    lag: Duration,
    /// Whether somebody waits from the beginning, or only when the first call is done.
    others_wait: bool,
}

/// Runs `calls` side by side. Those that lag behind the first too much are given up.
pub(crate) async fn together<T>(calls: Vec<Boxed<'_, T>>, lag: Option<Lag>) -> Vec<Option<T>> {
    let mut done: Vec<_> = calls.iter().map(|_| None).collect();
    let mut calls: Vec<_> = calls.into_iter().map(Some).collect();
    let mut limit: Option<Pin<Box<tokio::time::Sleep>>> = None;
    poll_fn(|cx| {
        let mut open = 0;
        for (place, done) in calls.iter_mut().zip(&mut done) {
            let Some(call) = place else { continue };
            match call.as_mut().poll(cx) {
                Poll::Ready(outcome) => {
                    *done = Some(outcome);
                    *place = None;
                }
                Poll::Pending => open += 1,
            }
        }
        if open == 0 {
            return Poll::Ready(());
        }
        match lag {
            Some(Lag { lag, others_wait }) if others_wait || open < calls.len() => {
                limit.get_or_insert_with(|| Box::pin(sleep(lag))).as_mut().poll(cx)
            }
            _ => Poll::Pending,
        }
    })
    .await;
    done
}

/// The first map that anybody tells.
async fn first_map(dialers: Vec<Dialer>, limit: Duration) -> Result<Map, BackendError> {
    let mut asked = JoinSet::new();
    for dialer in dialers {
        asked.spawn(async move {
            let Endpoint { host, port, .. } = dialer.endpoint();
            let address = Address::new(host, *port);
            let answer = ask_once(&dialer, limit, &cluster_slots()).await?;
            useful(Map::parse(&answer, &address)).ok_or_else(|| {
                no_server(format!("Redis at {address} knows of no server that has slots"))
            })
        });
    }
    let mut failure: Option<BackendError> = None;
    while let Some(answer) = asked.join_next().await {
        match answer {
            Ok(Ok(map)) => return Ok(map),
            // One that somebody has to do something about says most.
            Ok(Err(error)) if error.kind() == FailureKind::Rejected => failure = Some(error),
            Ok(Err(error)) => {
                failure.get_or_insert(error);
            }
            Err(_) => {}
        }
    }
    Err(failure.unwrap_or_else(closed))
}

fn useful(map: Option<Map>) -> Option<Map> {
    map.filter(|map| !map.masters().is_empty())
}

fn cluster_slots() -> Cmd {
    let mut slots = redis::cmd("CLUSTER");
    slots.arg("SLOTS");
    slots
}

/// The servers of `redis+cluster://[user:password@]host[:port],host...[?ca=...]`.
pub(crate) fn seeds(url: &str) -> Result<Vec<Endpoint>, LockError> {
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    let scheme = scheme.strip_suffix("+cluster").unwrap_or(scheme);
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (login, hosts) = match authority.rfind('@') {
        Some(at) => authority.split_at(at + 1),
        None => ("", authority),
    };
    let mut seeds = Vec::new();
    for host in hosts.split(',') {
        let seed = Endpoint::parse(&format!("{scheme}://{login}{host}{tail}"))
            .map_err(|error| error.remedy("write `redis+cluster://user:password@host1:6379,host2,host3`, or `rediss+cluster://` for TLS; user, password and ports may be left out, special characters in them are percent-encoded"))?;
        seed.wants_no_replicas("a Redis Cluster")?;
        if seed.login.db() != 0 {
            return Err(LockError::new(ErrorKind::Config, "a Redis Cluster has no databases")
                .remedy("leave the database number out of the URL; a prefix on the pool keeps keys apart"));
        }
        seeds.push(seed);
    }
    Ok(seeds)
}

#[cold]
fn divided(one: &str, other: &str) -> BackendError {
    let message = format!("`{one}` and `{other}` are in different slots of the Redis Cluster");
    BackendError::new(FailureKind::Rejected, message).remedy(server_error::SHARE_A_SLOT)
}

#[cold]
fn no_server(message: String) -> BackendError {
    BackendError::new(FailureKind::NotApplied, message)
        .remedy("check `redis-cli --cluster check` on one of its servers; it was asked again until the wait was over")
}

#[cold]
fn restless() -> BackendError {
    no_server("a slot of the Redis Cluster is sent from server to server".to_owned())
}

#[cold]
fn slow(address: &Address) -> BackendError {
    BackendError::new(
        FailureKind::MaybeApplied,
        format!("Redis at {address} did not answer in time"),
    )
    .remedy(
        "check that the server is up and reachable; a grant that may have been made is taken back",
    )
}

#[cold]
fn closed() -> BackendError {
    BackendError::new(FailureKind::Rejected, "the connections to the Redis Cluster are closed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_several_servers_with_one_login() {
        let seeds = seeds("redis+cluster://worker:p%40s,s@a,b:7000,[::1]:7001").unwrap();
        let texts: Vec<_> = seeds.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["a:6379", "b:7000", "[::1]:7001"]);
        for seed in &seeds {
            assert_eq!(seed.login.username(), Some("worker"));
            assert_eq!(seed.login.password(), Some("p@s,s"));
            assert!(seed.tls.is_none());
        }
        assert!(super::seeds("rediss+cluster://a,b?ca=/x.pem").unwrap()[1].tls.is_some());
    }

    #[test]
    fn a_wrong_url_is_a_config_error_without_the_password() {
        for url in [
            "redis+cluster://",
            "redis+cluster://:c4n4ry@a,",
            "redis+cluster://:c4n4ry@a,b:port",
            "redis+cluster://:c4n4ry@a,b/3",
            "redis+cluster://:c4n4ry@a,b?ca=/x.pem",
            "redis+cluster://worker:1/c4n4ry@a,b",
            "redis+cluster://worker:1?c4n4ry@a,b",
            "redis+cluster://worker:1#c4n4ry@a,b",
        ] {
            let error = seeds(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
            assert!(!format!("{error} {error:?}").contains("c4n4ry"), "{error}");
            assert!(!error.to_string().contains("`redis://"), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_does_not_answer_is_left_behind() {
        let quick: Boxed<'_, _> = Box::pin(async { 1 });
        let slow: Boxed<'_, _> = Box::pin(async {
            sleep(Duration::from_secs(1)).await;
            2
        });
        let never: Boxed<'_, _> = Box::pin(std::future::pending());
        let lag = Some(Lag { lag: Duration::from_secs(3), others_wait: false });
        assert_eq!(together(vec![never, quick, slow], lag).await, [None, Some(1), Some(2)]);
        let never: Boxed<'_, _> = Box::pin(std::future::pending::<()>());
        let lag = Some(Lag { lag: Duration::from_secs(3), others_wait: true });
        assert_eq!(together(vec![never], lag).await, [None]);
        assert_eq!(together(Vec::<Boxed<'_, ()>>::new(), lag).await, []);
    }
}
