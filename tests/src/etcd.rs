//! Private etcd members, alone or as a cluster of three, and requests that a test inspects and changes keys with.

use std::fs::OpenOptions;
use std::io::{Error, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::folder::new_folder;
use crate::process::Process;
use crate::server::free_port;
use crate::tls::{Tls, TlsFiles};

const START_DEADLINE: Duration = Duration::from_secs(60);

/// An etcd member as a child process, on ports and in a directory of its own. It ends with this value, with a panicking test, and with
/// a killed one.
#[derive(Debug)]
pub struct EtcdServer {
    process: Mutex<Process>,
    port: u16,
    dir: TempDir,
    program: PathBuf,
    arguments: Mutex<Vec<String>>,
    tls: Option<TlsFiles>,
}

/// What an [`EtcdServer`] is started with.
#[derive(Clone, Debug, Default)]
pub struct Config {
    arguments: Vec<String>,
    member: Option<(usize, u16, u16)>,
    tls: Option<Tls>,
    program: Option<PathBuf>,
}

impl Config {
    /// Another program than `LOCK_TEST_ETCD_PROGRAM`, or `etcd`.
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = Some(program.into());
        self
    }

    /// An argument of the program, e.g. `.setting("quota-backend-bytes", 1 << 20)`.
    pub fn setting(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        self.arguments.push(format!("--{name}={value}"));
        self
    }

    /// Serves TLS and nothing else.
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Starts the member and waits until it answers.
    ///
    /// # Panics
    ///
    /// With the log, when it does not answer within a minute.
    #[track_caller]
    pub fn start(self) -> EtcdServer {
        let server = self.launch();
        server.wait_until_ready();
        server
    }

    /// Starts it as a member of a cluster without the others. Does not wait.
    ///
    /// # Panics
    ///
    /// When there is no etcd.
    #[track_caller]
    pub fn start_alone(self) -> EtcdServer {
        let peers: Vec<_> = (0..3).map(|number| (number, free_port(), free_port())).collect();
        members(&self, &peers).swap_remove(0).launch()
    }

    fn launch(self) -> EtcdServer {
        let dir = new_folder();
        let (number, port, peer) = self.member.unwrap_or_else(|| (0, free_port(), free_port()));
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let (client, peer) =
            (format!("{scheme}://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer}"));
        let mut arguments = vec![
            format!("--name=m{number}"),
            format!("--data-dir={}", dir.path().join("data").display()),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
        ];
        if self.member.is_none() {
            arguments.push(format!("--initial-cluster=m0={peer}"));
        }
        let tls = self.tls.map(|tls| {
            let files = tls.write(dir.path());
            arguments.push(format!("--cert-file={}", files.certificate.display()));
            arguments.push(format!("--key-file={}", files.key.display()));
            files
        });
        arguments.extend(self.arguments);
        let program = self.program.unwrap_or_else(|| {
            std::env::var_os("LOCK_TEST_ETCD_PROGRAM").unwrap_or_else(|| "etcd".into()).into()
        });
        let process = Mutex::new(spawn(&program, dir.path(), &arguments));
        let arguments = Mutex::new(arguments);
        EtcdServer { process, port, dir, program, arguments, tls }
    }
}

fn members(config: &Config, ports: &[(usize, u16, u16)]) -> Vec<Config> {
    let peers: Vec<_> = ports
        .iter()
        .map(|(number, _, peer)| format!("m{number}=http://127.0.0.1:{peer}"))
        .collect();
    let config = config.clone().setting("initial-cluster", peers.join(","));
    ports.iter().map(|ports| Config { member: Some(*ports), ..config.clone() }).collect()
}

/// A key as it stands in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredKey {
    /// Its name.
    pub name: String,
    /// The revision that has made it.
    pub created: u64,
    /// The lease that it ends with; zero for none.
    pub lease: i64,
}

impl EtcdServer {
    /// A member with the default configuration.
    ///
    /// # Panics
    ///
    /// Like [`Config::start`].
    #[track_caller]
    pub fn start() -> Self {
        Self::builder().start()
    }

