//! The locks of one server.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Pipeline, Value};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::backend::redis::conn::connection::{Ahead, Node};
use crate::backend::redis::conn::push::{Ears, Home, Newcomers, Stray};
use crate::backend::redis::diagnostics;
use crate::backend::redis::discovery::target::Resolver;
use crate::backend::redis::keyspace::Names;
use crate::backend::redis::net::handshake::{Calls, Hearing, Hears, Opening};
use crate::backend::redis::protocol::replicas::Replicas;
use crate::backend::redis::protocol::script::{self, ACQUIRE, By, LINE, RELEASE, RENEW};
use crate::backend::redis::protocol::wait_queue::{self, Channel, Hot, Token};
use crate::backend::redis::server_error;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, FailureKind, LeaseRef,
    LeaseStatus, Notifier, Owner, ReleaseOutcome, ReleaseRequest, WaitMode, Warning,
};
use crate::backend::{BackendConfig, Limits};
use crate::base::clock::Clock;
use crate::base::error::LockError;
use crate::base::fence::Fence;
use crate::base::jitter;
use crate::base::key::Key;
use crate::exec::events;

/// The server runs one script at a time: so many locks cost it about a millisecond.
const RENEWED_TOGETHER: usize = 256;

/// Where reads are tracked, the server notes all keys of a script with each of its reads.
const TRACKED_TOGETHER: usize = 16;

pub(crate) struct Server {
    node: Arc<Node>,
    ears: Arc<Ears>,
    clock: Clock,
    names: Names,
    /// In every token of this pool, if it could hear its channel when it connected.
    channel: Option<Channel>,
    home: Home,
    hot: Arc<Hot>,
    /// If replicas have to have a grant too.
    replicas: Option<Replicas>,
    /// Passes on what is granted to owners that had given up by then, if this server does so itself.
    strays: Option<AbortHandle>,
}

/// What all connections of a pool have in common.
#[derive(Clone)]
pub(crate) struct Household {
    pub(crate) names: Names,
    pub(crate) ears: Arc<Ears>,
    pub(crate) hot: Arc<Hot>,
    pub(crate) channel: Channel,
    pub(crate) clock: Clock,
    pub(crate) request_timeout: Duration,
    pub(crate) limits: Limits,
}

impl Household {
    /// And where to learn of strays.
    pub(crate) fn new(
        names: Names,
        config: BackendConfig<'_>,
    ) -> Result<(Self, mpsc::UnboundedReceiver<Stray>), LockError> {
        let BackendConfig { clock, request_timeout, .. } = config;
        let limits = config.limits();
        let (found, strays) = mpsc::unbounded_channel();
        let hot = Arc::<Hot>::default();
        let ears = Arc::new(Ears::new(found, hot.clone(), clock));
        let channel = Channel::random()?;
        Ok((Self { names, ears, hot, channel, clock, request_timeout, limits }, strays))
    }
}

/// How requests are put to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Way {
    Straight,
    /// One lease per command: a command about keys that are at two servers for the moment fails as a whole.
    Apart,
    /// As [`Apart`](Self::Apart), to the server that a slot is on the way to.
    Asking,
}

/// Why a server cannot be used like this.
#[derive(Debug)]
pub(crate) enum Unfit {
    /// It cannot be reached, or refuses altogether.
    Fails(BackendError),
    /// It runs no scripts for us.
    NoScripts(BackendError),
}

impl Unfit {
    pub(crate) fn into_error(self) -> BackendError {
        match self {
            Self::Fails(error) | Self::NoScripts(error) => error,
        }
    }
}

impl From<BackendError> for Unfit {
    fn from(error: BackendError) -> Self {
        Self::Fails(error)
    }
}

