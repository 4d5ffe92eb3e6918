//! Private ZooKeeper servers, alone or as an ensemble of three.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::folder::new_folder;
use crate::foreign::installed;
use crate::process::Process;
use crate::server::free_port;
use crate::tls::{Tls, TlsFiles};
use crate::zookeeper_client::ZooKeeperClient;

const START_DEADLINE: Duration = Duration::from_secs(60);

/// The tick in milliseconds: sessions expire at the end of one, and the shortest session has two.
const TICK: u32 = 300;

/// A ZooKeeper server as a child process, on ports and in a directory of its own, without flushes. It ends with this value, with a
/// panicking test, and with a killed one.
#[derive(Debug)]
pub struct ZooKeeperServer {
    process: Mutex<Process>,
    port: u16,
    dir: TempDir,
    properties: Vec<String>,
    tls: Option<(u16, TlsFiles)>,
    libraries: PathBuf,
}

/// What a [`ZooKeeperServer`] is started with.
#[derive(Clone, Debug, Default)]
pub struct Config {
    settings: Vec<String>,
    properties: Vec<String>,
    port: Option<u16>,
    member: Option<usize>,
    tls: Option<Tls>,
    libraries: Option<PathBuf>,
}

impl Config {
    /// The folder with another version than [`libraries`].
    pub fn libraries(mut self, folder: impl Into<PathBuf>) -> Self {
        self.libraries = Some(folder.into());
        self
    }

    /// A line of `zoo.cfg`, e.g. `.setting("maxSessionTimeout", 4000)`.
    pub fn setting(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        self.settings.push(format!("{name}={value}"));
        self
    }

    /// A property of the Java program.
    pub fn property(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        self.properties.push(format!("-D{name}={value}"));
        self
    }

    /// Serves TLS too, on another port.
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Starts the server and waits until it answers.
    ///
    /// # Panics
    ///
    /// With the server's log, when it does not answer within a minute.
    #[track_caller]
    pub fn start(self) -> ZooKeeperServer {
        let server = self.launch();
        server.wait_until_ready();
        server
    }

    /// Starts the server as this member of an ensemble whose others are not there. Does not wait.
    ///
    /// # Panics
    ///
    /// When there is no Java.
    #[track_caller]
    pub fn start_alone(self, member: usize) -> ZooKeeperServer {
        Self { member: Some(member), ..self }.launch()
    }

    /// Starts the server.
    fn launch(self) -> ZooKeeperServer {
        let dir = new_folder();
        let port = self.port.unwrap_or_else(free_port);
        let path = dir.path().display();
        let mut lines = vec![
            format!("tickTime={TICK}"),
            format!("dataDir={path}/data"),
            format!("clientPort={port}"),
            "clientPortAddress=127.0.0.1".into(),
            "maxClientCnxns=0".into(),
            "maxSessionTimeout=60000".into(),
            "admin.enableServer=false".into(),
            "4lw.commands.whitelist=*".into(),
        ];
        fs::create_dir(dir.path().join("data")).expect("the temporary directory takes files");
        if let Some(member) = self.member {
            lines.extend(["initLimit=20".into(), "syncLimit=10".into()]);
            fs::write(dir.path().join("data/myid"), member.to_string()).expect("as above");
        }
        // A process that is killed leaves its writes to the system. The last property counts.
        let mut properties = vec!["-Dzookeeper.forceSync=no".into()];
        properties.push("-Dzookeeper.preAllocSize=512".into());
        properties.extend(self.properties);
        let tls = self.tls.map(|tls| {
            let (files, port) = (tls.write(dir.path()), free_port());
            let store = dir.path().join("server.pem");
            let pems = [&files.key, &files.certificate].map(|it| fs::read_to_string(it).unwrap());
            fs::write(&store, pems.concat()).expect("the temporary directory takes files");
            lines.push(format!("secureClientPort={port}"));
            lines.push("secureClientPortAddress=127.0.0.1".into());
            lines.push(
                "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory".into(),
            );
            lines.push(format!("ssl.keyStore.location={}", store.display()));
            lines.push("ssl.keyStore.type=PEM".into());
            lines.push(format!("ssl.trustStore.location={}", files.authority.display()));
            lines.push("ssl.trustStore.type=PEM".into());
            lines.push("ssl.clientAuth=want".into());
            (port, files)
        });
        // The last one counts.
        lines.extend(self.settings);
        fs::write(dir.path().join("zoo.cfg"), lines.join("\n") + "\n").expect("as above");
        let libraries = self.libraries.unwrap_or_else(libraries);
        let process = Mutex::new(spawn(&libraries, dir.path(), &properties));
        ZooKeeperServer { process, port, dir, properties, tls, libraries }
    }
}

impl ZooKeeperServer {
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

