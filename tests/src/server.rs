//! A private Redis server per test.

use std::collections::BTreeSet;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::folder::new_folder;
use crate::process::Process;
use crate::resp::{self, Value};
use crate::tls::{Tls, TlsFiles};

const START_DEADLINE: Duration = Duration::from_secs(60);
const PORT_TAKEN: &str = "Address already in use";
const REPLY_DEADLINE: Duration = Duration::from_secs(30);

/// A `redis-server` child process on a port and in a directory of its own, without persistence
/// unless told otherwise. It ends with this value, with a panicking test, and with a killed one.
#[derive(Debug)]
pub struct RedisServer {
    process: Mutex<Process>,
    admin: Mutex<Option<TcpStream>>,
    config: Config,
    port: u16,
    tls_port: Option<u16>,
    tls_files: Option<TlsFiles>,
    dir: TempDir,
}

/// What a [`RedisServer`] is started with.
#[derive(Clone, Debug, Default)]
pub struct Config {
    program: Option<PathBuf>,
    lines: Vec<String>,
    password: Option<String>,
    tls: Option<Tls>,
    env: Vec<(String, OsString)>,
}

impl Config {
    /// Another server than the `redis-server` of this machine; see [`versions`](crate::versions).
    pub fn program(mut self, program: &Path) -> Self {
        self.program = Some(program.into());
        self
    }

    /// A directive, e.g. `.arg("appendonly", "yes")`.
    pub fn arg(self, name: &str, value: &str) -> Self {
        let value = if value.is_empty() { "\"\"" } else { value };
        self.config_line(&format!("{name} {value}"))
    }

    /// A line of redis.conf, e.g. `user worker on >secret ~* +@all`.
    pub fn config_line(mut self, line: &str) -> Self {
        self.lines.push(line.into());
        self
    }

    /// Requires this password of the default user; [`RedisServer::url`] holds it.
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.into());
        self
    }

    /// Serves TLS too; [`RedisServer::url`] is then `rediss://`.
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Sets an environment variable of the server process.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.into(), value.as_ref().into()));
        self
    }

    /// Starts the server and waits until it answers.
    ///
    /// # Panics
    ///
    /// With the server's log, when it does not answer within a minute.
    #[track_caller]
    pub fn start(self) -> RedisServer {
        for _ in 0..20 {
            match RedisServer::try_start(&self) {
                Ok(server) => return server,
                // Another process took the port before the server did.
                Err(log) if log.contains(PORT_TAKEN) => {}
                Err(log) => panic!("redis-server did not start:\n{log}"),
            }
        }
        panic!("no free port in 20 tries");
    }

    fn write(&self, dir: &TempDir, port: u16, tls_port: Option<u16>, files: Option<&TlsFiles>) {
        let mut lines = vec![
            format!("port {port}"),
            "bind 127.0.0.1".into(),
            format!("dir {}", dir.path().display()),
            "save \"\"".into(),
            "appendonly no".into(),
        ];
        lines.extend(tls_port.map(|port| format!("tls-port {port}")));
        if let (Some(tls), Some(files)) = (&self.tls, files) {
            lines.extend(tls.config(files));
        }
        lines.extend(self.password.as_ref().map(|password| format!("requirepass \"{password}\"")));
        lines.extend(self.lines.iter().cloned());
        fs::write(dir.path().join("redis.conf"), lines.join("\n") + "\n")
            .expect("the temporary directory takes files");
    }
}

impl RedisServer {
    /// A server with the default configuration.
    ///
    /// # Panics
    ///
    /// Like [`Config::start`].
    #[track_caller]
    pub fn start() -> Self {
        Self::builder().start()
    }

    /// A server to configure.
    pub fn builder() -> Config {
        Config::default()
    }

    /// `redis://` or, with TLS, `rediss://`, with the password.
    pub fn url(&self) -> String {
        match self.tls_port {
            Some(port) => format!("rediss://{}127.0.0.1:{port}", self.credentials()),
            None => self.url_at(self.port),
        }
    }

    /// The URL without TLS, with another port: that of a proxy.
    pub fn url_at(&self, port: u16) -> String {
        format!("redis://{}127.0.0.1:{port}", self.credentials())
    }

    /// The port without TLS.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The port with TLS.
    pub fn tls_port(&self) -> Option<u16> {
        self.tls_port
    }