impl Server {
    pub(crate) async fn connect(
        resolver: impl Into<Resolver>,
        names: Names,
        config: BackendConfig<'_>,
    ) -> Result<Result<Self, Unfit>, LockError> {
        let resolver = resolver.into();
        let for_replicas = resolver.clone();
        let (household, strays) = Household::new(names, config)?;
        let probe = Owner::random()?;
        let mut server = match Self::of(&household, resolver, Home::Server, probe).await {
            Ok(server) => server,
            Err(unfit) => return Ok(Err(unfit)),
        };
        server.replicas = Replicas::connect(for_replicas, config).await?;
        let (node, names) = (server.node.clone(), household.names);
        let passing = tokio::spawn(pass_strays_on(node, names, strays, server.channel));
        server.strays = Some(passing.abort_handle());
        Ok(Ok(server))
    }

    /// One of the servers of `household`. What may be done there is probed in the name of `probe`.
    pub(crate) async fn of(
        household: &Household,
        resolver: impl Into<Resolver>,
        home: Home,
        probe: Owner,
    ) -> Result<Self, Unfit> {
        let Household { names, ears, hot, channel, clock, limits, .. } = household.clone();
        let slot = home.some_slot();
        let probe = {
            let (names, token) = (names.clone(), Token::new(&probe, Some(channel)));
            Box::new(move |slot| probe_of(&names, slot, &token))
        };
        let calls = Some(Calls { channel, probe, names: names.clone() });
        let hearing = Hearing { ears: ears.clone(), home: home.clone(), calls };
        let opening = Opening::begin(clock, limits.connect);
        let node = Arc::new(Node::connect(resolver, clock, limits, hearing).await?);
        let server = node.server();
        // A user without the right to scripts could take a lock by plain `SET` and never free it.
        let refusal = script::refusal(&node, &names, slot);
        let info = async {
            if node.is_touchy() {
                Ok(None)
            } else {
                node.try_send(&diagnostics::question()).await.map(Some)
            }
        };
        // In one flight.
        let both = async { Ok(tokio::join!(biased; refusal, info)) };
        let (refusal, info) = opening.ask(&server, "the first script (`EVAL`)", both).await?;
        if let Some(refusal) = refusal? {
            return Err(Unfit::NoScripts(refusal));
        }
        if let Some(info) = info? {
            for warning in diagnostics::warnings(&server, names.are_of_server(), &info, &[]) {
                events::backend_warning(&server, &warning);
            }
        }
        if let Some(warning) = node.warning() {
            events::backend_warning(&server, &warning);
        }
        let channel = node.hears().calls.then_some(channel);
        let (replicas, strays) = (None, None);
        Ok(Self { node, ears, clock, names, channel, home, hot, replicas, strays })
    }

    /// How `claim` is put to the server.
    fn form(&self, claim: &AcquireRequest) -> Form {
        let line = claim.enqueue && self.has_lines();
        match (&*claim.keys, claim.attempt) {
            ([key], 0) if line && self.hot.has(key, self.clock.now()) => Form::Line,
            // The usual case in one plain command. It cannot recognise its own earlier try, so it must be
            // the first; and it cannot say when the lock will be free.
            ([_], 0) if !claim.fencing => Form::Plain,
            ([_], 1..) if line => Form::Line,
            _ => Form::Script,
        }
    }

    fn command(&self, claim: &AcquireRequest, form: Form, by: By) -> Cmd {
        let token = self.token(&claim.owner);
        let ttl = millis(claim.kept_for());
        let counter = claim.fencing.then(|| self.names.fence_counter(&claim.keys));
        let fences = u64::from(claim.extra_fences) + 1;
        match (form, &*claim.keys) {
            (Form::Plain, [key]) => {
                let mut set = Cmd::with_capacity(6, 6 * 48);
                set.arg("SET").arg(key.as_str()).arg(token.as_bytes()).arg("NX").arg("PX").arg(ttl);
                set
            }
            (Form::Line, [key]) => {
                let mut call = LINE.call(by, 2 + usize::from(claim.fencing), 4);
                call.arg(key.as_str()).arg(self.names.line(key)).arg(counter);
                call.arg("claim").arg(token.as_bytes()).arg(ttl).arg(fences);
                call
            }
            (_, keys) => {
                let mut call = ACQUIRE.call(by, keys.len() + usize::from(claim.fencing), 4);
                for key in keys {
                    call.arg(key.as_str());
                }
                call.arg(counter).arg(token.as_bytes()).arg(ttl).arg(keys.len()).arg(fences);
                call
            }
        }
    }

