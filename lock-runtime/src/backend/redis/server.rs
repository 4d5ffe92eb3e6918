//! The locks of one server.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::Setting;
use super::check;
use super::ears::{Ears, Stray};
use super::line::{self, Channel, Hot, Token};
use super::names::Names;
use super::node::{Hears, Node};
use super::replicas::Replicas;
use super::reply;
use super::resolver::Resolver;
use super::script::{ACQUIRE, By, LINE, RELEASE, RENEW};
use crate::backend::{
    Attempt, Backend, BackendError, Bell, Claim, Failure, Held, LeaseRef, Owner, Release, Released,
    Standing, Warning,
};
use crate::clock::Clock;
use crate::error::LockError;
use crate::fence::Fence;
use crate::jitter;
use crate::key::Key;
use crate::observe;

/// The server runs one script at a time: so many leases cost it about a millisecond.
const RENEWED_TOGETHER: usize = 256;

/// Where reads are tracked, the server notes all keys of a script with each of its reads.
const TRACKED_TOGETHER: usize = 16;

pub(super) struct Server {
    node: Arc<Node>,
    ears: Arc<Ears>,
    clock: Clock,
    names: Names,
    /// In every token of this pool, if it could hear its channel when it connected.
    channel: Option<Channel>,
    hot: Arc<Hot>,
    replicas: Option<Replicas>,
    strays: AbortHandle,
}

impl Server {
    pub(super) async fn connect(
        resolver: impl Into<Resolver>,
        names: Names,
        setting: Setting<'_>,
    ) -> Result<Self, LockError> {
        let Setting { clock, patience, .. } = setting;
        let resolver = resolver.into();
        let for_replicas = resolver.clone();
        let (found, strays) = mpsc::unbounded_channel();
        let hot = Arc::<Hot>::default();
        let ears = Arc::new(Ears::new(found, hot.clone(), clock));
        let channel = Channel::random()?;
        let probe = probe(&names, channel)?;
        let node = Node::connect(resolver, clock, patience, ears.clone(), channel, probe)
            .await
            .map_err(LockError::backend)?;
        let node = Arc::new(node);
        // Whoever may not run scripts could take a lock by plain `SET` and never free it. With no keys the
        // release does nothing.
        let nothing = Freeing {
            keys: &[],
            token: &[],
            keep_for: Duration::ZERO,
            ttl: Duration::ZERO,
            successor: None,
            leave_open: Duration::ZERO,
        };
        let mut questions = Pipeline::with_capacity(2);
        questions.add_command(nothing.command(&names, By::Text)).add_command(check::question());
        let answers = node.send_all(&questions).await.map_err(LockError::backend)?;
        if let [may, info] = answers.as_slice() {
            if let Err(error) = may {
                return Err(LockError::backend(node.failure(error.clone())));
            }
            let server = node.server();
            for warning in check::warnings(&server, info, &[]) {
                observe::weak_store(&server, &warning);
            }
        }
        let replicas = Replicas::connect(for_replicas, setting).await?;
        let channel = node.hears().calls.then_some(channel);
        let strays = tokio::spawn(pass_strays_on(node.clone(), names.clone(), strays, channel))
            .abort_handle();
        Ok(Self { node, ears, clock, names, channel, hot, replicas, strays })
    }

    /// How `claim` is put to the server.
    fn form(&self, claim: &Claim) -> Form {
        let line = claim.in_line && self.channel.is_some() && self.node.hears().calls;
        match (&*claim.keys, claim.attempt) {
            ([key], 0) if line && self.hot.has(key, self.clock.now()) => Form::Line,
            // The usual case in one plain command. It cannot recognise its own earlier try, so it must be
            // the first; and it cannot say when the lock will be free.
            ([_], 0) if !claim.fencing => Form::Plain,
            ([_], 1..) if line => Form::Line,
            _ => Form::Script,
        }
    }