    /// A member to configure.
    pub fn builder() -> Config {
        Config::default()
    }

    /// The member of all tests of this program that neither stop, change nor [compact](Self::compact) it.
    ///
    /// With a path for the keys of the caller.
    ///
    /// # Panics
    ///
    /// Like [`Config::start`].
    #[track_caller]
    pub fn shared() -> (&'static Self, String) {
        static SHARED: OnceLock<EtcdServer> = OnceLock::new();
        static ROOTS: AtomicUsize = AtomicUsize::new(0);
        let root = ROOTS.fetch_add(1, Ordering::Relaxed);
        (SHARED.get_or_init(Self::start), format!("/locks-{root}"))
    }

    /// The URL with the path `/locks`.
    pub fn url(&self) -> String {
        self.url_of("/locks")
    }

    /// The URL with this path.
    pub fn url_of(&self, root: &str) -> String {
        url_at(self.port, root)
    }

    /// The URL with TLS, with `/locks`.
    pub fn tls_url(&self) -> String {
        format!("etcds://127.0.0.1:{}/locks", self.port)
    }

    /// The files behind TLS.
    ///
    /// # Panics
    ///
    /// When the member was started without [`Config::tls`].
    #[track_caller]
    pub fn tls_files(&self) -> &TlsFiles {
        self.tls.as_ref().expect("the member was started with TLS")
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The keys of the owners of `key`, in the order of their creation.
    #[track_caller]
    pub fn queue(&self, root: &str, key: &str) -> Vec<StoredKey> {
        self.keys(&format!("{root}/{key}/"))
    }

    /// All keys with this prefix, in the order of their creation.
    ///
    /// # Panics
    ///
    /// When the member does not answer.
    #[track_caller]
    pub fn keys(&self, prefix: &str) -> Vec<StoredKey> {
        let answer = self.post(
            "kv/range",
            &json!({
                "key": base64(prefix.as_bytes()), "range_end": base64(&end(prefix)),
                "sort_target": "CREATE", "sort_order": "ASCEND", "keys_only": true,
            }),
        );
        let keys = answer["kvs"].as_array().cloned().unwrap_or_default();
        let number = |value: &Value| value.as_str().and_then(|it| it.parse::<i64>().ok());
        keys.iter()
            .map(|key| StoredKey {
                name: String::from_utf8(from_base64(key["key"].as_str().unwrap_or_default()))
                    .expect("UTF-8"),
                created: number(&key["create_revision"]).unwrap_or_default().cast_unsigned(),
                lease: number(&key["lease"]).unwrap_or_default(),
            })
            .collect()
    }

    /// Puts a key, with a lease of so many seconds.
    #[track_caller]
    pub fn put(&self, name: &str, seconds: u32) {
        let lease = self.post("lease/grant", &json!({ "TTL": seconds }))["ID"].clone();
        let put = json!({ "key": base64(name.as_bytes()), "value": "", "lease": lease });
        self.post("kv/put", &put);
    }

    /// Changes the value of a key, and not its lease.
    #[track_caller]
    pub fn change(&self, name: &str, value: &str) {
        let (key, value) = (base64(name.as_bytes()), base64(value.as_bytes()));
        self.post("kv/put", &json!({ "key": key, "value": value, "ignore_lease": true }));
    }

    /// Deletes a key.
    #[track_caller]
    pub fn delete(&self, name: &str) {
        self.post("kv/deleterange", &json!({ "key": base64(name.as_bytes()) }));
    }

    /// Ends a lease and its keys.
    #[track_caller]
    pub fn revoke(&self, lease: i64) {
        self.post("kv/lease/revoke", &json!({ "ID": lease.to_string() }));
    }

    /// The number of leases.
    #[track_caller]
    pub fn leases(&self) -> usize {
        let answer = self.post("kv/lease/leases", &json!({}));
        answer["leases"].as_array().map_or(0, Vec::len)
    }

    /// How many seconds are left of a lease, rounded down.
    #[track_caller]
    pub fn seconds_left(&self, lease: i64) -> i64 {
        let answer = self.post("kv/lease/timetolive", &json!({ "ID": lease.to_string() }));
        answer["TTL"].as_str().and_then(|it| it.parse().ok()).expect("a time to live")
    }

    /// The last revision.
    #[track_caller]
    pub fn revision(&self) -> u64 {
        let answer = self.post("kv/range", &json!({ "key": base64(b"none") }));
        answer["header"]["revision"].as_str().and_then(|it| it.parse().ok()).expect("a revision")
    }

    /// Forgets all changes before the last revision.
    #[track_caller]
    pub fn compact(&self) {
        self.post("kv/compaction", &json!({ "revision": self.revision().to_string() }));
    }

    /// How many messages have come in over gRPC.
    ///
    /// # Panics
    ///
    /// When the member does not say so.
    #[track_caller]
    pub fn messages(&self) -> usize {
        self.messages_with("")
    }

    /// How many transactions have come in.
    ///
    /// # Panics
    ///
    /// Like [`messages`](Self::messages).
    #[track_caller]
    pub fn transactions(&self) -> usize {
        self.messages_with("grpc_method=\"Txn\"")
    }

    /// How many logins have come in.
    ///
    /// # Panics
    ///
    /// Like [`messages`](Self::messages).
    #[track_caller]
    pub fn logins(&self) -> usize {
        self.messages_with("grpc_method=\"Authenticate\"")
    }

    #[track_caller]
    fn messages_with(&self, label: &str) -> usize {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("it listens");
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("it reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("it answers");
        let counts = text.lines().filter_map(|line| {
            let (labels, count) =
                line.strip_prefix("grpc_server_msg_received_total{")?.split_once("} ")?;
            labels.contains(label).then(|| count.parse::<f64>().ok())?
        });
        counts.sum::<f64>() as usize
    }

    /// A request of the JSON API.
    ///
    /// # Panics
    ///
    /// With the answer, if it is an error.
    #[track_caller]
    pub fn post(&self, path: &str, body: &Value) -> Value {
        let answer = self.try_post(path, body, Duration::from_secs(20));
        answer.unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// As [`post`](Self::post), within a time limit.
    pub fn try_post(&self, path: &str, body: &Value, limit: Duration) -> std::io::Result<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(limit))?;
        let body = body.to_string();
        write!(
            stream,
            "POST /v3/{path} HTTP/1.0\r\nhost: h\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let (head, body) =
            text.split_once("\r\n\r\n").ok_or_else(|| Error::other(format!("{text:?}")))?;
        if !head.contains(" 200 ") {
            return Err(Error::other(format!("{head}\n{body}")));
        }
        serde_json::from_str(body).map_err(Error::other)
    }

    /// Runs `etcdctl` with these arguments.
    ///
    /// # Panics
    ///
    /// If it fails.
    #[track_caller]
    pub fn etcdctl(&self, arguments: &[&str]) -> String {
        let Output { status, stdout, stderr } =
            self.etcdctl_command().args(arguments).output().expect("etcdctl is installed");
        let text = String::from_utf8_lossy(&stdout).into_owned();
        assert!(status.success(), "{arguments:?}: {text}{}", String::from_utf8_lossy(&stderr));
        text
    }

    /// Switches logins on, with the users `root` (password `root`) and `worker`. The rights of `worker` are on all keys from
    /// the first name to before the second one of each range.
    ///
    /// # Panics
    ///
    /// With the answer, if it is an error.
    #[track_caller]
    pub fn enable_logins(&self, password: &str, ranges: &[(String, String)]) {
        for (path, body) in [
            ("auth/user/add", json!({ "name": "root", "password": "root" })),
            ("auth/user/add", json!({ "name": "worker", "password": password })),
            ("auth/user/grant", json!({ "user": "root", "role": "root" })),
            ("auth/role/add", json!({ "name": "locks" })),
            ("auth/user/grant", json!({ "user": "worker", "role": "locks" })),
        ] {
            self.post(path, &body);
        }
        for (from, to) in ranges {
            let (key, range_end) = (base64(from.as_bytes()), base64(to.as_bytes()));
            let perm = json!({ "permType": "READWRITE", "key": key, "range_end": range_end });
            self.post("auth/role/grant", &json!({ "name": "locks", "perm": perm }));
        }
        self.post("auth/enable", &json!({}));
    }

    /// Sets the password of a user, by root with the password `root`. All tokens of the user end with that.
    ///
    /// # Panics
    ///
    /// If it fails.
    #[track_caller]
    pub fn set_password(&self, user: &str, password: &str) {
        assert!(self.try_set_password(user, password), "{}", self.log());
    }

    /// As [`set_password`](Self::set_password). Returns whether the member has answered in time. Otherwise it changes the password
    /// later.
    ///
    /// # Panics
    ///
    /// When there is no etcdctl.
    #[track_caller]
    pub fn try_set_password(&self, user: &str, password: &str) -> bool {
        let mut command = self.etcdctl_command();
        let change = ["--user=root:root", "--command-timeout=60s", "user", "passwd", user];
        command.args(change).arg("--interactive=false");
        let mut changing = command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("etcdctl is installed");
        let mut input = changing.stdin.take().expect("a pipe");
        writeln!(input, "{password}").expect("etcdctl reads the password");
        drop(input);
        changing.wait().expect("etcdctl ends").success()
    }

    fn etcdctl_command(&self) -> Command {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").arg(format!("--endpoints=127.0.0.1:{}", self.port));
        command
    }

    /// The arguments and the environment of `etcdctl lock` for a worker process.
    pub fn etcdctl_endpoint(&self) -> String {
        format!("--endpoints=127.0.0.1:{}", self.port)
    }

    /// Whether it answers, and with a majority.
    pub fn serves(&self) -> bool {
        let read = json!({ "key": base64(b"none") });
        match &self.tls {
            // The JSON API wants TLS too.
            Some(_) => TcpStream::connect(("127.0.0.1", self.port)).is_ok(),
            None => {
                let answer = self.try_post("kv/range", &read, Duration::from_millis(500));
                answer
                    .map_or_else(|error| error.to_string().contains("user name is empty"), |_| true)
            }
        }
    }

    /// The name of the leader that it follows, and its own.
    fn leader_and_own(&self) -> Option<(String, String)> {
        let status =
            self.try_post("maintenance/status", &json!({}), Duration::from_millis(500)).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        Some((text(&status["leader"])?, text(&status["header"]["member_id"])?))
    }

    /// Whether it is the leader.
    pub fn leads(&self) -> bool {
        self.leader_and_own().is_some_and(|(leader, own)| leader == own)
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

    /// Kills it if it runs, and starts it on the same ports and directory.
    ///
    /// # Panics
    ///
    /// With the log, when it does not answer within a minute.
    #[track_caller]
    pub fn restart(&self) {
        self.relaunch();
        self.wait_until_ready();
    }

    /// As [`restart`](Self::restart), with this argument of the program from now on.
    ///
    /// # Panics
    ///
    /// Like [`restart`](Self::restart).
    #[track_caller]
    pub fn restart_with(&self, name: &str, value: impl std::fmt::Display) {
        self.arguments().push(format!("--{name}={value}"));
        self.restart();
    }

    /// As [`restart`](Self::restart), without waiting.
    pub fn relaunch(&self) {
        self.kill();
        *self.process() = spawn(&self.program, self.dir.path(), &self.arguments());
    }

    /// What it has logged since its first start.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("server.log")).unwrap_or_default()
    }

    #[track_caller]
    fn wait_until_ready(&self) {
        let start = Instant::now();
        while !self.serves() {
            let ended = self.process().exit_status();
            assert!(ended.is_none(), "etcd did not start:\n{}", self.log());
            let waited = start.elapsed();
            assert!(waited < START_DEADLINE, "no answer within {waited:?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn arguments(&self) -> MutexGuard<'_, Vec<String>> {
        self.arguments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Three members that elect a leader.
#[derive(Debug)]
pub struct EtcdTrio {
    /// The members.
    pub members: Vec<EtcdServer>,
}

impl EtcdTrio {
    /// Starts them, and waits until all serve.
    ///
    /// # Panics
    ///
    /// With the log of a member that does not serve within a minute.
    #[track_caller]
    pub fn start() -> Self {
        Self::start_with(&Config::default())
    }

    /// As [`start`](Self::start), with these arguments.
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start).
    #[track_caller]
    pub fn start_with(config: &Config) -> Self {
        let ports: Vec<_> = (0..3).map(|number| (number, free_port(), free_port())).collect();
        let configs = members(config, &ports);
        let members: Vec<_> = configs.into_iter().map(Config::launch).collect();
        members.iter().for_each(EtcdServer::wait_until_ready);
        Self { members }
    }

    /// The cluster of all tests of this program that leave it complete. One test after the other has it.
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start).
    pub async fn shared() -> tokio::sync::MutexGuard<'static, Self> {
        static SHARED: OnceLock<tokio::sync::Mutex<EtcdTrio>> = OnceLock::new();
        let shared = SHARED.get_or_init(|| tokio::sync::Mutex::new(Self::start())).lock().await;
        for member in &shared.members {
            // What a test that failed has left.
            member.resume();
            if member.process().exit_status().is_some() {
                member.relaunch();
            }
        }
        shared.members.iter().for_each(EtcdServer::wait_until_ready);
        shared
    }

    /// The URL of all members, with this path.
    pub fn url_of(&self, root: &str) -> String {
        let hosts: Vec<_> =
            self.members.iter().map(|member| format!("127.0.0.1:{}", member.port)).collect();
        format!("etcd://{}{root}", hosts.join(","))
    }

    /// The leader. `None` while there is none.
    pub fn leader(&self) -> Option<&EtcdServer> {
        self.members.iter().find(|member| member.leads())
    }
}

/// The URL of the member, or of the proxy, at `port`.
pub fn url_at(port: u16, root: &str) -> String {
    format!("etcd://127.0.0.1:{port}{root}")
}

fn spawn(program: &Path, dir: &Path, arguments: &[String]) -> Process {
    let log = || {
        let log = OpenOptions::new().create(true).append(true).open(dir.join("server.log"));
        Stdio::from(log.expect("the temporary directory takes files"))
    };
    let mut command = Process::command(program);
    command.args(arguments);
    command.stdin(Stdio::null()).stdout(log()).stderr(log());
    Process::spawn(command)
        .unwrap_or_else(|error| panic!("cannot start {}: {error}", program.display()))
}

/// The first name behind all with this prefix.
fn end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// As the JSON API has bytes.
#[must_use]
pub fn base64(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let mut word = [0; 4];
        word[1..=chunk.len()].copy_from_slice(chunk);
        let word = u32::from_be_bytes(word);
        for at in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * at)) as usize & 63];
            text.push(if at <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

fn from_base64(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for chunk in text.trim_end_matches('=').as_bytes().chunks(4) {
        let mut word = 0;
        for at in 0..4 {
            let digit = chunk.get(at).and_then(|it| DIGITS.iter().position(|digit| digit == it));
            word = word << 6 | digit.unwrap_or_default() as u32;
        }
        bytes.extend_from_slice(&word.to_be_bytes()[1..chunk.len()]);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_written_and_read() {
        for (bytes, text) in [("", ""), ("a", "YQ=="), ("ab", "YWI="), ("abc", "YWJj")] {
            assert_eq!(base64(bytes.as_bytes()), text);
            assert_eq!(from_base64(text), bytes.as_bytes());
        }
    }
}