    fn attempt(
        &self,
        claim: &AcquireRequest,
        form: Form,
        answer: &Value,
    ) -> Result<AcquireOutcome, BackendError> {
        // Who cannot announce itself is not known to wait.
        let can_tell = self.channel.is_some() && self.node.hears().calls;
        let parts = match (form, answer) {
            (Form::Plain, Value::Okay) => {
                let wanted = can_tell.then_some(false);
                return Ok(AcquireOutcome::Acquired {
                    fence: None,
                    reserved_fences: 0,
                    contended: wanted,
                });
            }
            // In short; the script tells the rest.
            (Form::Plain, Value::Nil) => {
                let wait_mode = WaitMode::Watch { retry_after: Duration::ZERO };
                return Ok(AcquireOutcome::Contended { expires_in: None, wait_mode });
            }
            (Form::Script | Form::Line, Value::Array(parts)) => parts.as_slice(),
            _ => return Err(unexpected(answer)),
        };
        match parts {
            [Value::Int(1), Value::BulkString(fence), waiting @ ..] => {
                let fences = if claim.fencing {
                    Some(fences(fence).ok_or_else(|| unexpected(answer))?)
                } else {
                    None
                };
                let wanted = match waiting {
                    [Value::Int(waiting)] => *waiting > 0,
                    _ => false,
                };
                if let (true, [key]) = (wanted, &*claim.keys) {
                    self.hot.note(key.as_str(), self.clock.now());
                }
                let wanted = can_tell.then_some(wanted);
                let extra_fences = fences.map_or(0, |(_, count)| count.saturating_sub(1));
                let fence = fences.map(|(first, _)| first);
                Ok(AcquireOutcome::Acquired {
                    fence,
                    reserved_fences: extra_fences,
                    contended: wanted,
                })
            }
            [Value::Int(0), Value::Int(expires_in)] => {
                let expires_in = u64::try_from(*expires_in).ok().map(Duration::from_millis);
                Ok(AcquireOutcome::Contended {
                    expires_in,
                    wait_mode: self.beside(claim, expires_in),
                })
            }
            [Value::Int(0), Value::Int(expires_in), Value::Int(rank), Value::Int(_)] => {
                let expires_in = u64::try_from(*expires_in).ok().map(Duration::from_millis);
                let rank = u64::try_from(*rank).unwrap_or_default();
                if let [key] = &*claim.keys {
                    self.hot.note(key.as_str(), self.clock.now());
                }
                let look = jitter::below(wait_queue::look(rank));
                let retry_after = match expires_in {
                    Some(expires_in) if rank == 0 => look.min(expires_in + ROUNDING),
                    _ => look,
                };
                Ok(AcquireOutcome::Contended {
                    expires_in,
                    wait_mode: WaitMode::Queued { retry_after },
                })
            }
            _ => Err(unexpected(answer)),
        }
    }

    /// Where somebody stands who is not in line.
    fn beside(&self, claim: &AcquireRequest, expires_in: Option<Duration>) -> WaitMode {
        // A lost push costs no more than this.
        const LOOK: Duration = Duration::from_millis(800);
        let Hears { changes, calls } = self.node.hears();
        // Only the next attempt joins the line, or has the keys watched. One that does not wait makes none.
        if claim.attempt == 0 && (claim.enqueue || claim.keys.len() > 1) && (changes || calls) {
            return WaitMode::Watch { retry_after: Duration::ZERO };
        }
        if !changes {
            return WaitMode::Poll;
        }
        let look = jitter::below(LOOK);
        let retry_after = expires_in.map_or(look, |expires_in| look.min(expires_in + ROUNDING));
        WaitMode::Watch { retry_after }
    }