    fn command(&self, claim: &Claim, form: Form, by: By) -> Cmd {
        let token = self.token(&claim.owner);
        let ttl = millis(claim.ttl);
        let counter = claim.fencing.then(|| self.names.fence_counter(&claim.keys));
        let fences = u64::from(claim.spare_fences) + 1;
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

    fn attempt(&self, claim: &Claim, form: Form, answer: &Value) -> Result<Attempt, BackendError> {
        // Who cannot announce itself is not known to wait.
        let can_tell = self.channel.is_some() && self.node.hears().calls;
        let parts = match (form, answer) {
            (Form::Plain, Value::Okay) => {
                let wanted = can_tell.then_some(false);
                return Ok(Attempt::Granted { fence: None, spare_fences: 0, wanted });
            }
            // In short; the script tells the rest.
            (Form::Plain, Value::Nil) => {
                let standing = Standing::Watching { ask_again: Duration::ZERO };
                return Ok(Attempt::Busy { free_in: None, standing });
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
                let spare_fences = fences.map_or(0, |(_, count)| count.saturating_sub(1));
                let fence = fences.map(|(first, _)| first);
                Ok(Attempt::Granted { fence, spare_fences, wanted })
            }
            [Value::Int(0), Value::Int(free_in)] => {
                let free_in = u64::try_from(*free_in).ok().map(Duration::from_millis);
                Ok(Attempt::Busy { free_in, standing: self.beside(claim, free_in) })
            }
            [Value::Int(0), Value::Int(free_in), Value::Int(rank), Value::Int(_)] => {
                let free_in = u64::try_from(*free_in).ok().map(Duration::from_millis);
                let rank = u64::try_from(*rank).unwrap_or_default();
                if let [key] = &*claim.keys {
                    self.hot.note(key.as_str(), self.clock.now());
                }
                let look = jitter::below(line::look(rank));
                let ask_again = match free_in {
                    Some(free_in) if rank == 0 => look.min(free_in + ROUNDING),
                    _ => look,
                };
                Ok(Attempt::Busy { free_in, standing: Standing::InLine { ask_again } })
            }
            _ => Err(unexpected(answer)),
        }
    }

    /// Where somebody stands who is not in line.
    fn beside(&self, claim: &Claim, free_in: Option<Duration>) -> Standing {
        // A lost push costs no more than this.
        const LOOK: Duration = Duration::from_millis(800);
        let Hears { changes, calls } = self.node.hears();
        // Only the next attempt joins the line, or has the keys watched. One that does not wait makes none.
        if claim.attempt == 0 && (claim.in_line || claim.keys.len() > 1) && (changes || calls) {
            return Standing::Watching { ask_again: Duration::ZERO };
        }
        if !changes {
            return Standing::Outside;
        }
        let look = jitter::below(LOOK);
        let ask_again = free_in.map_or(look, |free_in| look.min(free_in + ROUNDING));
        Standing::Watching { ask_again }
    }

    /// Which form to ask again in, at once, after such an answer.
    fn again(&self, claim: &Claim, form: Form, answer: &Value) -> Option<Form> {
        let hears = self.node.hears();
        match (form, answer) {
            // Who does not wait still wants to know how long the lock is held.
            (Form::Plain, Value::Nil) if !claim.in_line => Some(Form::Script),
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

    /// Sends `count` commands in one write: scripts by their hash, and once more by their text those that the
    /// server does not know. Those that `is_tracked` picks arm a push for the keys they read.
    async fn send_all(
        &self,
        count: usize,
        is_tracked: bool,
        command: impl Fn(usize, By) -> Cmd + Send + Sync,
    ) -> Vec<Result<Value, BackendError>> {
        let build = |by: By, places: &[usize]| {
            let mut all = Pipeline::with_capacity(places.len() * (1 + usize::from(is_tracked)));
            for &at in places {
                if is_tracked {
                    let mut caching = redis::cmd("CLIENT");
                    caching.arg("CACHING").arg("YES");
                    all.add_command(caching);
                }
                all.add_command(command(at, by));
            }
            all
        };
        let places: Vec<_> = (0..count).collect();
        let every = 1 + usize::from(is_tracked);
        let sent = self.node.send_all(&build(By::Hash, &places)).await;
        let mut answers: Vec<_> = match sent {
            Ok(answers) => answers.into_iter().skip(every - 1).step_by(every).collect(),
            Err(error) => return (0..count).map(|_| Err(error.clone())).collect(),
        };
        let is_unknown = |answer: &Result<Value, RedisError>| matches!(answer, Err(error) if reply::is_unknown_script(error));
        let unknown: Vec<_> = (0..answers.len()).filter(|&at| is_unknown(&answers[at])).collect();
        if !unknown.is_empty() {
            match self.node.send_all(&build(By::Text, &unknown)).await {
                Ok(texts) => {
                    let texts = texts.into_iter().skip(every - 1).step_by(every);
                    for (at, answer) in unknown.into_iter().zip(texts) {
                        answers[at] = answer;
                    }
                }
                Err(error) => {
                    let failure = |answer: Result<Value, RedisError>| {
                        if is_unknown(&answer) {
                            return Err(error.clone());
                        }
                        answer.map_err(|error| self.node.failure(error))
                    };
                    return answers.into_iter().map(failure).collect();
                }
            }
        }
        answers.into_iter().map(|answer| answer.map_err(|error| self.node.failure(error))).collect()
    }

    fn token(&self, owner: &Owner) -> Token {
        Token::new(owner, self.channel)
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
const ROUNDING: Duration = Duration::from_millis(1);

impl Backend for Server {
    fn attach(&self, bell: Bell) {
        self.ears.attach(bell);
    }

    async fn acquire(&self, claims: &[Claim]) -> Vec<Result<Attempt, BackendError>> {
        let sent = self.clock.now();
        let mut forms: Vec<_> = claims.iter().map(|claim| self.form(claim)).collect();
        let is_new = |(claim, form): &(&Claim, &Form)| claim.attempt == 0 && **form == Form::Line;
        let new = claims.iter().zip(&forms).filter(is_new).map(|(claim, _)| claim.owner).collect();
        let newcomers = self.ears.expect(new);
        let command = |at: usize, by| self.command(&claims[at], forms[at], by);
        let mut answers = self.send_all(claims.len(), false, command).await;
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
            let tracked = self.node.hears().changes;
            let more = self.send_all(again.len(), tracked, command).await;
            for ((at, form), answer) in again.into_iter().zip(more) {
                forms[at] = form;
                answers[at] = answer;
            }
        }
        let attempts = claims.iter().zip(forms).zip(answers);
        let attempt = |((claim, form), answer): ((&Claim, Form), _)| {
            let mut attempt = self.attempt(claim, form, &answer?)?;
            if let Attempt::Busy { standing: Standing::InLine { ask_again }, .. } = &mut attempt
                && newcomers.was_called(&claim.owner)
            {
                *ask_again = Duration::ZERO;
            }
            Ok(attempt)
        };
        let mut attempts: Vec<_> = attempts.map(attempt).collect();
        if let Some(replicas) = &self.replicas {
            replicas.confirm(claims, &mut attempts, sent).await;
        }
        attempts
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<Held, BackendError>> {
        // Reads the locks too, and so is told if one is taken away.
        let tracked = self.node.hears().changes;
        let together = if tracked { TRACKED_TOGETHER } else { RENEWED_TOGETHER };
        let alike = |a: &LeaseRef, b: &LeaseRef| a.ttl == b.ttl && a.keys.len() == b.keys.len();
        let chunks: Vec<_> =
            leases.chunk_by(alike).flat_map(|alike| alike.chunks(together)).collect();
        let command = |at: usize, by| {
            let chunk: &[LeaseRef] = chunks[at];
            let (ttl, locks) = (chunk[0].ttl, chunk[0].keys.len());
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
        let answers = self.send_all(chunks.len(), tracked, command).await;
        let mut outcomes = Vec::with_capacity(leases.len());
        for (chunk, answer) in chunks.iter().zip(answers) {
            match answer {
                Ok(Value::Array(parts)) if parts.len() == chunk.len() => {
                    for (lease, part) in chunk.iter().zip(&parts) {
                        outcomes.push(self.renewed(lease, part));
                    }
                }
                Ok(other) => outcomes.extend(chunk.iter().map(|_| Err(unexpected(&other)))),
                Err(error) => outcomes.extend(chunk.iter().map(|_| Err(error.clone()))),
            }
        }
        outcomes
    }

    async fn release(&self, releases: &[Release]) -> Vec<Result<Released, BackendError>> {
        let now = self.clock.now();
        // One key that nobody is known to wait for.
        let is_plain = |release: &Release| match &*release.lease.keys {
            [key] => {
                release.keep_for.is_zero() && release.successor.is_none() && !self.hot.has(key, now)
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
        let mut answers = self.send_all(releases.len(), false, command).await;
        let again: Vec<_> = (0..answers.len())
            .filter(|&at| plain[at] && matches!(answers[at], Ok(Value::Int(0))))
            .collect();
        if !again.is_empty() {
            let command = |n: usize, by| self.release_in_line(&releases[again[n]], by);
            let more = self.send_all(again.len(), false, command).await;
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

    async fn holds(&self, lease: &LeaseRef) -> Result<Held, BackendError> {
        let mut get = redis::cmd("MGET");
        for key in lease.keys.iter() {
            get.arg(key.as_str());
        }
        let Value::Array(holders) = self.node.send(&get).await? else {
            return Ok(Held::No);
        };
        let ours = |holder: &Value| matches!(holder, Value::BulkString(holder) if line::is_of(holder, &lease.owner));
        Ok(if holders.iter().all(ours) { Held::Yes } else { Held::No })
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        let mut questions = Pipeline::with_capacity(4);
        questions.add_command(redis::cmd("PING")).add_command(check::question());
        for question in check::more_questions() {
            questions.add_command(question);
        }
        let mut answers = self.node.send_all(&questions).await?.into_iter();
        // The one that anybody may ask.
        if let Some(Err(error)) = answers.next() {
            return Err(self.node.failure(error));
        }
        let Some(info) = answers.next() else { return Ok(Vec::new()) };
        Ok(check::warnings(&self.node.server(), &info, &answers.collect::<Vec<_>>()))
    }

    async fn close(&self) {
        self.node.close();
        if let Some(replicas) = &self.replicas {
            replicas.close();
        }
    }
}

impl Server {
    fn plain_release(&self, release: &Release, by: By) -> Cmd {
        let mut call = RELEASE.call(by, 1, 1);
        for key in release.lease.keys.iter() {
            call.arg(key.as_str());
        }
        call.arg(self.token(&release.lease.owner).as_bytes());
        call
    }

    fn release_in_line(&self, release: &Release, by: By) -> Cmd {
        let Release { lease, keep_for, successor, leave_open } = release;
        let token = self.token(&lease.owner);
        let heir = successor.filter(|_| self.channel.is_some() && self.node.hears().calls);
        let successor = heir.map(|heir| (self.token(&heir.owner), heir.ttl));
        let (keys, token) = (&*lease.keys, token.as_bytes());
        let (keep_for, leave_open) = (*keep_for, *leave_open);
        Freeing { keys, token, keep_for, ttl: lease.ttl, successor, leave_open }
            .command(&self.names, by)
    }

    fn released(&self, release: &Release, answer: &Value) -> Result<Released, BackendError> {
        match answer {
            Value::Int(0) => Ok(Released::No),
            Value::Int(1) => Ok(Released::Yes),
            Value::Int(2) => Ok(Released::Kept),
            Value::Int(3) => {
                release
                    .lease
                    .keys
                    .iter()
                    .for_each(|key| self.hot.note(key.as_str(), self.clock.now()));
                Ok(Released::Behind { ask_again: jitter::below(line::look(0)) })
            }
            other => Err(unexpected(other)),
        }
    }

    fn renewed(&self, lease: &LeaseRef, part: &Value) -> Result<Held, BackendError> {
        match part {
            Value::Int(1) => Ok(Held::Yes),
            Value::Int(2) => {
                lease.keys.iter().for_each(|key| self.ears.wanted(key.as_str()));
                Ok(Held::Yes)
            }
            Value::Int(0) => Ok(Held::No),
            Value::BulkString(error) => Err(self.node.refusal(&String::from_utf8_lossy(error))),
            other => Err(unexpected(other)),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.strays.abort();
    }
}

/// One call of the release.
struct Freeing<'a> {
    keys: &'a [Key],
    token: &'a [u8],
    keep_for: Duration,
    ttl: Duration,
    successor: Option<(Token, Duration)>,
    leave_open: Duration,
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
        call.arg("release").arg(self.token).arg(millis(self.keep_for));
        call.arg(millis(line::grant(self.ttl)));
        match &self.successor {
            Some((token, ttl)) => call.arg(token.as_bytes()).arg(millis(*ttl)),
            None => call.arg("").arg("0"),
        };
        call.arg(millis(self.leave_open));
        call
    }
}

/// Finds out whether a user may do what a line needs, and hears its own channel.
fn probe(names: &Names, channel: Channel) -> Result<Cmd, LockError> {
    let token = Token::new(&Owner::random()?, Some(channel));
    let mut call = LINE.call(By::Text, 2, 2);
    let lock = names.probe();
    call.arg(lock.as_str()).arg(names.line(lock)).arg("probe").arg(token.as_bytes());
    Ok(call)
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
        let (keep_for, ttl) = (Duration::ZERO, UNKNOWN);
        let freeing = Freeing {
            keys: &keys,
            token: token.as_bytes(),
            keep_for,
            ttl,
            successor: None,
            leave_open: keep_for,
        };
        // Should it fail, the grant runs out by itself.
        let _ = node.send(&freeing.command(&names, By::Text)).await;
    }
}

/// `first:count`.
fn fences(answer: &[u8]) -> Option<(Fence, u32)> {
    let (first, count) = std::str::from_utf8(answer).ok()?.split_once(':')?;
    Some((Fence::new(first.parse().ok()?), count.parse().ok()?))
}

/// Rounded up: `PEXPIRE` with zero deletes the key.
pub(super) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cold]
fn unexpected(answer: &Value) -> BackendError {
    BackendError::new(
        Failure::Unknown,
        format!("Redis gave an answer that does not fit: {answer:?}"),
    )
    .remedy("a proxy between here and the server may be rewriting answers")
}
