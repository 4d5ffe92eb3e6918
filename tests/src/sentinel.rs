//! A master, two replicas, and three sentinels that watch them.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::eventually::eventually;
use crate::folder::new_folder;
use crate::process::Process;
use crate::resp::{self, Value};
use crate::server::{Config, RedisServer, exchange, free_port, listener};

/// The name of the master at the sentinels.
pub const SERVICE: &str = "mymaster";

/// A former master becomes a replica after four publish periods. Between failovers a test need not wait for that.
const FAST_PERIODS: [(&str, &str); 3] =
    [("INFO-PERIOD", "500"), ("PUBLISH-PERIOD", "200"), ("ASK-PERIOD", "200")];
const DEFAULT_PERIODS: [(&str, &str); 3] =
    [("INFO-PERIOD", "10000"), ("PUBLISH-PERIOD", "2000"), ("ASK-PERIOD", "1000")];

const SENTINELS: usize = 3;
const READY: Duration = Duration::from_secs(30);

/// Servers of which one is the master, and their sentinels.
#[derive(Debug)]
pub struct Watched {
    /// The first one is the master to begin with.
    pub servers: Vec<RedisServer>,
    /// All with the same configuration.
    pub sentinels: Vec<Sentinel>,
    passwords: Passwords,
}

/// The passwords of a [`Watched`]; none by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Passwords {
    /// Of the default user of master and replicas.
    pub server: Option<&'static str>,
    /// Of the default user of the sentinels.
    pub sentinel: Option<&'static str>,
}

/// One `redis-server --sentinel`. It ends like a [`RedisServer`].
#[derive(Debug)]
pub struct Sentinel {
    process: Process,
    port: u16,
    password: Option<&'static str>,
    dir: TempDir,
}

impl Watched {
    /// Without passwords.
    ///
    /// # Panics
    ///
    /// When it is not ready for a failover within 30 s.
    #[track_caller]
    pub fn start() -> Self {
        Self::start_with(Passwords::default())
    }

    /// With these passwords.
    ///
    /// # Panics
    ///
    /// When it is not ready for a failover within 30 s.
    #[track_caller]
    pub fn start_with(passwords: Passwords) -> Self {
        let config = || {
            let config = RedisServer::builder().arg("repl-diskless-sync-delay", "0");
            match passwords.server {
                Some(password) => config.password(password).arg("masterauth", password),
                None => config,
            }
        };
        let master = config().start();
        let follow = format!("replicaof 127.0.0.1 {}", master.port());
        let replica = |config: Config| config.config_line(&follow).start();
        let servers = vec![replica(config()), replica(config())];
        let servers: Vec<_> = std::iter::once(master).chain(servers).collect();
        eventually(READY, "the replicas are in step", || is_followed(&servers[0], 2));
        let port = servers[0].port();
        let sentinels = (0..SENTINELS).map(|_| Sentinel::start(port, passwords)).collect();
        let watched = Self { servers, sentinels, passwords };
        watched.wait_until_ready();
        watched
    }

    /// The same, with a master that may be silent for a minute: a busy machine causes no failover.
    ///
    /// # Panics
    ///
    /// When a sentinel does not answer.
    #[track_caller]
    #[must_use]
    pub fn without_failover(self) -> Self {
        let command = ["SENTINEL", "SET", SERVICE, "down-after-milliseconds", "60000"];
        for sentinel in &self.sentinels {
            let answer = sentinel.ask(&command).expect("a sentinel answers");
            assert_eq!(answer.to_string(), "OK");
        }
        self
    }

    /// The URL with all passwords. What the sentinels' one is percent-encoded to is left to the test.
    pub fn url(&self) -> String {
        self.url_with(self.passwords)
    }