    /// Which form to ask again in, at once, after such an answer.
    fn again(&self, claim: &AcquireRequest, form: Form, answer: &Value) -> Option<Form> {
        let hears = self.node.hears();
        match (form, answer) {
            // Who does not wait still wants to know how long the lock is held.
            (Form::Plain, Value::Nil) if !claim.enqueue => Some(Form::Script),
            (Form::Script, Value::Array(parts)) if hears.changes => {
                let busy = matches!(parts.as_slice(), [Value::Int(0), ..]);
                (busy && claim.attempt > 0).then_some(Form::Script)
            }
            // To be told of a change it has to be read behind `CLIENT CACHING YES`: of a holder that will call
            // nobody, and of one of ours whose lock is deleted under it.
            (Form::Line, Value::Array(parts)) if hears.changes => match parts.as_slice() {
                [Value::Int(0), _, Value::Int(rank), Value::Int(ours)] => {
                    (*ours == 0 || (*rank == 0 && claim.attempt > 0)).then_some(Form::Line)
                }
                _ => None,
            },
            _ => None,
        }
    }

    fn token(&self, owner: &Owner) -> Token {
        Token::new(owner, self.channel.map(|channel| self.home.channel(channel)))
    }
}

/// How a claim is put to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// `SET NX PX`.
    Plain,
    /// `acquire.lua`: several keys, a fence, or nobody who would stand in line.
    Script,
    /// `line.lua`: the lock or a place in its line.
    Line,
}

/// Redis rounds an expiry to a millisecond.
pub(crate) const ROUNDING: Duration = Duration::from_millis(1);

impl Server {
    /// Whether the server keeps wait queues for this pool.
    fn has_lines(&self) -> bool {
        self.channel.is_some() && self.node.hears().calls
    }
}

impl Backend for Server {
    fn subscribe(&self, notifier: Notifier) {
        self.ears.subscribe(notifier);
    }

    async fn acquire(
        &self,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let sent = self.clock.now();
        let forms: Vec<_> = claims.iter().map(|claim| self.form(claim)).collect();
        let is_new =
            |(claim, form): &(&AcquireRequest, &Form)| claim.attempt == 0 && **form == Form::Line;
        let new = claims.iter().zip(&forms).filter(is_new).map(|(claim, _)| claim.owner).collect();
        let newcomers = self.ears.expect(new);
        let mut attempts = self.acquire_in(forms, Way::Straight, claims).await;
        note_calls(&newcomers, claims, &mut attempts);
        if let Some(replicas) = &self.replicas {
            replicas.confirm(claims, &mut attempts, sent).await;
        }
        attempts
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        self.renew_by(Way::Straight, leases).await
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        self.release_by(Way::Straight, releases).await
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let lease = std::slice::from_ref(lease);
        let mut held = self.holds_by(Way::Straight, lease).await;
        held.pop().unwrap_or(Ok(LeaseStatus::NotHeld))
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.wait_queue = self.has_lines();
        capabilities
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        if self.node.is_touchy() {
            self.node.send(&redis::cmd("PING")).await?;
            let text = format!(
                "Redis at {} is behind a proxy that knows few commands, so waiting locks are polled for",
                self.node.server()
            );
            let remedy = "if it spreads keys over several servers, give the keys of one `lock_all` a common hash tag";
            let more = self.node.warning();
            return Ok(std::iter::once(Warning::new(text, remedy)).chain(more).collect());
        }
        let mut questions = Pipeline::with_capacity(4);
        questions.add_command(redis::cmd("PING")).add_command(diagnostics::question());
        for question in diagnostics::more_questions() {
            questions.add_command(question);
        }
        let mut answers = self.node.send_all(&questions).await?.into_iter();
        // The one that anybody may ask.
        if let Some(Err(error)) = answers.next() {
            return Err(self.node.failure(error));
        }
        let Some(info) = answers.next() else { return Ok(Vec::new()) };
        let answers: Vec<_> = answers.collect();
        let for_all = self.names.are_of_server();
        let mut warnings = diagnostics::warnings(&self.node.server(), for_all, &info, &answers);
        warnings.extend(self.node.warning());
        Ok(warnings)
    }

