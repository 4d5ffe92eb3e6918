//! A TCP proxy in front of a Redis server that fails on demand.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};

use crate::eventually::eventually;
use crate::resp::Value;
use crate::server::{RedisServer, listener};

/// A TCP proxy that understands RESP, so that a test can lose the reply of one command.
///
/// It runs on a thread and a runtime of its own: tests may block theirs. What is not RESP, such as
/// TLS, passes as it is and counts no commands. `MONITOR` and `CLIENT REPLY` are not understood.
#[derive(Debug)]
pub struct FaultProxy {
    wire: Arc<Wire>,
    url: String,
    port: u16,
    /// Dropped, it ends the thread.
    _stop: oneshot::Sender<()>,
}

/// Which way bytes flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Commands.
    ToServer,
    /// Replies and pushes.
    ToClient,
}

/// What happens to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The server runs it. Neither its reply nor anything behind it on that connection arrives: a
    /// TCP stream cannot lose its middle, only its end.
    DropReply,
    /// The server runs it. Its reply, and what is behind it, waits for
    /// [`FaultProxy::release_held`].
    HoldReply,
    /// The server runs it, then the connection is reset instead of replying.
    CutBeforeReply,
    /// The server runs it, and half of its reply arrives; then the connection is closed.
    CutInsideReply,
    /// The server runs it, and these bytes arrive in place of its reply.
    AnswerWith(&'static [u8]),
    /// It waits, with what is behind it on that connection, for [`FaultProxy::release_held`]; also
    /// when the client gives up in the meantime, as a packet would.
    HoldRequest,
    /// The server never sees it: the connection is reset.
    CutBeforeForward,
}

/// A command on its way to the server.
#[derive(Clone, Debug)]
pub struct Command {
    args: Vec<Vec<u8>>,
}

/// An action that waits for its command, or has met it.
#[derive(Clone, Debug)]
pub struct Trap {
    sprung: Arc<AtomicBool>,
}

impl FaultProxy {
    /// A proxy without faults to the plain port of `server`.
    ///
    /// # Panics
    ///
    /// When no port or thread is to be had.
    pub fn start(server: &RedisServer) -> Self {
        let mut proxy = Self::to_port(server.port());
        proxy.url = server.url_at(proxy.port);
        proxy
    }