    /// The server of all tests of this program that neither stop it nor change it, and a path of the tree for the caller.
    ///
    /// # Panics
    ///
    /// Like [`Config::start`].
    #[track_caller]
    pub fn shared() -> (&'static Self, String) {
        static SHARED: OnceLock<ZooKeeperServer> = OnceLock::new();
        static ROOTS: AtomicUsize = AtomicUsize::new(0);
        let root = ROOTS.fetch_add(1, Ordering::Relaxed);
        (SHARED.get_or_init(Self::start), format!("/locks-{root}"))
    }

    /// The server's URL with the path `/locks`.
    pub fn url(&self) -> String {
        self.url_of("/locks")
    }

    /// The server's URL with this path.
    pub fn url_of(&self, root: &str) -> String {
        url_at(self.port, root)
    }

    /// The URL of the port with TLS, with `/locks`.
    ///
    /// # Panics
    ///
    /// When the server was started without [`Config::tls`].
    #[track_caller]
    pub fn tls_url(&self) -> String {
        format!("zookeepers://127.0.0.1:{}/locks", self.tls().0)
    }

    /// The files behind TLS.
    ///
    /// # Panics
    ///
    /// When the server was started without [`Config::tls`].
    #[track_caller]
    pub fn tls_files(&self) -> &TlsFiles {
        &self.tls().1
    }

    #[track_caller]
    fn tls(&self) -> &(u16, TlsFiles) {
        self.tls.as_ref().expect("the server was started with TLS")
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A connection with a session of its own.
    ///
    /// # Panics
    ///
    /// When the server does not answer.
    #[track_caller]
    pub fn client(&self) -> ZooKeeperClient {
        ZooKeeperClient::connect(self.port).expect("the server opens a session")
    }

    /// The names of the owners' nodes below the container of `key`, sorted by their numbers. Empty if there is no container.
    #[track_caller]
    pub fn queue(&self, root: &str, key: &str) -> Vec<String> {
        let names = self.client().children(&format!("{root}/{key}"));
        let mut names = names.unwrap_or_default();
        names.sort_by_key(|name| name.rsplit('-').next().map(str::to_owned));
        names
    }

    /// How many nodes end with a session.
    ///
    /// # Panics
    ///
    /// When the server does not say so.
    pub fn ephemerals(&self) -> usize {
        self.number("zk_ephemerals_count")
    }

    /// How many clients are connected, the one that asks included.
    ///
    /// # Panics
    ///
    /// When the server does not say so.
    pub fn connections(&self) -> usize {
        self.number("zk_num_alive_connections")
    }

    /// How many requests have come in, signs of life included.
    ///
    /// # Panics
    ///
    /// When the server does not say so.
    pub fn packets(&self) -> usize {
        self.number("zk_packets_received")
    }

    /// How many sessions there are.
    ///
    /// # Panics
    ///
    /// When the server does not say so.
    pub fn sessions(&self) -> usize {
        self.number("zk_global_sessions")
    }

    #[track_caller]
    fn number(&self, name: &str) -> usize {
        let text = self.ask("mntr", Duration::from_secs(5)).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|rest| rest.trim().parse().ok());
        number.unwrap_or_else(|| panic!("no {name} in: {text}"))
    }

    /// `leader`, `follower` or `standalone`. `None` while it does not serve.
    pub fn mode(&self) -> Option<String> {
        // A server that is starting takes the connection and does not answer.
        let text = self.ask("srvr", Duration::from_millis(200)).ok()?;
        text.lines().find_map(|line| line.strip_prefix("Mode: ")).map(str::to_owned)
    }