    async fn close(&self) {
        self.end();
    }
}

/// Whoever was called while its first claim was on its way asks again at once.
pub(crate) fn note_calls(
    newcomers: &Newcomers<'_>,
    claims: &[AcquireRequest],
    attempts: &mut [Result<AcquireOutcome, BackendError>],
) {
    for (claim, attempt) in claims.iter().zip(attempts) {
        if let Ok(AcquireOutcome::Contended { wait_mode: WaitMode::Queued { retry_after }, .. }) =
            attempt
            && newcomers.was_called(&claim.owner)
        {
            *retry_after = Duration::ZERO;
        }
    }
}

impl Server {
    /// Whoever calls this has to expect the owners that are new.
    pub(crate) async fn acquire_by(
        &self,
        way: Way,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let forms = claims.iter().map(|claim| self.form(claim)).collect();
        self.acquire_in(forms, way, claims).await
    }

    async fn acquire_in(
        &self,
        mut forms: Vec<Form>,
        way: Way,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let command = |at: usize, by| self.command(&claims[at], forms[at], by);
        let ahead = self.ahead(way, false);
        let mut answers = self.run_named(claims.len(), ahead, command).await;
        let mut again = Vec::new();
        for (at, answer) in answers.iter().enumerate() {
            if let Ok(answer) = answer
                && let Some(form) = self.again(&claims[at], forms[at], answer)
            {
                again.push((at, form));
            }
        }
        if !again.is_empty() {
            let command = |n: usize, by| self.command(&claims[again[n].0], again[n].1, by);
            let ahead = self.ahead(way, true);
            let more = self.run_named(again.len(), ahead, command).await;
            for ((at, form), answer) in again.into_iter().zip(more) {
                forms[at] = form;
                answers[at] = answer;
            }
        }
        let attempts = claims.iter().zip(forms).zip(answers);
        attempts.map(|((claim, form), answer)| self.attempt(claim, form, &answer?)).collect()
    }

    pub(crate) async fn renew_by(
        &self,
        way: Way,
        leases: &[LeaseRef],
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        let were_tagged = self.names.are_tagged();
        let outcomes = self.renew_once(way, leases).await;
        let crosses = |outcome: &Result<LeaseStatus, _>| {
            outcome.as_ref().is_err_and(server_error::is_across_slots)
        };
        if were_tagged || !outcomes.iter().any(crosses) {
            return outcomes;
        }
        // From now on leases share a command only within a slot.
        self.names.tag_all();
        self.renew_once(way, leases).await
    }

