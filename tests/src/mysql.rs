//! A private MariaDB or MySQL server per test.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, OptsBuilder, Row, Value};
use tempfile::TempDir;
use tokio::sync::oneshot;

use crate::folder::{copy_folder, new_folder};
use crate::process::Process;
use crate::server::free_port;
use crate::skew::Skew;
use crate::templates::Templates;
use crate::tls::{Tls, TlsFiles};

/// In the directory of the data.
const GENERAL_LOG: &str = "general.log";

const START_DEADLINE: Duration = Duration::from_secs(60);

/// A `mariadbd` or `mysqld` child process on a port and in a directory of its own. It has the database `locks` of the
/// user `locks`, and does not flush unless told otherwise. It ends with this value, with a panicking test, and with a
/// killed one.
#[derive(Debug)]
pub struct MysqlServer {
    process: Mutex<Process>,
    port: u16,
    dir: TempDir,
    options: Vec<String>,
    tls_files: Option<TlsFiles>,
    env: Vec<(&'static str, PathBuf)>,
    program: Program,
}

/// What a [`MysqlServer`] is started with.
#[derive(Clone, Debug, Default)]
pub struct Config {
    options: Vec<String>,
    of_mariadb: Vec<String>,
    tls: Option<Tls>,
    env: Vec<(&'static str, PathBuf)>,
    program: Option<PathBuf>,
}

impl Config {
    /// Another program than [`program`].
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = Some(program.into());
        self
    }

    /// An option of the command line, e.g. `.option("read-only")`.
    pub fn option(mut self, option: &str) -> Self {
        self.options.push(format!("--{option}"));
        self
    }

    /// As [`option`](Self::option), if it is MariaDB.
    pub fn mariadb_option(mut self, option: &str) -> Self {
        self.of_mariadb.push(format!("--{option}"));
        self
    }

    /// Its clock is this one.
    pub fn clock(mut self, clock: &Skew) -> Self {
        self.env.extend(clock.environment());
        self
    }

    /// Flushes with each commit, so that a killed server keeps what it has answered.
    pub fn durable(self) -> Self {
        self.option("innodb-flush-log-at-trx-commit=1")
    }

    /// Logs what clients send, for [`MysqlServer::sent`].
    pub fn logged(self) -> Self {
        self.option("general-log=1").option(&format!("general-log-file={GENERAL_LOG}"))
    }

    /// Serves TLS too.
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
    pub fn start(self) -> MysqlServer {
        let dir = new_dir();
        let program = Program::of(self.program.unwrap_or_else(program));
        copy_folder(&data(&template(&program)), dir.path());
        let port = free_port();
        let tls_files = self.tls.as_ref().map(|tls| tls.write(dir.path()));
        let mut options = self.options;
        if program.is_mariadb() {
            options.extend(self.of_mariadb);
        }
        if let Some(files) = &tls_files {
            options.push(format!("--ssl-cert={}", files.certificate.display()));
            options.push(format!("--ssl-key={}", files.key.display()));
            for file in [&files.certificate, &files.key] {
                own(file);
            }
        }
        let process = Mutex::new(spawn(&program, dir.path(), port, &options, &self.env));
        let env = self.env;
        let server = MysqlServer { process, port, dir, options, tls_files, env, program };
        server.wait_until_ready();
        server
    }
}

impl MysqlServer {
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
        static SHARED: OnceLock<MysqlServer> = OnceLock::new();
        SHARED.get_or_init(|| Self::builder().option("max-connections=400").start())
    }

    /// Of the database `locks`, with `?create=on`.
    pub fn url(&self) -> String {
        self.url_at(self.port)
    }

    /// The URL with another port: that of a proxy.
    pub fn url_at(&self, port: u16) -> String {
        format!("mysql://locks@127.0.0.1:{port}/locks?create=on")
    }

