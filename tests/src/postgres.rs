//! A private PostgreSQL server per test.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio_postgres::{NoTls, SimpleQueryMessage};

use crate::folder::{copy_folder, new_folder};
use crate::process::Process;
use crate::server::free_port;
use crate::skew::Skew;
use crate::templates::Templates;
use crate::tls::{Tls, TlsFiles};

const START_DEADLINE: Duration = Duration::from_secs(60);

/// A `postgres` child process on a port and in a directory of its own. It has the database `locks` of the user `locks`,
/// and does not flush unless told otherwise. It ends with this value, with a panicking test, and with a killed one.
#[derive(Debug)]
pub struct PostgresServer {
    process: Mutex<Process>,
    port: u16,
    dir: TempDir,
    tls_files: Option<TlsFiles>,
    env: Vec<(&'static str, PathBuf)>,
    programs: PathBuf,
}

/// What a [`PostgresServer`] is started with.
#[derive(Clone, Debug, Default)]
pub struct Config {
    settings: Vec<(String, String)>,
    standby: bool,
    tls: Option<Tls>,
    env: Vec<(&'static str, PathBuf)>,
    programs: Option<PathBuf>,
}

impl Config {
    /// The folder with the programs of another version than [`programs`].
    pub fn programs(mut self, folder: impl Into<PathBuf>) -> Self {
        self.programs = Some(folder.into());
        self
    }

    /// A setting of `postgresql.conf`, e.g. `.setting("fsync", "on")`.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Serves TLS too.
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Its clock is this one.
    pub fn clock(mut self, clock: &Skew) -> Self {
        self.env.extend(clock.environment());
        self
    }

    /// A standby, of no primary.
    pub fn standby(mut self) -> Self {
        self.standby = true;
        // As its primary had.
        self.setting("wal_level", "replica").setting("max_wal_senders", "10")
    }

    /// Starts the server and waits until it answers.
    ///
    /// # Panics
    ///
    /// With the server's log, when it does not answer within a minute.
    #[track_caller]
    pub fn start(self) -> PostgresServer {
        let dir = new_dir();
        let programs = self.programs.unwrap_or_else(programs);
        copy_folder(&template(&programs).join("data"), dir.path());
        let port = free_port();
        let tls_files = self.tls.as_ref().map(|tls| tls.write(dir.path()));
        let mut lines = vec![
            format!("port = {port}"),
            "listen_addresses = '127.0.0.1'".into(),
            "unix_socket_directories = ''".into(),
            "max_connections = 100".into(),
            "shared_buffers = '16MB'".into(),
            "fsync = off".into(),
            // Segments of shared memory would outlive a server that is killed.
            "dynamic_shared_memory_type = mmap".into(),
            "wal_level = 'minimal'".into(),
            "max_wal_senders = 0".into(),
        ];
        if let Some(files) = &tls_files {
            lines.push("ssl = on".into());
            lines.push(format!("ssl_cert_file = '{}'", files.certificate.display()));
            lines.push(format!("ssl_key_file = '{}'", files.key.display()));
            for file in [&files.certificate, &files.key] {
                own(file);
            }
        }
        // The last one counts.
        lines.extend(self.settings.iter().map(|(name, value)| format!("{name} = '{value}'")));
        fs::write(dir.path().join("data/postgresql.auto.conf"), lines.join("\n") + "\n")
            .expect("the temporary directory takes files");
        if self.standby {
            fs::write(dir.path().join("data/standby.signal"), "").expect("as above");
        }
        let process = Mutex::new(spawn(&programs, dir.path(), &self.env));
        let server = PostgresServer { process, port, dir, tls_files, env: self.env, programs };
        server.wait_until_ready();
        server
    }
}

impl PostgresServer {
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

    /// The server of all tests of this program that do not disturb it. Each has a [database](Self::database) of its own.
    ///
    /// # Panics
    ///
    /// Like [`Config::start`].
    #[track_caller]
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<PostgresServer> = OnceLock::new();
        SHARED.get_or_init(|| Self::builder().setting("max_connections", "400").start())
    }

    /// Of the database `locks`, with `?create=on`.
    pub fn url(&self) -> String {
        self.url_at(self.port)
    }