    async fn renew_once(
        &self,
        way: Way,
        leases: &[LeaseRef],
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        // Reads the locks too, and so is told if one is taken away.
        let ahead = self.ahead(way, true);
        let together = match (way, ahead) {
            (Way::Apart | Way::Asking, _) => 1,
            (Way::Straight, Ahead::Caching) => TRACKED_TOGETHER,
            (Way::Straight, _) => RENEWED_TOGETHER,
        };
        let alike = |a: &LeaseRef, b: &LeaseRef| {
            a.kept_for() == b.kept_for()
                && a.keys.len() == b.keys.len()
                && match (a.keys.first(), b.keys.first()) {
                    (Some(a), Some(b)) => self.names.may_share_a_script(a, b),
                    _ => true,
                }
        };
        let leases_of = |alike: &[LeaseRef]| {
            let locks = alike.first().map_or(1, |lease| lease.keys.len().max(1));
            (together / locks).max(1)
        };
        let chunks: Vec<_> =
            leases.chunk_by(alike).flat_map(|alike| alike.chunks(leases_of(alike))).collect();
        let command = |at: usize, by| {
            let chunk: &[LeaseRef] = chunks[at];
            let (ttl, locks) = (chunk[0].kept_for(), chunk[0].keys.len());
            let mut call = RENEW.call(by, locks * chunk.len(), 2 + chunk.len());
            for key in chunk.iter().flat_map(|lease| lease.keys.iter()) {
                call.arg(key.as_str());
            }
            call.arg(millis(ttl)).arg(locks);
            for lease in chunk {
                call.arg(lease.owner.as_bytes());
            }
            call
        };
        let answers = self.node.run(chunks.len(), ahead, command).await;
        let mut outcomes = Vec::with_capacity(leases.len());
        for (chunk, answer) in chunks.iter().zip(answers) {
            match answer {
                Ok(Value::BulkString(digits)) if digits.len() == chunk.len() => {
                    for (lease, digit) in chunk.iter().zip(digits) {
                        outcomes.push(self.renewed(lease, i64::from(digit) - i64::from(b'0')));
                    }
                }
                Ok(Value::Array(parts)) if parts.len() == chunk.len() => {
                    for (lease, part) in chunk.iter().zip(parts) {
                        outcomes.push(match part {
                            Value::Int(outcome) => self.renewed(lease, outcome),
                            Value::BulkString(error) => {
                                Err(self.node.refusal(&String::from_utf8_lossy(&error)))
                            }
                            other => Err(unexpected(&other)),
                        });
                    }
                }
                Ok(other) => outcomes.extend(chunk.iter().map(|_| Err(unexpected(&other)))),
                Err(error) => outcomes.extend(chunk.iter().map(|_| Err(error.clone()))),
            }
        }
        outcomes
    }

    pub(crate) async fn release_by(
        &self,
        way: Way,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let now = self.clock.now();
        // One key that nobody is known to wait for.
        let is_plain = |release: &ReleaseRequest| match &*release.lease.keys {
            [key] => {
                release.free_after.is_zero()
                    && release.successor.is_none()
                    && !self.hot.has(key, now)
            }
            _ => false,
        };
        let plain: Vec<_> = releases.iter().map(is_plain).collect();
        let command = |at: usize, by| {
            if plain[at] {
                self.plain_release(&releases[at], by)
            } else {
                self.release_in_line(&releases[at], by)
            }
        };
        let ahead = self.ahead(way, false);
        let mut answers = self.run_named(releases.len(), ahead, command).await;
        let again: Vec<_> = (0..answers.len())
            .filter(|&at| plain[at] && matches!(answers[at], Ok(Value::Int(0))))
            .collect();
        if !again.is_empty() {
            let command = |n: usize, by| self.release_in_line(&releases[again[n]], by);
            let more = self.run_named(again.len(), ahead, command).await;
            for (at, answer) in again.into_iter().zip(more) {
                answers[at] = answer;
            }
        }
        releases
            .iter()
            .zip(answers)
            .map(|(release, answer)| self.released(release, &answer?))
            .collect()
    }

    pub(crate) async fn holds_by(
        &self,
        way: Way,
        leases: &[LeaseRef],
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        let command = |at: usize, _| {
            let mut get = redis::cmd("MGET");
            for key in leases[at].keys.iter() {
                get.arg(key.as_str());
            }
            get
        };
        let answers = self.node.run(leases.len(), self.ahead(way, false), command).await;
        let held = |(lease, answer): (&LeaseRef, Result<Value, _>)| {
            answer.map(|holders| held_by(&lease.owner, &holders))
        };
        leases.iter().zip(answers).map(held).collect()
    }