    /// The URL of a new database: that of a test that shares the server with others.
    ///
    /// # Panics
    ///
    /// With the server's error.
    #[track_caller]
    pub fn database(&self, name: &str) -> String {
        self.query(&format!("CREATE DATABASE `{name}`; GRANT ALL ON `{name}`.* TO locks@'%'"));
        format!("mysql://locks@127.0.0.1:{}/{name}?create=on", self.port)
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

    /// Runs statements over a connection of its own, with all rights; returns the columns of each row of the last one with rows.
    ///
    /// # Panics
    ///
    /// With the server's error.
    #[track_caller]
    pub fn query(&self, statement: &str) -> Vec<Vec<String>> {
        match self.try_query(statement) {
            Ok(rows) => rows,
            Err(error) => panic!("{statement}: {error}\n{}", self.log()),
        }
    }

    /// A counter of the server. Reading it is no query.
    ///
    /// # Panics
    ///
    /// When there is no such counter.
    #[track_caller]
    pub fn status(&self, name: &str) -> u64 {
        let rows = self.query(&format!("SHOW GLOBAL STATUS LIKE '{name}'"));
        rows[0][1].parse().expect("a counter is a number")
    }

    /// How many deadlocks it has found since its start.
    #[track_caller]
    pub fn deadlocks(&self) -> u64 {
        if self.is_mariadb() {
            return self.status("Innodb_deadlocks");
        }
        let counter =
            "SELECT count FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'";
        self.query(counter)[0][0].parse().expect("a counter is a number")
    }

    /// As [`query`](Self::query), with the error of the server.
    ///
    /// # Errors
    ///
    /// As the server says.
    ///
    /// # Panics
    ///
    /// When no thread can be started.
    pub fn try_query(&self, statement: &str) -> mysql_async::Result<Vec<Vec<String>>> {
        let (port, statement) = (self.port, statement.to_owned());
        // On a thread of its own, so that a test may call this from any runtime.
        let asked = std::thread::spawn(move || {
            runtime().block_on(async move {
                let mut conn = connect(port).await?;
                let mut result = conn.query_iter(statement).await?;
                let mut last = Vec::new();
                while let Some(columns) = result.columns() {
                    let rows: Vec<Row> = result.collect().await?;
                    if !columns.is_empty() {
                        last = rows.into_iter().map(|row| row.unwrap()).collect();
                    }
                }
                result.drop_result().await?;
                conn.disconnect().await?;
                Ok(last)
            })
        });
        let rows: mysql_async::Result<Vec<Vec<Value>>> =
            asked.join().expect("the thread does not panic");
        let text = |value: Value| match value {
            Value::NULL => String::new(),
            Value::Bytes(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            other => other.as_sql(false),
        };
        Ok(rows?.into_iter().map(|row| row.into_iter().map(text).collect()).collect())
    }

    /// A connection with an open transaction, in which `statement` was run. Dropping it rolls back.
    ///
    /// # Panics
    ///
    /// When the connection cannot be opened, or the statement fails.
    #[track_caller]
    pub fn transaction(&self, statement: &str) -> OpenTransaction {
        let (port, (began, has_begun)) = (self.port, mpsc::channel());
        let statement = format!(
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION; {statement}"
        );
        let (end, ended) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            runtime().block_on(async move {
                let mut conn = connect(port).await.unwrap();
                conn.query_drop(statement).await.unwrap();
                began.send(()).unwrap();
                let _ = ended.await;
                conn.query_drop("ROLLBACK").await.unwrap();
                conn.disconnect().await.unwrap();
            });
        });
        has_begun.recv().expect("the transaction begins");
        OpenTransaction { end: Some(end), thread: Some(thread) }
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

    /// Kills it if it runs, and starts it on the same port and directory.
    ///
    /// # Panics
    ///
    /// With the server's log, when it does not answer within a minute.
    #[track_caller]
    pub fn restart(&self) {
        self.kill();
        let (dir, options) = (self.dir.path(), &self.options);
        *self.process() = spawn(&self.program, dir, self.port, options, &self.env);
        self.wait_until_ready();
    }

    /// Ends all connections of the user of the pools.
    pub fn kill_clients(&self) {
        if self.program.is_mariadb() {
            self.query("KILL USER locks");
            return;
        }
        for row in self.query("SELECT id FROM information_schema.processlist WHERE user = 'locks'")
        {
            // It may have ended by itself.
            let _ = self.try_query(&format!("KILL {}", row[0]));
        }
    }

    /// Whether it is MariaDB, and not MySQL.
    pub fn is_mariadb(&self) -> bool {
        self.program.is_mariadb()
    }

    /// What the server has logged since its first start.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("server.log")).unwrap_or_default()
    }

