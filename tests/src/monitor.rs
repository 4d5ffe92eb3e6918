//! The commands that a server ran, in order.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::resp;
use crate::server::RedisServer;

/// Collects a server's `MONITOR` feed. The server leaves out AUTH and most admin commands.
#[derive(Debug)]
pub struct Monitor<'a> {
    server: &'a RedisServer,
    stream: TcpStream,
    feed: Arc<Feed>,
    reader: Option<JoinHandle<()>>,
}

/// A command that ran.
#[derive(Clone, Debug, PartialEq)]
pub struct Ran {
    /// Server time in microseconds since 1970.
    pub time_us: u64,
    /// The database.
    pub db: u32,
    /// The origin of the command.
    pub by: Caller,
    /// The command and its arguments; bytes that are not UTF-8 are replaced.
    pub args: Vec<String>,
}

/// The origin of a command.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Caller {
    /// A connection, by its address.
    Client(String),
    /// A script; the line of its EVAL or EVALSHA stands before it.
    Script,
}

impl Ran {
    /// The command's name in upper case.
    pub fn name(&self) -> String {
        self.args.first().map(|name| name.to_ascii_uppercase()).unwrap_or_default()
    }

    /// Whether it is this command with this among its arguments.
    pub fn is(&self, name: &str, arg: &str) -> bool {
        self.name() == name && self.args[1..].iter().any(|it| it == arg)
    }

    fn parse(line: &str) -> Option<Self> {
        let (time, rest) = line.strip_prefix('+')?.split_once(" [")?;
        let (seconds, micros) = time.split_once('.')?;
        let (db, rest) = rest.split_once(' ')?;
        let (by, args) = rest.split_once("] ")?;
        Some(Self {
            time_us: format!("{seconds}{micros:0<6}").parse().ok()?,
            db: db.parse().ok()?,
            by: if by == "lua" { Caller::Script } else { Caller::Client(by.into()) },
            args: unquote(args)?,
        })
    }
}

impl<'a> Monitor<'a> {
    /// Sees every command that the server begins after this returns.
    ///
    /// # Panics
    ///
    /// When the server does not answer.
    #[track_caller]
    pub fn start(server: &'a RedisServer) -> Self {
        let mut stream = server.connect().expect("the server takes connections");
        stream.set_read_timeout(None).expect("a socket's timeout can be set");
        stream.write_all(&resp::command(&["MONITOR"])).expect("the server takes commands");
        let mut lines = BufReader::new(stream.try_clone().expect("a socket can be cloned"));
        let mut ok = String::new();
        lines.read_line(&mut ok).expect("the server answers");
        assert_eq!(ok, "+OK\r\n");
        let feed = Arc::new(Feed::default());
        let filled = Arc::clone(&feed);
        let reader = std::thread::spawn(move || filled.fill(lines));
        Self { server, stream, feed, reader: Some(reader) }
    }

    /// All commands seen so far.
    pub fn lines(&self) -> Vec<Ran> {
        self.feed.ran.lock().unwrap().clone()
    }

    /// All commands that had begun when this was called, without the marker of this call.
    ///
    /// # Panics
    ///
    /// When the server does not answer.
    #[track_caller]
    pub fn settled(&self) -> Vec<Ran> {
        let marker = format!("settled-{:016x}", fastrand::u64(..));
        self.server.cli(&["ECHO", &marker]);
        self.wait_for(Duration::from_secs(30), |ran| ran.is("ECHO", &marker));
        let mut lines = self.lines();
        let end = lines.iter().position(|ran| ran.is("ECHO", &marker));
        lines.truncate(end.unwrap_or(lines.len()));
        lines.retain(|ran| !ran.args.iter().any(|arg| arg.starts_with("settled-")));
        lines
    }

    /// The first command, from the start, that `matches`.
    ///
    /// # Panics
    ///
    /// With all commands seen, when `deadline` has passed.
    #[track_caller]
    pub fn wait_for(&self, deadline: Duration, matches: impl Fn(&Ran) -> bool) -> Ran {
        let end = Instant::now() + deadline;
        let mut seen = 0;
        let mut ran = self.feed.ran.lock().unwrap();
        loop {
            if let Some(found) = ran[seen..].iter().find(|ran| matches(ran)) {
                return found.clone();
            }
            seen = ran.len();
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no such command within {deadline:?}: {:#?}", *ran);
            ran = self.feed.grown.wait_timeout(ran, left).unwrap().0;
        }
    }
}

impl Drop for Monitor<'_> {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

#[derive(Debug, Default)]
struct Feed {
    ran: Mutex<Vec<Ran>>,
    grown: Condvar,
}

impl Feed {
    fn fill(&self, lines: BufReader<TcpStream>) {
        for line in lines.lines().map_while(Result::ok) {
            if let Some(ran) = Ran::parse(line.trim_end()) {
                self.ran.lock().unwrap().push(ran);
                self.grown.notify_all();
            }
        }
    }
}

/// Splits `"set" "k" "a\x00b"`.
fn unquote(text: &str) -> Option<Vec<String>> {
    let mut args = Vec::new();
    let mut chars = text.chars();
    while let Some(quote) = chars.next() {
        match quote {
            ' ' => continue,
            '"' => {}
            _ => return None,
        }
        let mut arg = Vec::new();
        loop {
            match chars.next()? {
                '"' => break,
                '\\' => arg.push(match chars.next()? {
                    'n' => b'\n',
                    'r' => b'\r',
                    't' => b'\t',
                    'a' => 7,
                    'b' => 8,
                    'x' => {
                        let hex: String = chars.by_ref().take(2).collect();
                        u8::from_str_radix(&hex, 16).ok()?
                    }
                    literal => u8::try_from(literal).ok()?,
                }),
                literal => arg.extend_from_slice(literal.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        args.push(String::from_utf8_lossy(&arg).into_owned());
    }
    Some(args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_clients_and_scripts_are_parsed() {
        let ran = Ran::parse(r#"+1339518083.107412 [3 127.0.0.1:60866] "SET" "a\"b" "\xc3\xa9\n""#);
        let ran = ran.unwrap();
        assert_eq!(ran.time_us, 1_339_518_083_107_412);
        assert_eq!((ran.db, ran.by.clone()), (3, Caller::Client("127.0.0.1:60866".into())));
        assert_eq!(ran.args, ["SET", "a\"b", "é\n"]);
        assert!(ran.is("SET", "a\"b") && !ran.is("SET", "SET"));
        let ran = Ran::parse(r#"+1.000001 [0 lua] "get" "k""#).unwrap();
        assert_eq!((ran.by.clone(), ran.name()), (Caller::Script, "GET".into()));
    }
}