    /// As [`Node::run`]. What is refused because the server has begun to check slots is put to it once more, by
    /// tagged names.
    async fn run_named(
        &self,
        count: usize,
        ahead: Ahead,
        command: impl Fn(usize, By) -> Cmd + Send + Sync,
    ) -> Vec<Result<Value, BackendError>> {
        let were_tagged = self.names.are_tagged();
        let mut answers = self.node.run(count, ahead, &command).await;
        if were_tagged || !answers.iter().any(Result::is_err) {
            return answers;
        }
        let crosses = |at: &usize| answers[*at].as_ref().is_err_and(server_error::is_across_slots);
        let refused: Vec<_> = (0..count).filter(crosses).collect();
        if !refused.is_empty() {
            self.names.tag_all();
            let more = self.node.run(refused.len(), ahead, |n, by| command(refused[n], by)).await;
            for (at, answer) in refused.into_iter().zip(more) {
                answers[at] = answer;
            }
        }
        answers
    }

    /// Sends other commands than those of this module. See [`Node::run`].
    pub(crate) async fn run_by(
        &self,
        way: Way,
        is_tracked: bool,
        count: usize,
        command: impl Fn(usize, By) -> Cmd + Send + Sync,
    ) -> Vec<Result<Value, BackendError>> {
        self.node.run(count, self.ahead(way, is_tracked), command).await
    }

    pub(crate) fn node(&self) -> &Node {
        &self.node
    }

    /// Whether it tells of changes.
    pub(crate) fn tells(&self) -> bool {
        self.node.hears().changes
    }

    pub(crate) fn end(&self) {
        self.node.close();
        if let Some(replicas) = &self.replicas {
            replicas.close();
        }
    }

    /// What goes ahead of commands that better arm a push, or need not.
    fn ahead(&self, way: Way, is_tracked: bool) -> Ahead {
        match way {
            Way::Asking => Ahead::Asking,
            _ if is_tracked && self.node.hears().changes => Ahead::Caching,
            _ => Ahead::Nothing,
        }
    }

    pub(crate) async fn send(&self, command: &Cmd) -> Result<Value, BackendError> {
        self.node.send(command).await
    }

    pub(crate) fn is_up(&self) -> bool {
        self.node.is_up()
    }

    fn plain_release(&self, release: &ReleaseRequest, by: By) -> Cmd {
        let mut call = RELEASE.call(by, 1, 1);
        for key in release.lease.keys.iter() {
            call.arg(key.as_str());
        }
        call.arg(self.token(&release.lease.owner).as_bytes());
        call
    }

    fn release_in_line(&self, release: &ReleaseRequest, by: By) -> Cmd {
        let ReleaseRequest { lease, free_after, successor, barging_window } = release;
        let token = self.token(&lease.owner);
        let heir = successor.filter(|_| self.channel.is_some() && self.node.hears().calls);
        let successor = heir.map(|heir| (self.token(&heir.owner), heir.ttl));
        let (keys, token) = (&*lease.keys, token.as_bytes());
        let (free_after, barging_window) = (*free_after, *barging_window);
        Freeing { keys, token, free_after, ttl: lease.ttl, successor, barging_window }
            .command(&self.names, by)
    }

    fn released(
        &self,
        release: &ReleaseRequest,
        answer: &Value,
    ) -> Result<ReleaseOutcome, BackendError> {
        match answer {
            Value::Int(0) => Ok(ReleaseOutcome::NotHeld),
            Value::Int(1) => Ok(ReleaseOutcome::Freed),
            Value::Int(2) => Ok(ReleaseOutcome::SuccessorGranted),
            Value::Int(3) => {
                release
                    .lease
                    .keys
                    .iter()
                    .for_each(|key| self.hot.note(key.as_str(), self.clock.now()));
                Ok(ReleaseOutcome::SuccessorQueued {
                    retry_after: jitter::below(wait_queue::look(0)),
                })
            }
            other => Err(unexpected(other)),
        }
    }