    /// Makes a database. Its name takes the place of `locks` in URLs.
    ///
    /// # Panics
    ///
    /// With the server's error.
    #[track_caller]
    pub fn database(&self, name: &str) {
        self.query(&format!("CREATE DATABASE {name}"));
    }

    /// The URL with another port: that of a proxy.
    pub fn url_at(&self, port: u16) -> String {
        format!("postgres://locks@127.0.0.1:{port}/locks?create=on")
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

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Runs a statement over a connection of its own; returns the columns of each row.
    ///
    /// # Panics
    ///
    /// With the server's error.
    #[track_caller]
    pub fn query(&self, statement: &str) -> Vec<Vec<String>> {
        self.query_in("locks", statement)
    }

    /// [`query`](Self::query) in this database.
    ///
    /// # Panics
    ///
    /// With the server's error.
    #[track_caller]
    pub fn query_in(&self, database: &str, statement: &str) -> Vec<Vec<String>> {
        match self.try_query(database, statement) {
            Ok(rows) => rows,
            Err(error) => panic!("{statement}: {error}\n{}", self.log()),
        }
    }

    fn try_query(&self, database: &str, statement: &str) -> Result<Vec<Vec<String>>, String> {
        let port = self.port;
        let url = format!("postgres://locks@127.0.0.1:{port}/{database}?connect_timeout=5");
        let statement = statement.to_owned();
        // On a thread of its own, so that a test may call this from any runtime.
        let asked = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be made").block_on(async move {
                let (client, connection) = tokio_postgres::connect(&url, NoTls).await?;
                let driving = tokio::spawn(connection);
                let messages = client.simple_query(&statement).await?;
                driving.abort();
                let columns = |row: &tokio_postgres::SimpleQueryRow| {
                    (0..row.len()).map(|at| row.get(at).unwrap_or_default().to_owned()).collect()
                };
                let rows = messages.iter().filter_map(|message| match message {
                    SimpleQueryMessage::Row(row) => Some(columns(row)),
                    _ => None,
                });
                Ok(rows.collect())
            })
        });
        let answer: Result<_, tokio_postgres::Error> =
            asked.join().expect("the thread does not panic");
        answer.map_err(|error| {
            let detail = error.as_db_error().map(ToString::to_string);
            detail.unwrap_or_else(|| error.to_string())
        })
    }

    /// A connection with an open transaction, in which `statement` was run. Dropping it rolls back.
    ///
    /// # Panics
    ///
    /// When the connection cannot be opened, or the statement fails.
    #[track_caller]
    pub fn transaction(&self, statement: &str) -> OpenTransaction {
        let url = format!("postgres://locks@127.0.0.1:{}/locks", self.port);
        let (statement, (began, has_begun)) = (format!("BEGIN; {statement}"), mpsc::channel());
        let (end, ended) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be made").block_on(async move {
                let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
                let driving = tokio::spawn(connection);
                client.batch_execute(&statement).await.unwrap();
                began.send(()).unwrap();
                let _ = ended.await;
                client.batch_execute("ROLLBACK").await.unwrap();
                driving.abort();
            });
        });
        has_begun.recv().expect("the transaction begins");
        OpenTransaction { end: Some(end), thread: Some(thread) }
    }

    /// From now on the user logs in with a password.
    ///
    /// # Panics
    ///
    /// When the configuration cannot be written.
    pub fn require_passwords_of(&self, user: &str) {
        let path = self.dir.path().join("data/pg_hba.conf");
        let others = fs::read_to_string(&path).expect("the configuration can be read");
        let line = format!("host all {user} 127.0.0.1/32 scram-sha-256\n");
        fs::write(&path, line + &others).expect("the configuration can be written");
        self.query("SELECT pg_reload_conf()");
    }

    /// SIGSTOP for the server and all its connections.
    pub fn pause(&self) {
        for pid in self.pids() {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::STOP);
        }
    }

    /// SIGSTOP for the process with the id `pid`, as the server gives it.
    ///
    /// # Panics
    ///
    /// If it is no process of this server.
    #[track_caller]
    pub fn pause_process(&self, pid: &str) {
        let is_it = |it: &rustix::process::Pid| it.as_raw_nonzero().to_string() == pid;
        let pid = self.pids().into_iter().find(is_it).expect("a process of the server");
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("it runs");
    }

    /// SIGCONT.
    pub fn resume(&self) {
        for pid in self.pids() {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::CONT);
        }
    }

    /// SIGKILL for the server and all its connections, which have ended when this returns.
    /// [`restart`](Self::restart) brings it back.
    pub fn kill(&self) {
        // A stopped server starts no further process.
        self.process().pause();
        let pids = self.pids();
        self.process().kill();
        for pid in &pids {
            let _ = rustix::process::kill_process(*pid, rustix::process::Signal::KILL);
        }
        // The next server does not start while one of them still has the shared memory.
        crate::eventually(START_DEADLINE, "all its processes end", || {
            !pids.iter().copied().any(is_alive)
        });
        self.remove_shared_memory();
    }

    /// A server that is killed leaves a small segment of System V shared memory. The system has room for a few thousand: after
    /// some forty runs of the tests no server would start.
    fn remove_shared_memory(&self) {
        let path = self.dir.path().join("data/postmaster.pid");
        let text = fs::read_to_string(&path).unwrap_or_default();
        // The seventh line has the segment's key and id.
        if let Some(id) = text.lines().nth(6).and_then(|line| line.split_whitespace().nth(1)) {
            let _ = Command::new("ipcrm").args(["-m", id]).stderr(Stdio::null()).status();
            // The next kill must not remove the segment of another server.
            let _ = fs::remove_file(path);
        }
    }

    /// Kills it if it runs, and starts it on the same port and directory.
    ///
    /// # Panics
    ///
    /// With the server's log, when it does not answer within a minute.
    #[track_caller]
    pub fn restart(&self) {
        self.kill();
        *self.process() = spawn(&self.programs, self.dir.path(), &self.env);
        self.wait_until_ready();
    }

    /// Ends all connections but the one that says so.
    pub fn kill_clients(&self) {
        self.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
        );
    }

    /// What the server has logged since its first start.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("server.log")).unwrap_or_default()
    }

    #[track_caller]
    fn wait_until_ready(&self) {
        let start = Instant::now();
        while self.try_query("locks", "SELECT 1").is_err() {
            let ended = self.process().exit_status();
            assert!(ended.is_none(), "postgres did not start:\n{}", self.log());
            assert!(
                start.elapsed() < START_DEADLINE,
                "no answer within {START_DEADLINE:?}\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The server, and the process of each connection.
    fn pids(&self) -> Vec<rustix::process::Pid> {
        let server = self.process().pid();
        let children = format!("/proc/{server}/task/{server}/children");
        let children = fs::read_to_string(children).unwrap_or_default();
        let pids = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        let all = pids.chain(i32::try_from(server));
        all.filter_map(rustix::process::Pid::from_raw).collect()
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`PostgresServer::transaction`].
#[derive(Debug)]
pub struct OpenTransaction {
    end: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for OpenTransaction {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A PgBouncer in front of a server. It ends with this value.
#[derive(Debug)]
pub struct PgBouncer {
    _process: Process,
    port: u16,
    _dir: TempDir,
}

impl PgBouncer {
    /// Starts it in this mode, `transaction` or `session`.
    ///
    /// # Panics
    ///
    /// When it does not answer within a minute.
    #[track_caller]
    pub fn start(server: &PostgresServer, mode: &str) -> Self {
        let (dir, port, upstream) = (new_dir(), free_port(), server.port());
        let path = dir.path().join("pgbouncer.ini");
        let text = format!(
            "[databases]\nlocks = host=127.0.0.1 port={upstream} dbname=locks user=locks\n[pgbouncer]\n\
             listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n\
             pool_mode = {mode}\ndefault_pool_size = 10\n"
        );
        fs::write(&path, text).expect("the temporary directory takes files");
        let log = fs::File::create(dir.path().join("pgbouncer.log"));
        let mut command = as_server("pgbouncer".into());
        command.arg(&path).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(log.expect("the temporary directory takes files"));
        let process = Process::spawn(command)
            .unwrap_or_else(|error| panic!("cannot start pgbouncer, run tests/run.sh: {error}"));
        let pooler = Self { _process: process, port, _dir: dir };
        crate::eventually(START_DEADLINE, "pgbouncer listens", || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        pooler
    }

    /// Of the database `locks` through it, with `?create=on`.
    pub fn url(&self) -> String {
        format!("postgres://locks@127.0.0.1:{}/locks?create=on", self.port)
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether it runs: it exists, and is no zombie.
fn is_alive(pid: rustix::process::Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.is_ok_and(|stat| {
        let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
        !matches!(state, Some('Z' | 'X') | None)
    })
}

/// The folder with the programs of the server: `LOCK_TEST_POSTGRES_BIN`, or that of the newest version of the distribution.
///
/// # Panics
///
/// When there is none.
pub fn programs() -> PathBuf {
    if let Some(path) = std::env::var_os("LOCK_TEST_POSTGRES_BIN") {
        return path.into();
    }
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
            let mut versions: Vec<(u32, PathBuf)> = versions
                .filter_map(|entry| {
                    let version = entry.file_name().to_str()?.parse().ok()?;
                    Some((version, entry.path().join("bin")))
                })
                .filter(|(_, bin)| bin.join("postgres").is_file())
                .collect();
            versions.sort();
            let newest = versions.pop().map(|(_, bin)| bin);
            newest.expect("PostgreSQL is installed under /usr/lib/postgresql, run tests/run.sh")
        })
        .clone()
}

/// An empty database cluster of these programs, made once for each test program.
fn template(programs: &Path) -> PathBuf {
    static TEMPLATES: Templates = Templates::new();
    TEMPLATES.get_or_make(programs, || {
        let dir = new_dir();
        let data = dir.path().join("data");
        let mut initdb = as_server(programs.join("initdb"));
        initdb.args([
            "--auth=trust",
            "--username=locks",
            "--no-sync",
            "--encoding=UTF8",
            "--no-locale",
            "-D",
        ]);
        initdb.arg(&data).stdin(Stdio::null());
        let made = initdb.output().expect("initdb starts");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut single = as_server(programs.join("postgres"));
        single.args(["--single", "-F", "-D"]).arg(&data).arg("postgres");
        single.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut single = single.spawn().expect("postgres starts");
        let mut stdin = single.stdin.take().expect("stdin is piped");
        std::io::Write::write_all(&mut stdin, b"CREATE DATABASE locks;\n").expect("it reads");
        drop(stdin);
        assert!(single.wait().is_ok_and(|status| status.success()));
        dir
    })
}

fn new_dir() -> TempDir {
    let dir = new_folder();
    own(dir.path());
    dir
}

/// Gives `path` to the user of the server. The key of a certificate is only for that one.
fn own(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    if is_root() {
        success(Command::new("chown").arg(SERVER_USER).arg(path).status());
    }
    if path.is_file() {
        let only_owner = fs::Permissions::from_mode(0o600);
        fs::set_permissions(path, only_owner).expect("the owner can change them");
    }
}

fn success(status: std::io::Result<ExitStatus>) {
    assert!(status.is_ok_and(|status| status.success()));
}

/// The server refuses to run as root. This user exists everywhere.
const SERVER_USER: &str = "nobody";

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn as_server(program: PathBuf) -> Command {
    if !is_root() {
        return Process::command(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", SERVER_USER, "--clear-groups", "--pdeathsig", "KILL", "--"]);
    command.arg(program);
    command
}

fn spawn(programs: &Path, dir: &Path, env: &[(&str, PathBuf)]) -> Process {
    let log = || {
        let log = OpenOptions::new().create(true).append(true).open(dir.join("server.log"));
        Stdio::from(log.expect("the temporary directory takes files"))
    };
    let mut command = as_server(programs.join("postgres"));
    command.arg("-D").arg(dir.join("data")).envs(env.iter().cloned());
    command.stdin(Stdio::null()).stdout(log()).stderr(log());
    Process::spawn(command).unwrap_or_else(|error| panic!("cannot start postgres: {error}"))
}