    fn ask(&self, command: &str, limit: Duration) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(limit))?;
        stream.write_all(command.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    }

    /// SIGSTOP.
    pub fn pause(&self) {
        self.process().pause();
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.process().resume();
    }

    /// SIGKILL. [`restart`](Self::restart) brings it back.
    pub fn kill(&self) {
        self.process().kill();
    }

    /// Kills it if it runs, and starts it on the same ports and directory.
    ///
    /// # Panics
    ///
    /// With the server's log, when it does not answer within a minute.
    #[track_caller]
    pub fn restart(&self) {
        self.relaunch();
        self.wait_until_ready();
    }

    /// Kills it, and starts it with another line in `zoo.cfg`, which overrides the former one.
    ///
    /// # Panics
    ///
    /// Like [`restart`](Self::restart).
    #[track_caller]
    pub fn restart_with(&self, name: &str, value: impl std::fmt::Display) {
        self.kill();
        let config = OpenOptions::new().append(true).open(self.dir.path().join("zoo.cfg"));
        config.and_then(|mut it| writeln!(it, "{name}={value}")).expect("the file can be written");
        self.restart();
    }

    fn relaunch(&self) {
        self.kill();
        *self.process() = spawn(&self.libraries, self.dir.path(), &self.properties);
    }

    /// Kills it, deletes all its data, and starts it again.
    ///
    /// # Panics
    ///
    /// Like [`restart`](Self::restart).
    #[track_caller]
    pub fn restart_empty(&self) {
        self.restart_after(|data| drop(fs::remove_dir_all(data.join("version-2"))));
    }

    /// Kills it, has `change` make something of its data, and starts it again.
    ///
    /// # Panics
    ///
    /// Like [`restart`](Self::restart).
    #[track_caller]
    pub fn restart_after(&self, change: impl FnOnce(&Path)) {
        self.kill();
        change(&self.dir.path().join("data"));
        self.restart();
    }

    /// What the server has logged since its first start.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("server.log")).unwrap_or_default()
    }

    #[track_caller]
    fn wait_until_ready(&self) {
        let start = Instant::now();
        let secure = self.tls.as_ref().map(|(port, _)| *port);
        let listens = |port| TcpStream::connect(("127.0.0.1", port)).is_ok();
        while self.mode().is_none() || !secure.is_none_or(listens) {
            let ended = self.process().exit_status();
            assert!(ended.is_none(), "ZooKeeper did not start:\n{}", self.log());
            let waited = start.elapsed();
            assert!(waited < START_DEADLINE, "no answer within {waited:?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Three servers that elect a leader.
#[derive(Debug)]
pub struct ZooKeeperEnsemble {
    /// The servers.
    pub servers: Vec<ZooKeeperServer>,
}

impl ZooKeeperEnsemble {
    /// Starts them, and waits until all serve.
    ///
    /// # Panics
    ///
    /// With the log of a server that does not serve within a minute.
    #[track_caller]
    pub fn start() -> Self {
        Self::start_with(&Config::default())
    }

    /// As [`start`](Self::start), with this configuration.
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start).
    #[track_caller]
    pub fn start_with(config: &Config) -> Self {
        let mut config = config.clone();
        for member in 1..=3 {
            let (peers, votes) = (free_port(), free_port());
            config =
                config.setting(&format!("server.{member}"), format!("127.0.0.1:{peers}:{votes}"));
        }
        let member = |member| Config { member: Some(member), ..config.clone() };
        let servers: Vec<_> = (1..=3).map(|number| member(number).launch()).collect();
        servers.iter().for_each(ZooKeeperServer::wait_until_ready);
        Self { servers }
    }

    /// The ensemble of all tests of this program that leave it complete. One test after the other has it.
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start).
    pub async fn shared() -> tokio::sync::MutexGuard<'static, Self> {
        static SHARED: OnceLock<tokio::sync::Mutex<ZooKeeperEnsemble>> = OnceLock::new();
        let shared = SHARED.get_or_init(|| tokio::sync::Mutex::new(Self::start())).lock().await;
        for server in &shared.servers {
            // What a test that failed has left.
            server.resume();
            if server.process().exit_status().is_some() {
                server.relaunch();
            }
        }
        shared.servers.iter().for_each(ZooKeeperServer::wait_until_ready);
        shared
    }

    /// The URL of all servers, with this path.
    pub fn url_of(&self, root: &str) -> String {
        let hosts: Vec<_> =
            self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
        format!("zookeeper://{}{root}", hosts.join(","))
    }

    /// The leader. `None` while there is none.
    pub fn leader(&self) -> Option<&ZooKeeperServer> {
        self.servers.iter().find(|server| server.mode().as_deref() == Some("leader"))
    }

    /// A server that follows the leader. `None` while there is none.
    pub fn follower(&self) -> Option<&ZooKeeperServer> {
        self.servers.iter().find(|server| server.mode().as_deref() == Some("follower"))
    }
}

/// The URL of the server, or of the proxy, at `port`.
pub fn url_at(port: u16, root: &str) -> String {
    format!("zookeeper://127.0.0.1:{port}{root}")
}

/// The folder with the server's libraries: `LOCK_TEST_ZOOKEEPER_LIBRARIES`, or the one with those of Curator.
///
/// # Panics
///
/// When it is missing.
pub fn libraries() -> PathBuf {
    if let Some(path) = std::env::var_os("LOCK_TEST_ZOOKEEPER_LIBRARIES") {
        return path.into();
    }
    installed("zookeeper")
}

fn spawn(libraries: &Path, dir: &Path, properties: &[String]) -> Process {
    let log = || {
        let log = OpenOptions::new().create(true).append(true).open(dir.join("server.log"));
        Stdio::from(log.expect("the temporary directory takes files"))
    };
    let mut command = Process::command("java");
    // A small heap, and a start that compiles little.
    command.args(["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]);
    command.args(properties).arg("-cp").arg(libraries.join("*"));
    command.arg("org.apache.zookeeper.server.quorum.QuorumPeerMain").arg(dir.join("zoo.cfg"));
    command.stdin(Stdio::null()).stdout(log()).stderr(log());
    Process::spawn(command).unwrap_or_else(|error| panic!("cannot start java: {error}"))
}