    /// The files behind TLS.
    ///
    /// # Panics
    ///
    /// When the server was started without [`Config::tls`].
    #[track_caller]
    pub fn tls_files(&self) -> &TlsFiles {
        self.tls_files.as_ref().expect("the server was started with TLS")
    }

    /// The password.
    pub fn password(&self) -> Option<&str> {
        self.config.password.as_deref()
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.process().pid()
    }

    /// Whether the process runs; a paused one does.
    pub fn is_running(&self) -> bool {
        self.process().exit_status().is_none()
    }

    /// How often it has run `command`, in small letters; with its subcommand, if it has one, as in `cluster|slots`.
    pub fn calls(&self, command: &str) -> u64 {
        self.counted("commandstats", &format!("cmdstat_{command}:calls="))
    }

    /// How often it has answered with an error of this code.
    pub fn errors(&self, code: &str) -> u64 {
        self.counted("errorstats", &format!("errorstat_{code}:count="))
    }

    /// The number behind `start` in a line of `INFO section`, zero without such a line.
    fn counted(&self, section: &str, start: &str) -> u64 {
        let stats = self.cli(&["INFO", section]);
        let counted = stats.lines().find_map(|line| line.strip_prefix(start));
        let number = counted.and_then(|rest| rest.split(',').next());
        number.map_or(0, |number| number.trim().parse().expect("a number"))
    }

    /// SIGSTOP: connections stay, the kernel takes new ones, nothing is answered.
    pub fn pause(&self) {
        self.process().pause();
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.process().resume();
    }

    /// Makes the server close every connection except the one of this harness.
    pub fn kill_clients(&self) {
        // Connections with subscriptions are of another type.
        for kind in ["normal", "pubsub"] {
            self.cli(&["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"]);
        }
    }

    /// SIGKILL, and waits until the process is gone. [`restart`](Self::restart) brings it back.
    pub fn kill(&self) {
        self.process().kill();
        self.admin().take();
    }

    /// Kills it if it runs, and starts it on the same port and directory: with the data that it
    /// has persisted, by default none.
    ///
    /// # Panics
    ///
    /// With the server's log, when it does not answer within a minute.
    #[track_caller]
    pub fn restart(&self) {
        self.kill();
        *self.process() = spawn(&self.dir, &self.config);
        if let Err(log) = self.wait_until_ready() {
            panic!("redis-server did not start again:\n{log}");
        }
    }

    /// Runs a command over a connection of its own, without TLS, and returns the reply like
    /// `redis-cli` prints it: `(nil)` for nil, arrays one element a line, errors as their text.
    ///
    /// A command is sent again when the connection turns out to have been closed.
    ///
    /// # Panics
    ///
    /// When the server does not answer within 30 s.
    #[track_caller]
    pub fn cli<A: AsRef<[u8]>>(&self, args: &[A]) -> String {
        self.query(args).to_string()
    }

    /// [`cli`](Self::cli) with the reply as a value.
    ///
    /// # Panics
    ///
    /// When the server does not answer within 30 s.
    #[track_caller]
    pub fn query<A: AsRef<[u8]>>(&self, args: &[A]) -> Value {
        match self.ask(args) {
            Ok(reply) => reply,
            Err(error) => panic!("redis-server on port {} did not answer: {error}", self.port),
        }
    }