    /// A proxy without faults to a port of this machine.
    ///
    /// # Panics
    ///
    /// When no port or thread is to be had.
    pub fn to_port(upstream: u16) -> Self {
        let listener = listener();
        listener.set_nonblocking(true).expect("a socket can be non-blocking");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let wire = Arc::new(Wire { upstream: upstream.into(), ..Wire::default() });
        let (stop, stopped) = oneshot::channel();
        let shared = Arc::clone(&wire);
        std::thread::Builder::new()
            .name("fault-proxy".into())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.expect("a runtime can be made").block_on(async {
                    tokio::select! {
                        () = serve(listener, &shared) => {}
                        _ = stopped => {}
                    }
                });
            })
            .expect("a thread can be started");
        Self { wire, url: format!("redis://127.0.0.1:{port}"), port, _stop: stop }
    }

    /// The server's URL by way of the proxy, with its password, without TLS.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// New connections go to this port of this machine, as after a failover behind a name or a virtual address.
    /// Open ones stay.
    pub fn redirect(&self, upstream: u16) {
        self.wire.upstream.store(upstream, Ordering::SeqCst);
    }

    /// Resets all connections and forgets what they held. New ones are taken.
    pub fn cut(&self) {
        self.wire.gates.send_modify(|gates| gates.cuts += 1);
    }

    /// While on, new connections are reset. Existing ones stay.
    pub fn refuse(&self, on: bool) {
        self.wire.refuse.store(on, Ordering::SeqCst);
    }

    /// Lets nothing pass this way, on all connections, until
    /// [`release_held`](Self::release_held). Both ways: the host is unreachable.
    pub fn hold(&self, direction: Direction) {
        if direction == Direction::ToServer {
            self.wire.held.lock().unwrap().clear();
        }
        self.wire.gates.send_modify(|gates| *gates.held(direction) = true);
    }

    /// Lets everything held pass, in order, and holds nothing more.
    pub fn release_held(&self) {
        self.wire.gates.send_modify(|gates| {
            gates.held_to_server = false;
            gates.held_to_client = false;
            gates.releases += 1;
        });
    }

    /// Whether `text` stands in what clients have sent since the last [`hold`](Self::hold) of commands, while they were held. Its
    /// bytes may stand there as hexadecimal digits.
    pub fn has_held(&self, text: &str) -> bool {
        let digits: Vec<_> = text.bytes().map(|byte| format!("{byte:02x}")).collect();
        let digits = digits.concat();
        let held = self.wire.held.lock().unwrap();
        let has = |text: &str| held.windows(text.len()).any(|part| part == text.as_bytes());
        has(text) || has(&digits)
    }

    /// As [`has_held`](Self::has_held), for bytes.
    pub fn has_held_bytes(&self, bytes: &[u8]) -> bool {
        let held = self.wire.held.lock().unwrap();
        held.windows(bytes.len()).any(|part| part == bytes)
    }

    /// From now on what flows this way arrives so much later, in order. Zero ends it.
    pub fn delay(&self, direction: Direction, by: Duration) {
        match direction {
            Direction::ToServer => self.wire.delays.lock().unwrap().to_server = by,
            Direction::ToClient => self.wire.delays.lock().unwrap().to_client = by,
        }
    }

    /// Does `action` to the next command that `matches`, once. See [`named`] and
    /// [`Command::mentions`] for what to match.
    pub fn on_next(
        &self,
        matches: impl FnMut(&Command) -> bool + Send + 'static,
        action: Action,
    ) -> Trap {
        let trap = Trap { sprung: Arc::default() };
        let rule = Rule { matches: Box::new(matches), action, trap: trap.clone() };
        self.wire.rules.lock().unwrap().push(rule);
        trap
    }

    /// [`Action::DropReply`] of the `n`-th command from now, 1 being the next.
    pub fn drop_reply_of(&self, n: usize) -> Trap {
        self.on_next(nth(n), Action::DropReply)
    }

    /// [`Action::CutBeforeReply`] of the `n`-th command from now, 1 being the next.
    pub fn cut_before_reply_of(&self, n: usize) -> Trap {
        self.on_next(nth(n), Action::CutBeforeReply)
    }

    /// From now on it accepts only these commands, and closes a connection that sends another one, as
    /// twemproxy does. See [`nutcracker`].
    pub fn know_only(&self, known: impl Fn(&Command) -> bool + Send + 'static) {
        *self.wire.known.lock().unwrap() = Some(Box::new(known));
    }

    /// How often it has hung up on a command that it does not know.
    pub fn hang_ups(&self) -> usize {
        self.wire.hang_ups.load(Ordering::SeqCst)
    }

    /// How many connections it has [refused](Self::refuse).
    pub fn refusals(&self) -> usize {
        self.wire.refusals.load(Ordering::SeqCst)
    }

    /// How many connections it has taken.
    pub fn connections(&self) -> usize {
        self.wire.connections.load(Ordering::SeqCst)
    }

    /// How many connections are open.
    pub fn open_connections(&self) -> usize {
        self.wire.open.load(Ordering::SeqCst)
    }

    /// How many commands have come in, each of a pipeline and those of the handshake included.
    pub fn commands(&self) -> usize {
        self.wire.commands.load(Ordering::SeqCst)
    }
}

impl Trap {
    /// Whether the action has been taken: a reply is lost or held, a request held, a connection
    /// about to be cut.
    pub fn sprung(&self) -> bool {
        self.sprung.load(Ordering::SeqCst)
    }