    /// The same with other passwords.
    pub fn url_with(&self, passwords: Passwords) -> String {
        let login = passwords.server.map_or_else(String::new, |password| format!(":{password}@"));
        let hosts: Vec<_> =
            self.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port)).collect();
        let query = passwords
            .sentinel
            .map_or_else(String::new, |password| format!("?sentinel_password={password}"));
        format!("redis+sentinel://{login}{}/{SERVICE}{query}", hosts.join(","))
    }

    /// The server that most sentinels name; `None` between two.
    pub fn master(&self) -> Option<&RedisServer> {
        let named: Vec<_> = self.sentinels.iter().filter_map(Sentinel::master).collect();
        let is_named = |server: &&RedisServer| {
            named.iter().filter(|port| **port == server.port()).count() * 2 > SENTINELS
        };
        self.servers.iter().find(is_named)
    }

    /// Waits until a failover could succeed: all sentinels name one master and know each other, and the
    /// other servers follow it.
    ///
    /// # Panics
    ///
    /// When that is not so within 30 s.
    #[track_caller]
    pub fn wait_until_ready(&self) {
        let start = Instant::now();
        self.set_periods(&FAST_PERIODS);
        while !self.is_ready() {
            assert!(start.elapsed() < READY, "not ready for a failover:\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
        self.set_periods(&DEFAULT_PERIODS);
    }

    /// Servers before Redis 7.0 do not know the command, and keep their periods.
    fn set_periods(&self, periods: &[(&str, &str)]) {
        for sentinel in &self.sentinels {
            let args = periods.iter().flat_map(|(name, millis)| [*name, *millis]);
            let command: Vec<_> = ["SENTINEL", "DEBUG"].into_iter().chain(args).collect();
            // A killed or paused sentinel does not answer.
            let _ = sentinel.ask(&command);
        }
    }

    /// Waits until the sentinels have made another server than `old` the master, and returns it. This is
    /// noticed within milliseconds.
    ///
    /// # Panics
    ///
    /// When they have not within 30 s.
    #[track_caller]
    pub fn wait_for_another_than(&self, old: &RedisServer) -> &RedisServer {
        let start = Instant::now();
        loop {
            if let Some(master) = self.master()
                && master.port() != old.port()
                && role(master) == "master"
            {
                return master;
            }
            assert!(start.elapsed() < READY, "no failover:\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// What the sentinels have logged.
    pub fn logs(&self) -> String {
        self.sentinels.iter().map(|sentinel| sentinel.log() + "\n").collect()
    }

    fn is_ready(&self) -> bool {
        let ports: Vec<_> = self.sentinels.iter().map(Sentinel::master).collect();
        let all_agree = ports.iter().all(|port| port.is_some() && *port == ports[0]);
        let Some(master) = self.master().filter(|_| all_agree) else { return false };
        let knows_all = |sentinel: &Sentinel| {
            sentinel.field("num-other-sentinels") == "2" && sentinel.sees_replicas(2)
        };
        is_followed(master, self.servers.len() - 1) && self.sentinels.iter().all(knows_all)
    }
}

impl Sentinel {
    fn start(master: u16, passwords: Passwords) -> Self {
        for _ in 0..20 {
            let sentinel = Self::spawn(free_port(), master, passwords);
            let start = Instant::now();
            while start.elapsed() < READY && sentinel.process.exit_status().is_none() {
                if sentinel.master() == Some(master) {
                    return sentinel;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            let log = sentinel.log();
            assert!(log.contains("Address already in use"), "no sentinel:\n{log}");
        }
        panic!("no free port in 20 tries");
    }

    fn spawn(port: u16, master: u16, passwords: Passwords) -> Self {
        let dir = new_folder();
        let mut lines = vec![
            format!("port {port}"),
            "bind 127.0.0.1".into(),
            format!("dir {}", dir.path().display()),
            format!("sentinel monitor {SERVICE} 127.0.0.1 {master} 2"),
            format!("sentinel down-after-milliseconds {SERVICE} 1000"),
            format!("sentinel failover-timeout {SERVICE} 5000"),
        ];
        if let Some(password) = passwords.server {
            lines.push(format!("sentinel auth-pass {SERVICE} {password}"));
        }
        if let Some(password) = passwords.sentinel {
            lines.push(format!("requirepass {password}"));
            lines.push(format!("sentinel sentinel-pass {password}"));
        }
        let config = dir.path().join("sentinel.conf");
        fs::write(&config, lines.join("\n") + "\n").expect("the temporary directory takes files");
        let log = || {
            let log = File::options().create(true).append(true).open(dir.path().join("log"));
            Stdio::from(log.expect("the temporary directory takes files"))
        };
        let mut command = Process::command("redis-server");
        command.arg(&config).arg("--sentinel");
        command.stdin(Stdio::null()).stdout(log()).stderr(log());
        let process = Process::spawn(command)
            .unwrap_or_else(|error| panic!("cannot start redis-server, run tests/run.sh: {error}"));
        Self { process, port, password: passwords.sentinel, dir }
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// SIGSTOP, see [`Process::pause`].
    pub fn pause(&self) {
        self.process.pause();
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.process.resume();
    }

    /// SIGKILL.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// The port of the master that it names.
    pub fn master(&self) -> Option<u16> {
        let reply = self.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE]).ok()?;
        reply.items().get(1)?.to_string().parse().ok()
    }

    /// Runs a command over a connection of its own.
    pub fn ask(&self, args: &[&str]) -> io::Result<Value> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        // It may be paused.
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        if let Some(password) = self.password {
            exchange(&mut stream, &["AUTH", password])?;
        }
        exchange(&mut stream, args)
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    fn field(&self, name: &str) -> String {
        let reply = self.ask(&["SENTINEL", "MASTER", SERVICE]);
        reply.map_or_else(|_| String::new(), |reply| field_of(&reply, name))
    }

    /// Whether it sees `count` healthy replicas.
    fn sees_replicas(&self, count: usize) -> bool {
        let Ok(reply) = self.ask(&["SENTINEL", "REPLICAS", SERVICE]) else { return false };
        let is_well = |replica: &&Value| {
            field_of(replica, "flags") == "slave" && field_of(replica, "master-link-status") == "ok"
        };
        reply.items().iter().filter(is_well).count() == count
    }
}

/// `master` or `slave`, as the server sees it; anything else if it does not answer.
pub fn role(server: &RedisServer) -> String {
    if !server.is_running() {
        return "down".to_owned();
    }
    server.query(&["ROLE"]).items().first().map_or_else(String::new, ToString::to_string)
}

fn is_followed(master: &RedisServer, replicas: usize) -> bool {
    let info = master.cli(&["INFO", "replication"]);
    info.contains("role:master") && info.matches("state=online").count() == replicas
}

fn field_of(reply: &Value, name: &str) -> String {
    let field = reply.items().chunks_exact(2).find(|field| field[0].to_string() == name);
    field.map_or_else(String::new, |field| field[1].to_string())
}

/// A server that answers like a sentinel, with answers set by the test. It supports only RESP2.
#[derive(Debug)]
pub struct FakeSentinel {
    port: u16,
    says: Arc<Mutex<Says>>,
}

#[derive(Clone, Copy, Debug)]
struct Says {
    master: Option<u16>,
    epoch: u64,
}

impl FakeSentinel {
    /// Names the server at this port as the master.
    ///
    /// # Panics
    ///
    /// When there is no port to listen at.
    #[track_caller]
    pub fn start(master: &RedisServer) -> Self {
        let listener = listener();
        let port = listener.local_addr().expect("it listens").port();
        let says = Says { master: Some(master.port()), epoch: 0 };
        let says = Arc::new(Mutex::new(says));
        let shared = says.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let says = shared.clone();
                std::thread::spawn(move || answer_all(stream, &says));
            }
        });
        Self { port, says }
    }

    /// Names another master from now on, as of this configuration epoch.
    pub fn say(&self, master: &RedisServer, epoch: u64) {
        let mut says = self.says.lock().unwrap_or_else(PoisonError::into_inner);
        (says.master, says.epoch) = (Some(master.port()), epoch);
    }

    /// `redis+sentinel://` of these.
    pub fn url(all: &[&Self]) -> String {
        let hosts: Vec<_> = all.iter().map(|fake| format!("127.0.0.1:{}", fake.port)).collect();
        format!("redis+sentinel://{}/{SERVICE}", hosts.join(","))
    }
}

fn answer_all(mut stream: TcpStream, says: &Mutex<Says>) {
    let mut received = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        while let Ok(Some((request, len))) = Value::parse(&received) {
            received.drain(..len);
            let says = *says.lock().unwrap_or_else(PoisonError::into_inner);
            if stream.write_all(&answer(&request, says)).is_err() {
                return;
            }
        }
        match stream.read(&mut chunk) {
            Ok(len) if len > 0 => received.extend_from_slice(&chunk[..len]),
            _ => return,
        }
    }
}

fn answer(request: &Value, says: Says) -> Vec<u8> {
    let word = |at: usize| request.items().get(at).map_or_else(String::new, Value::to_string);
    match (word(0).as_str(), word(1).as_str()) {
        ("SENTINEL", "MASTER") => {
            resp::command(&["name", SERVICE, "config-epoch", &says.epoch.to_string()])
        }
        ("SENTINEL", _) => match says.master {
            Some(port) if word(2) == SERVICE => resp::command(&["127.0.0.1", &port.to_string()]),
            _ => b"*-1\r\n".to_vec(),
        },
        _ => format!("-ERR unknown command '{}'\r\n", word(0)).into_bytes(),
    }
}