    fn renewed(&self, lease: &LeaseRef, outcome: i64) -> Result<LeaseStatus, BackendError> {
        match outcome {
            1 => Ok(LeaseStatus::Held),
            2 => {
                lease.keys.iter().for_each(|key| self.ears.contended(key.as_str()));
                Ok(LeaseStatus::Held)
            }
            0 => Ok(LeaseStatus::NotHeld),
            other => Err(unexpected(&Value::Int(other))),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(strays) = &self.strays {
            strays.abort();
        }
    }
}

/// One call of the release.
struct Freeing<'a> {
    keys: &'a [Key],
    token: &'a [u8],
    free_after: Duration,
    ttl: Duration,
    successor: Option<(Token, Duration)>,
    barging_window: Duration,
}

impl Freeing<'_> {
    fn command(&self, names: &Names, by: By) -> Cmd {
        let mut call = LINE.call(by, 2 * self.keys.len(), 7);
        for key in self.keys {
            call.arg(key.as_str());
        }
        for key in self.keys {
            call.arg(names.line(key));
        }
        call.arg("release").arg(self.token).arg(millis(self.free_after));
        call.arg(millis(wait_queue::grant(self.ttl)));
        match &self.successor {
            Some((token, ttl)) => call.arg(token.as_bytes()).arg(millis(*ttl)),
            None => call.arg("").arg("0"),
        };
        call.arg(millis(self.barging_window));
        call
    }
}

/// Finds out whether a user may do what a line needs, and hears its own channel.
fn probe_of(names: &Names, slot: u16, token: &Token) -> Cmd {
    let mut call = LINE.call(By::Text, 2, 2);
    let lock = names.probe(slot);
    call.arg(lock.as_str()).arg(names.line(&lock)).arg("probe").arg(token.as_bytes());
    call
}

/// Passes on what was granted to owners that had given up by then.
async fn pass_strays_on(
    node: Arc<Node>,
    names: Names,
    mut strays: mpsc::UnboundedReceiver<Stray>,
    channel: Option<Channel>,
) {
    // Makes the shortest grant for whoever is next.
    const UNKNOWN: Duration = Duration::from_secs(1);
    while let Some(Stray { key, owner }) = strays.recv().await {
        let token = Token::new(&owner, channel);
        let keys = [Key::from(key)];
        let (free_after, ttl) = (Duration::ZERO, UNKNOWN);
        let freeing = Freeing {
            keys: &keys,
            token: token.as_bytes(),
            free_after,
            ttl,
            successor: None,
            barging_window: free_after,
        };
        // Should it fail, the grant runs out by itself.
        let _ = node.send(&freeing.command(&names, By::Text)).await;
    }
}

/// A key of another type is somebody else's.
pub(crate) async fn holds(node: &Node, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
    let mut get = redis::cmd("MGET");
    for key in lease.keys.iter() {
        get.arg(key.as_str());
    }
    node.send(&get).await.map(|holders| held_by(&lease.owner, &holders))
}

/// Whether all of the answer to an `MGET` are tokens of `owner`.
fn held_by(owner: &Owner, holders: &Value) -> LeaseStatus {
    let ours = |holder: &Value| matches!(holder, Value::BulkString(holder) if wait_queue::is_of(holder, owner));
    match holders {
        Value::Array(holders) if holders.iter().all(ours) => LeaseStatus::Held,
        _ => LeaseStatus::NotHeld,
    }
}

/// `first:count`.
fn fences(answer: &[u8]) -> Option<(Fence, u32)> {
    let (first, count) = std::str::from_utf8(answer).ok()?.split_once(':')?;
    Some((Fence::new(first.parse().ok()?), count.parse().ok()?))
}

/// Rounded up: `PEXPIRE` with zero deletes the key.
pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cold]
pub(crate) fn unexpected(answer: &Value) -> BackendError {
    BackendError::new(
        FailureKind::MaybeApplied,
        format!("Redis gave an answer that does not fit: {answer:?}"),
    )
    .remedy("a proxy between here and the server may be rewriting answers")
}