    /// The first line of each script that clients have sent since the start of a server that is [`logged`](Config::logged).
    ///
    /// # Panics
    ///
    /// When there is no log.
    #[track_caller]
    pub fn sent(&self) -> Vec<String> {
        let log = fs::read(data(self.dir.path()).join(GENERAL_LOG)).expect("the server is logged");
        let log = String::from_utf8_lossy(&log);
        let queries = log.lines().filter_map(|line| {
            let (before, query) = line.split_once(" Query\t")?;
            before.ends_with(|last: char| last.is_ascii_digit()).then(|| query.to_owned())
        });
        queries.collect()
    }

    #[track_caller]
    fn wait_until_ready(&self) {
        let start = Instant::now();
        while self.try_query("SELECT 1").is_err() {
            let ended = self.process().exit_status();
            assert!(ended.is_none(), "the server did not start:\n{}", self.log());
            assert!(
                start.elapsed() < START_DEADLINE,
                "no answer within {START_DEADLINE:?}\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`MysqlServer::transaction`].
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

async fn connect(port: u16) -> mysql_async::Result<Conn> {
    let options = OptsBuilder::default()
        .ip_or_hostname("127.0.0.1")
        .tcp_port(port)
        .user(Some("root"))
        .db_name(Some("locks"))
        .prefer_socket(false)
        // Known, so that opening a connection is no query.
        .max_allowed_packet(Some(16 << 20))
        .wait_timeout(Some(600));
    let limit = Duration::from_secs(5);
    let too_late = || std::io::Error::from(std::io::ErrorKind::TimedOut).into();
    tokio::time::timeout(limit, Conn::new(options)).await.unwrap_or_else(|_| Err(too_late()))
}

fn runtime() -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime can be made")
}

/// The program of the server: `LOCK_TEST_MYSQLD`, or the installed one.
///
/// # Panics
///
/// When it is not installed.
pub fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("LOCK_TEST_MYSQLD") {
        return path.into();
    }
    let paths = ["/usr/sbin/mariadbd", "/usr/libexec/mariadbd", "/usr/local/sbin/mariadbd"];
    let found = paths.into_iter().map(PathBuf::from).find(|path| path.is_file());
    found.expect("MariaDB is installed, run tests/run.sh")
}

/// A server's program.
#[derive(Clone, Debug)]
enum Program {
    MariaDb(PathBuf),
    Mysql(PathBuf),
}

impl Program {
    fn of(path: PathBuf) -> Self {
        let output = Command::new(&path).args(["--no-defaults", "--version"]).output();
        let output = output.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        match String::from_utf8_lossy(&output.stdout).contains("MariaDB") {
            true => Self::MariaDb(path),
            false => Self::Mysql(path),
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::MariaDb(path) | Self::Mysql(path) => path,
        }
    }

    fn is_mariadb(&self) -> bool {
        matches!(self, Self::MariaDb(_))
    }

    /// Makes the system tables in `data`. One statement a line in the files of `statements`.
    fn initialize(&self, dir: &Path, statements: &str) {
        let datadir = format!("--datadir={}", data(dir).display());
        match self {
            Self::MariaDb(path) => {
                // Beside the program, if it is not the distribution's.
                let base = path.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
                let script = base.join("scripts/mariadb-install-db");
                let program = match script.is_file() {
                    true => script.clone(),
                    false => "mariadb-install-db".into(),
                };
                let mut install = as_server(program, dir);
                install.args(["--no-defaults", "--auth-root-authentication-method=normal"]);
                install.args(["--skip-test-db", "--skip-name-resolve", "--skip-log-bin"]);
                install.args(["--innodb-log-file-size=8M", "--innodb-flush-method=nosync"]);
                if script.is_file() {
                    install.arg(format!("--basedir={}", base.display()));
                }
                run(install.arg(&datadir), "");
                let mut bootstrap = as_server(path.clone(), dir);
                bootstrap.args(["--no-defaults", "--bootstrap", "--innodb-log-file-size=8M"]);
                run(bootstrap.arg(&datadir), &format!("FLUSH PRIVILEGES;\n{statements}"));
            }
            Self::Mysql(path) => {
                let file = dir.join("users.sql");
                fs::write(&file, statements).expect("the temporary directory takes files");
                let mut initialize = as_server(path.clone(), dir);
                initialize.args(["--no-defaults", "--initialize-insecure", "--skip-log-bin"]);
                initialize.args(["--innodb-redo-log-capacity=8M", "--innodb-flush-method=nosync"]);
                // With certificates of its own it serves TLS.
                initialize.arg("--auto-generate-certs=off");
                initialize.arg(format!("--init-file={}", file.display()));
                run(initialize.args([&datadir, "--secure-file-priv=NULL"]), "");
            }
        }
    }

    fn options(&self) -> &'static [&'static str] {
        match self {
            Self::MariaDb(_) => &["--innodb-log-file-size=8M"],
            Self::Mysql(_) => &[
                "--innodb-redo-log-capacity=8M",
                "--mysqlx=off",
                "--secure-file-priv=NULL",
                "--auto-generate-certs=off",
            ],
        }
    }
}

/// Runs it to its end, with this standard input.
#[track_caller]
fn run(command: &mut Command, input: &str) {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let mut stdin = child.stdin.take().expect("stdin is piped");
    std::io::Write::write_all(&mut stdin, input.as_bytes()).expect("it reads");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
}

/// An empty data directory of this program with the database `locks`, made once for each test program.
fn template(program: &Program) -> PathBuf {
    static TEMPLATES: Templates = Templates::new();
    TEMPLATES.get_or_make(program.path(), || {
        let dir = new_dir();
        let users = "CREATE DATABASE locks;\nCREATE USER locks@'%';\n\
            GRANT ALL ON locks.* TO locks@'%';\nCREATE USER IF NOT EXISTS root@'127.0.0.1';\n\
            GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n";
        program.initialize(dir.path(), users);
        dir
    })
}

fn data(dir: &Path) -> PathBuf {
    dir.join("data")
}

fn new_dir() -> TempDir {
    let dir = new_folder();
    own(dir.path());
    dir
}

/// Gives `path` to the user of the server.
fn own(path: &Path) {
    if is_root() {
        success(Command::new("chown").arg(SERVER_USER).arg(path).status());
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

/// Temporary files are in `dir`: a server that starts removes what others have in a shared folder.
fn as_server(program: PathBuf, dir: &Path) -> Command {
    let mut command = if is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", SERVER_USER, "--clear-groups", "--pdeathsig", "KILL", "--"]);
        command.arg(program);
        command
    } else {
        Process::command(program)
    };
    command.env("TMPDIR", dir);
    command
}

fn spawn(
    program: &Program,
    dir: &Path,
    port: u16,
    options: &[String],
    env: &[(&str, PathBuf)],
) -> Process {
    let log = || {
        let log = OpenOptions::new().create(true).append(true).open(dir.join("server.log"));
        Stdio::from(log.expect("the temporary directory takes files"))
    };
    let mut command = as_server(program.path().to_owned(), dir);
    command.arg("--no-defaults");
    command.arg(format!("--datadir={}", data(dir).display()));
    command.arg(format!("--socket={}", dir.join("socket").display()));
    command.arg(format!("--pid-file={}", dir.join("pid").display()));
    command.args([format!("--port={port}"), "--bind-address=127.0.0.1".into()]);
    command.args(["--skip-name-resolve", "--skip-log-bin", "--performance-schema=off"]);
    command.arg("--innodb-buffer-pool-size=16M").args(program.options());
    command.args(["--innodb-flush-log-at-trx-commit=0", "--max-connections=100"]);
    command.arg("--innodb-print-all-deadlocks");
    // The last one counts.
    command.args(options).envs(env.iter().cloned());
    command.stdin(Stdio::null()).stdout(log()).stderr(log());
    Process::spawn(command)
        .unwrap_or_else(|error| panic!("cannot start {}: {error}", program.path().display()))
}