    /// A new connection, authenticated, without TLS. Reads time out after 30 s.
    pub fn connect(&self) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(REPLY_DEADLINE))?;
        if let Some(password) = self.password() {
            exchange(&mut stream, &["AUTH", password])?;
        }
        Ok(stream)
    }

    /// What the server has logged since its first start.
    pub fn log(&self) -> String {
        fs::read_to_string(log_path(&self.dir)).unwrap_or_default()
    }

    /// Its working directory.
    pub fn dir(&self) -> PathBuf {
        self.dir.path().into()
    }

    fn try_start(config: &Config) -> Result<Self, String> {
        let dir = new_folder();
        let port = free_port();
        let tls_port = config.tls.is_some().then(free_port);
        let tls_files = config.tls.as_ref().map(|tls| tls.write(dir.path()));
        config.write(&dir, port, tls_port, tls_files.as_ref());
        let server = Self {
            process: Mutex::new(spawn(&dir, config)),
            admin: Mutex::new(None),
            config: config.clone(),
            port,
            tls_port,
            tls_files,
            dir,
        };
        server.wait_until_ready()?;
        Ok(server)
    }

    /// The log, when it does not get ready.
    fn wait_until_ready(&self) -> Result<(), String> {
        let start = Instant::now();
        while !self.is_ready() {
            if !self.is_running() {
                return Err(self.log());
            }
            if start.elapsed() > START_DEADLINE {
                return Err(format!("no answer within {START_DEADLINE:?}\n{}", self.log()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Also checks that this server answers, and not another process on the same port.
    fn is_ready(&self) -> bool {
        let pid = format!("process_id:{}\r\n", self.pid());
        let text = |args: &[&str]| self.ask(args).map(|reply| reply.to_string());
        text(&["INFO", "server"]).is_ok_and(|info| info.contains(&pid))
            && text(&["PING"]).is_ok_and(|pong| pong == "PONG")
    }

    fn ask<A: AsRef<[u8]>>(&self, args: &[A]) -> io::Result<Value> {
        let mut admin = self.admin();
        if let Some(stream) = admin.as_mut() {
            match exchange(stream, args) {
                Err(error) if is_closed(&error) => {}
                Err(error) => {
                    // A late reply must not be taken for the next one.
                    admin.take();
                    return Err(error);
                }
                reply => return reply,
            }
        }
        admin.take();
        let mut stream = self.connect()?;
        let reply = exchange(&mut stream, args)?;
        *admin = Some(stream);
        Ok(reply)
    }

    fn credentials(&self) -> String {
        self.password().map_or_else(String::new, |password| format!(":{}@", percent(password)))
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admin(&self) -> MutexGuard<'_, Option<TcpStream>> {
        self.admin.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A server with the safest possible settings.
pub fn fit() -> Config {
    RedisServer::builder().arg("appendonly", "yes").arg("appendfsync", "always")
}

/// Sends one command and waits for its reply; pushes in between are skipped.
pub(crate) fn exchange<A: AsRef<[u8]>>(stream: &mut TcpStream, args: &[A]) -> io::Result<Value> {
    stream.write_all(&resp::command(args))?;
    let mut received = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        match Value::parse(&received) {
            Ok(Some((Value::Push(_), len))) => {
                received.drain(..len);
                continue;
            }
            Ok(Some((reply, _))) => return Ok(reply),
            Ok(None) => {}
            Err(resp::NotResp) => return Err(io::Error::other("the reply is not RESP")),
        }
        match stream.read(&mut chunk)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len => received.extend_from_slice(&chunk[..len]),
        }
    }
}

fn spawn(dir: &TempDir, config: &Config) -> Process {
    let log = || {
        let log = OpenOptions::new().create(true).append(true).open(log_path(dir));
        Stdio::from(log.expect("the temporary directory takes files"))
    };
    let program = config.program.as_deref().unwrap_or(Path::new("redis-server"));
    let mut command = Process::command(program);
    command.arg(dir.path().join("redis.conf"));
    command.stdin(Stdio::null()).stdout(log()).stderr(log());
    command.envs(config.env.iter().map(|(name, value)| (name, value)));
    Process::spawn(command).unwrap_or_else(|error| {
        panic!("cannot start {}, run tests/run.sh: {error}", program.display())
    })
}

fn log_path(dir: &TempDir) -> PathBuf {
    dir.path().join("server.log")
}

/// A free port for an additional listener.
pub fn another_port() -> u16 {
    free_port()
}

/// A listener at a free port of this machine, below the ephemeral range: there, an outgoing connection could take the
/// port of a killed server, or a client that looks for it could connect to itself. Another port with every call: a
/// client that still looks for a server of one test must not find that of another. Test programs that run at once have
/// ranges of their own, `LOCK_TEST_PORTS="first end"`.
pub fn listener() -> TcpListener {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    static RANGE: LazyLock<Range<u16>> = LazyLock::new(|| {
        let Ok(ports) = env::var("LOCK_TEST_PORTS") else { return 11_000..32_000 };
        let (first, end) =
            ports.split_once(' ').expect("LOCK_TEST_PORTS has a first port and an end");
        let port = |text: &str| text.parse().expect("LOCK_TEST_PORTS has port numbers");
        port(first)..port(end)
    });
    loop {
        let port = fastrand::u16(RANGE.clone());
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
            && GIVEN.lock().unwrap().insert(port)
        {
            return listener;
        }
    }
}

/// The port of a [`listener`] that is closed again.
pub(crate) fn free_port() -> u16 {
    listener().local_addr().expect("a bound socket has an address").port()
}

fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

/// Percent-encoded, but for unreserved characters.
pub(crate) fn percent(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}