    /// Waits until the action has been taken. It blocks: on a current-thread runtime await
    /// [`sprung`](Self::sprung) by [`eventually_async`](crate::eventually_async) instead.
    ///
    /// # Panics
    ///
    /// When `deadline` has passed.
    #[track_caller]
    pub fn wait(&self, deadline: Duration) {
        eventually(deadline, "the proxy meets the command", || self.sprung());
    }

    fn spring(&self) {
        self.sprung.store(true, Ordering::SeqCst);
    }
}

/// Matches a command by its name, in any case.
pub fn named(name: &'static str) -> impl FnMut(&Command) -> bool + Send + 'static {
    move |command| command.is(name)
}

/// The commands for locks that twemproxy accepts: commands on keys, and scripts with at least one key.
pub fn nutcracker(command: &Command) -> bool {
    const KNOWN: [&str; 10] =
        ["AUTH", "PING", "GET", "MGET", "SET", "DEL", "PEXPIRE", "PTTL", "EXISTS", "QUIT"];
    let is_script = command.is("EVAL") || command.is("EVALSHA");
    KNOWN.iter().any(|name| command.is(name)) || (is_script && command.arg(2) != "0")
}

fn nth(n: usize) -> impl FnMut(&Command) -> bool + Send + 'static {
    let mut seen = 0;
    move |_| {
        seen += 1;
        seen == n
    }
}

impl Command {
    /// Whether this is its name, in any case.
    pub fn is(&self, name: &str) -> bool {
        self.args.first().is_some_and(|arg| arg.eq_ignore_ascii_case(name.as_bytes()))
    }

    /// Whether `arg` is one of its arguments, e.g. the key of a script.
    pub fn mentions(&self, arg: &str) -> bool {
        self.args.iter().skip(1).any(|it| it == arg.as_bytes())
    }

    /// The `n`-th argument as text, 0 being the command's name; empty where there is none.
    pub fn arg(&self, n: usize) -> Cow<'_, str> {
        self.args.get(n).map_or(Cow::Borrowed(""), |arg| String::from_utf8_lossy(arg))
    }

    /// All of it, the name first.
    pub fn args(&self) -> &[Vec<u8>] {
        &self.args
    }

    fn of(value: &Value) -> Option<Self> {
        let bulk = |item: &Value| match item {
            Value::Bulk(bytes) => Some(bytes.clone()),
            _ => None,
        };
        let args: Vec<_> = value.items().iter().map(bulk).collect::<Option<_>>()?;
        (!args.is_empty()).then_some(Self { args })
    }
}

/// The state that the threads of the test and of the proxy share.
#[derive(Default)]
struct Wire {
    upstream: AtomicU16,
    gates: watch::Sender<Gates>,
    /// What clients have sent while it was held.
    held: Mutex<Vec<u8>>,
    delays: Mutex<Delays>,
    rules: Mutex<Vec<Rule>>,
    known: Mutex<Option<Known>>,
    hang_ups: AtomicUsize,
    refuse: AtomicBool,
    refusals: AtomicUsize,
    connections: AtomicUsize,
    open: AtomicUsize,
    commands: AtomicUsize,
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("gates", &self.gates).finish_non_exhaustive()
    }
}

impl Wire {
    /// The rule that this command triggers, taken out. Each rule sees each command, so that
    /// counting ones count right.
    fn rule_for(&self, command: &Command) -> Option<Rule> {
        let mut rules = self.rules.lock().unwrap();
        let mut hit = None;
        for (i, rule) in rules.iter_mut().enumerate() {
            if (rule.matches)(command) && hit.is_none() {
                hit = Some(i);
            }
        }
        hit.map(|i| rules.remove(i))
    }

    fn note_held(&self, bytes: &[u8]) {
        if self.gates.borrow().held_to_server {
            self.held.lock().unwrap().extend_from_slice(bytes);
        }
    }

    fn hold_parcel(&self) -> Parcel {
        Parcel::Hold { releases: self.gates.borrow().releases }
    }

    fn due(&self, direction: Direction) -> Instant {
        let delays = self.delays.lock().unwrap();
        Instant::now()
            + match direction {
                Direction::ToServer => delays.to_server,
                Direction::ToClient => delays.to_client,
            }
    }
}

#[derive(Debug, Default)]
struct Gates {
    held_to_server: bool,
    held_to_client: bool,
    releases: u64,
    cuts: u64,
}

impl Gates {
    fn held(&mut self, direction: Direction) -> &mut bool {
        match direction {
            Direction::ToServer => &mut self.held_to_server,
            Direction::ToClient => &mut self.held_to_client,
        }
    }
}

#[derive(Debug, Default)]
struct Delays {
    to_server: Duration,
    to_client: Duration,
}

type Known = Box<dyn Fn(&Command) -> bool + Send>;

struct Rule {
    matches: Box<dyn FnMut(&Command) -> bool + Send>,
    action: Action,
    trap: Trap,
}

/// What a direction's reader hands to its writer.
enum Parcel {
    Bytes {
        due: Instant,
        bytes: Vec<u8>,
    },
    /// Wait for a release after the one with this number.
    Hold {
        releases: u64,
    },
    End(End),
}

/// What the next reply of a connection belongs to.
enum Expected {
    Reply(Option<(Action, Trap)>),
    /// SUBSCRIBE and its kin: so many confirmations, which are pushes in RESP3.
    Confirmations(usize),
}

async fn serve(listener: std::net::TcpListener, wire: &Arc<Wire>) {
    let listener = TcpListener::from_std(listener).expect("a listener can be registered");
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        if wire.refuse.load(Ordering::SeqCst) {
            wire.refusals.fetch_add(1, Ordering::SeqCst);
            reset(client);
            continue;
        }
        wire.connections.fetch_add(1, Ordering::SeqCst);
        let wire = Arc::clone(wire);
        tokio::spawn(async move {
            wire.open.fetch_add(1, Ordering::SeqCst);
            carry(client, &wire).await;
            wire.open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

async fn carry(mut client: TcpStream, wire: &Wire) {
    // Before anything is awaited, so that no cut is missed.
    let mut cuts = wire.gates.subscribe();
    let before = cuts.borrow_and_update().cuts;
    let upstream = wire.upstream.load(Ordering::SeqCst);
    let Ok(mut server) = TcpStream::connect((Ipv4Addr::LOCALHOST, upstream)).await else {
        return reset(client);
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let expected = Mutex::new(VecDeque::new());
    let end = {
        let (client_in, client_out) = client.split();
        let (server_in, server_out) = server.split();
        let (to_server, for_server) = mpsc::unbounded_channel();
        let (to_client, for_client) = mpsc::unbounded_channel();
        let commands = async {
            tokio::try_join!(
                read_commands(client_in, to_server, wire, &expected),
                write(server_out, for_server, wire, Direction::ToServer),
            )
        };
        let replies = async {
            let (stream, ()) = tokio::try_join!(
                read_replies(server_in, to_client, wire, &expected),
                write(client_out, for_client, wire, Direction::ToClient),
            )?;
            match stream {
                Stream::Whole => Err(End::Close),
                // What comes behind a lost reply is lost too, also the end.
                Stream::Stalled => Ok(()),
            }
        };
        tokio::select! {
            _ = cuts.wait_for(|gates| gates.cuts != before) => End::Reset,
            ended = async { tokio::try_join!(commands, replies) } => {
                ended.err().unwrap_or(End::Close)
            }
        }
    };
    if end == End::Reset {
        reset(client);
    }
}

/// How a connection ends.
#[derive(PartialEq)]
enum End {
    Close,
    Reset,
}

/// The state of the replies of a connection.
enum Stream {
    Whole,
    Stalled,
}

/// Ends when the client does, also by a reset: what it has sent before is still under way.
async fn read_commands(
    mut client: ReadHalf<'_>,
    to_server: mpsc::UnboundedSender<Parcel>,
    wire: &Wire,
    expected: &Mutex<VecDeque<Expected>>,
) -> Result<(), End> {
    // The writer outlives this only to forward what is left.
    let send = |parcel| drop(to_server.send(parcel));
    let mut frames = Frames::default();
    while frames.fill(&mut client).await.is_ok_and(|len| len > 0) {
        for (value, bytes) in frames.by_ref() {
            if let Some(command) = value.as_ref().and_then(Command::of) {
                let known = wire.known.lock().unwrap().as_ref().is_none_or(|known| known(&command));
                if !known {
                    wire.hang_ups.fetch_add(1, Ordering::SeqCst);
                    send(Parcel::End(End::Close));
                    return Ok(());
                }
                let mut on_reply = None;
                if let Some(Rule { action, trap, .. }) = wire.rule_for(&command) {
                    match action {
                        Action::HoldRequest => send(wire.hold_parcel()),
                        Action::CutBeforeForward => send(Parcel::End(End::Reset)),
                        Action::DropReply
                        | Action::HoldReply
                        | Action::CutBeforeReply
                        | Action::CutInsideReply
                        | Action::AnswerWith(_) => on_reply = Some((action, trap.clone())),
                    }
                    if on_reply.is_none() {
                        trap.spring();
                    }
                }
                expected.lock().unwrap().push_back(Expected::by(&command, on_reply));
                wire.commands.fetch_add(1, Ordering::SeqCst);
            }
            wire.note_held(&bytes);
            send(Parcel::Bytes { due: wire.due(Direction::ToServer), bytes });
        }
    }
    Ok(())
}

async fn read_replies(
    mut server: ReadHalf<'_>,
    to_client: mpsc::UnboundedSender<Parcel>,
    wire: &Wire,
    expected: &Mutex<VecDeque<Expected>>,
) -> Result<Stream, End> {
    let send = |parcel| drop(to_client.send(parcel));
    let mut stream = Stream::Whole;
    let mut frames = Frames::default();
    while frames.fill(&mut server).await.is_ok_and(|len| len > 0) {
        for (value, mut bytes) in frames.by_ref() {
            let mut end = None;
            let hit = value.and_then(|value| answered(&value, &mut expected.lock().unwrap()));
            if let Some((action, trap)) = hit {
                match action {
                    Action::DropReply => stream = Stream::Stalled,
                    Action::HoldReply => send(wire.hold_parcel()),
                    Action::CutBeforeReply => send(Parcel::End(End::Reset)),
                    Action::CutInsideReply => {
                        bytes.truncate(bytes.len() / 2);
                        end = Some(Parcel::End(End::Close));
                    }
                    Action::AnswerWith(other) => bytes = other.to_vec(),
                    Action::HoldRequest | Action::CutBeforeForward => {}
                }
                trap.spring();
            }
            if matches!(stream, Stream::Whole) {
                send(Parcel::Bytes { due: wire.due(Direction::ToClient), bytes });
            }
            if let Some(end) = end {
                send(end);
            }
        }
    }
    Ok(stream)
}

async fn write(
    mut out: WriteHalf<'_>,
    mut parcels: mpsc::UnboundedReceiver<Parcel>,
    wire: &Wire,
    direction: Direction,
) -> Result<(), End> {
    let mut gates = wire.gates.subscribe();
    let open = |gates: &Gates| match direction {
        Direction::ToServer => !gates.held_to_server,
        Direction::ToClient => !gates.held_to_client,
    };
    while let Some(parcel) = parcels.recv().await {
        match parcel {
            Parcel::End(end) => return Err(end),
            Parcel::Hold { releases } => {
                let _ = gates.wait_for(|gates| gates.releases > releases).await;
            }
            Parcel::Bytes { due, bytes } => {
                tokio::time::sleep_until(due.into()).await;
                let _ = gates.wait_for(open).await;
                // A side that is gone needs nothing more, but the other may still.
                let _ = out.write_all(&bytes).await;
            }
        }
    }
    // The end of the stream travels like the rest of it.
    let _ = gates.wait_for(open).await;
    if direction == Direction::ToServer {
        let _ = out.shutdown().await;
    }
    Ok(())
}

impl Expected {
    fn by(command: &Command, on_reply: Option<(Action, Trap)>) -> Self {
        const SUBSCRIBE: [&str; 6] = [
            "SUBSCRIBE",
            "PSUBSCRIBE",
            "SSUBSCRIBE",
            "UNSUBSCRIBE",
            "PUNSUBSCRIBE",
            "SUNSUBSCRIBE",
        ];
        if SUBSCRIBE.iter().any(|name| command.is(name)) {
            return Self::Confirmations((command.args.len() - 1).max(1));
        }
        Self::Reply(on_reply)
    }
}

/// Matches a frame from the server with the command it answers; the action for it, if any.
fn answered(frame: &Value, expected: &mut VecDeque<Expected>) -> Option<(Action, Trap)> {
    let kind = frame.items().first().map(Value::to_string).unwrap_or_default();
    if let Some(Expected::Confirmations(left)) = expected.front_mut() {
        let refused = matches!(frame, Value::Error(_));
        *left -= usize::from(kind.ends_with("subscribe"));
        if refused || *left == 0 {
            expected.pop_front();
        }
        return None;
    }
    // RESP2 has no pushes: messages of a subscription come as arrays.
    if matches!(frame, Value::Push(_))
        || matches!(kind.as_str(), "message" | "pmessage" | "smessage")
    {
        return None;
    }
    match expected.pop_front() {
        Some(Expected::Reply(action)) => action,
        _ => None,
    }
}

/// Cuts a byte stream into RESP values; what is not RESP passes in the pieces it came in.
#[derive(Default)]
struct Frames {
    received: Vec<u8>,
    opaque: bool,
}

impl Frames {
    async fn fill(&mut self, from: &mut ReadHalf<'_>) -> io::Result<usize> {
        from.read_buf(&mut self.received).await
    }
}

impl Iterator for Frames {
    type Item = (Option<Value>, Vec<u8>);

    fn next(&mut self) -> Option<Self::Item> {
        if self.received.is_empty() {
            return None;
        }
        if !self.opaque {
            match Value::parse(&self.received) {
                Ok(Some((value, len))) => {
                    return Some((Some(value), self.received.drain(..len).collect()));
                }
                Ok(None) => return None,
                Err(_) => self.opaque = true,
            }
        }
        Some((None, std::mem::take(&mut self.received)))
    }
}

/// Closes with RST instead of FIN.
fn reset(stream: TcpStream) {
    let _ = rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
    drop(stream);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(args: &[&str]) -> Command {
        Command { args: args.iter().map(|arg| arg.as_bytes().to_vec()).collect() }
    }

    fn frame(kind: &str, of: fn(Vec<Value>) -> Value) -> Value {
        of(vec![Value::Text(kind.into()), Value::Text("k".into())])
    }

    #[test]
    fn only_its_reply_answers_a_command() {
        let trap = Trap { sprung: Arc::default() };
        let armed = || Some((Action::DropReply, trap.clone()));
        for messages in [Value::Push, Value::Array] {
            let mut expected = VecDeque::from([
                Expected::by(&command(&["SUBSCRIBE", "a", "b"]), None),
                Expected::by(&command(&["GET", "k"]), armed()),
            ]);
            for kind in ["subscribe", "message", "subscribe", "message"] {
                assert!(answered(&frame(kind, messages), &mut expected).is_none());
            }
            assert!(answered(&frame("invalidate", Value::Push), &mut expected).is_none());
            assert_eq!(expected.len(), 1);
            assert!(answered(&Value::Nil, &mut expected).is_some());
        }
    }

    #[test]
    fn a_refused_subscription_is_answered_by_its_error() {
        let mut expected = VecDeque::from([Expected::by(&command(&["SUBSCRIBE", "a", "b"]), None)]);
        assert!(answered(&Value::Error("NOPERM".into()), &mut expected).is_none());
        assert!(expected.is_empty());
    }
}
