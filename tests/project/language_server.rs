//! What a language server shows of annotated code: placeholders of keys resolve to parameters, and the completion in a
//! body offers no generated name.
//!
//! rust-analyzer gets one file, the sources of the runtime, and the macro that this test program was built with. It builds
//! nothing. Without rust-analyzer (`rustup component add rust-analyzer`) the test says so and ends.

#![allow(clippy::disallowed_methods)]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::compiled_units::CompiledUnits;

const SOURCE: &str = r#"use lock_runtime::{LockError, distributed_lock};

pub struct Order { pub number: u64 }

#[distributed_lock(key = "order:<order.number>", ttl = "5s")]
pub async fn plain(order: Order) -> Result<u64, LockError> {
    let twice = order.number * 2;
    /*plain*/
    Ok(twice)
}

#[distributed_lock(keys = ["a:<order.number>", "b:<tenant>"], when = tenant > 1, on_conflict = instead)]
pub async fn fallback(order: Order, tenant: u64) -> Result<u64, LockError> {
    let twice = order.number * 2;
    /*fallback*/
    Ok(twice)
}

#[distributed_lock(key = "c:<tenant>:<order.number>", guard = held, on_conflict = "skip")]
pub async fn guarded(order: Order, tenant: u64) -> Result<Option<u64>, LockError> {
    let twice = order.number * 2;
    /*guarded*/
    Ok(Some(twice))
}

async fn instead(order: Order, tenant: u64) -> Result<u64, LockError> { Ok(order.number + tenant) }
"#;

/// All requests together.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn placeholders_resolve_and_completions_have_no_generated_names() {
    let Some(mut server) = LanguageServer::start() else {
        println!("skipped: rust-analyzer is not installed (rustup component add rust-analyzer)");
        return;
    };

    // The position in a literal makes no difference: rustc has no spans for parts of literals.
    let hover = server.request("textDocument/hover", &server.position("<order.number>", 8));
    let text = hover["contents"]["value"].as_str().unwrap_or_default();
    assert!(text.contains("order: Order") && text.contains("number: u64"), "{hover}");

    let targets = server.definitions("<order.number>", 8);
    assert_eq!(targets, ["number: u64 }", "order: Order) -> Result<u64, LockError> {"]);
    let targets = server.definitions("\"b:<tenant>\"", 5);
    assert_eq!(targets, ["tenant: u64) -> Result<u64, LockError> {"]);

    for (body, names) in [
        ("/*plain*/", &["twice", "order", "plain"][..]),
        ("/*fallback*/", &["twice", "order", "tenant"]),
        ("/*guarded*/", &["twice", "order", "tenant", "held"]),
    ] {
        let offered = server.completions(body);
        for name in names {
            assert!(offered.iter().any(|label| label == name), "no {name} in {body}: {offered:?}");
        }
        let generated = offered.iter().find(|label| label.starts_with("__"));
        assert_eq!(generated, None, "in {body}");
    }
    server.stop();
}

/// A rust-analyzer that has loaded the file. It is killed when dropped.
struct LanguageServer {
    process: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    uri: String,
    requests: u64,
    deadline: Instant,
    _folder: tempfile::TempDir,
}

impl LanguageServer {
    /// `None` if there is no rust-analyzer.
    fn start() -> Option<Self> {
        // What rustup puts in the place of a component that is not installed fails.
        let version = Command::new("rust-analyzer").arg("--version").output().ok()?;
        if !version.status.success() {
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("lib.rs");
        std::fs::write(&file, SOURCE).expect("the source is written");
        let project = project(&file);
        let mut process = Command::new("rust-analyzer")
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("rust-analyzer starts");
        let output = process.stdout.take().expect("its output is a pipe");
        let (sender, messages) = mpsc::channel();
        thread::spawn(move || {
            let mut output = BufReader::new(output);
            while let Some(message) = read_message(&mut output) {
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut server = Self {
            input: process.stdin.take().expect("its input is a pipe"),
            process,
            messages,
            uri: format!("file://{}", file.display()),
            requests: 0,
            deadline: Instant::now() + LIMIT,
            _folder: folder,
        };
        server.load(&project);
        Some(server)
    }

    fn load(&mut self, project: &Value) {
        let capabilities = json!({
            "experimental": { "serverStatusNotification": true },
            "textDocument": { "hover": { "contentFormat": ["plaintext"] } },
        });
        let options = json!({
            "linkedProjects": [project],
            "checkOnSave": false,
            "cachePriming": { "enable": false },
            "cargo": { "buildScripts": { "enable": false } },
            "procMacro": { "enable": true, "attributes": { "enable": true } },
        });
        let hello = json!({
            "processId": null, "rootUri": null, "capabilities": capabilities, "initializationOptions": options,
        });
        self.request("initialize", &hello);
        self.notify("initialized", &json!({}));
        let document =
            json!({ "uri": self.uri, "languageId": "rust", "version": 1, "text": SOURCE });
        self.notify("textDocument/didOpen", &json!({ "textDocument": document }));
        loop {
            let message = self.next_message();
            if message["method"] == "experimental/serverStatus"
                && message["params"]["quiescent"] == true
            {
                assert_eq!(message["params"]["health"], "ok", "{message}");
                return;
            }
        }
    }

    fn request(&mut self, method: &str, params: &Value) -> Value {
        self.requests += 1;
        let id = self.requests;
        self.send(&json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params }));
        loop {
            let mut message = self.next_message();
            if message["id"] == id && message["method"].is_null() {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].take();
            }
        }
    }

    fn notify(&mut self, method: &str, params: &Value) {
        self.send(&json!({ "jsonrpc": "2.0", "method": method, "params": params }));
    }

    fn send(&mut self, message: &Value) {
        let text = message.to_string();
        let written = write!(self.input, "Content-Length: {}\r\n\r\n{text}", text.len());
        written.and_then(|()| self.input.flush()).expect("rust-analyzer reads");
    }

    /// The next message. A request of the server is answered.
    fn next_message(&mut self) -> Value {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let message = self.messages.recv_timeout(left);
        let message = message.unwrap_or_else(|end| panic!("rust-analyzer says no more: {end}"));
        if !message["method"].is_null() && !message["id"].is_null() {
            self.send(&json!({ "jsonrpc": "2.0", "id": message["id"], "result": null }));
        }
        message
    }

    /// The parameters of a request for the place `offset` bytes behind the start of `text`.
    fn position(&self, text: &str, offset: usize) -> Value {
        let at = SOURCE.find(text).expect("the text is in the source") + offset;
        let line = SOURCE[..at].matches('\n').count();
        let character = at - SOURCE[..at].rfind('\n').map_or(0, |end| end + 1);
        json!({
            "textDocument": { "uri": self.uri },
            "position": { "line": line, "character": character },
        })
    }

    /// The source of each target, from its start to the end of the line, sorted.
    fn definitions(&mut self, text: &str, offset: usize) -> Vec<&'static str> {
        let targets = self.request("textDocument/definition", &self.position(text, offset));
        let targets = targets.as_array().unwrap_or_else(|| panic!("no definition of {text}"));
        let source = |target: &Value| {
            assert_eq!(target["uri"], self.uri.as_str());
            let number = |name: &str| target["range"]["start"][name].as_u64();
            let line = number("line").and_then(|line| SOURCE.lines().nth(line.try_into().ok()?));
            let from = number("character").and_then(|from| usize::try_from(from).ok());
            line.zip(from).map_or("", |(line, from)| &line[from..])
        };
        let mut targets: Vec<_> = targets.iter().map(source).collect();
        targets.sort_unstable();
        targets
    }

    /// The labels that are offered at `text`, where no name has begun.
    fn completions(&mut self, text: &str) -> Vec<String> {
        let list = self.request("textDocument/completion", &self.position(text, 0));
        let items = list["items"].as_array().or(list.as_array());
        let items = items.unwrap_or_else(|| panic!("no completion at {text}: {list}"));
        items.iter().filter_map(|item| item["label"].as_str().map(str::to_owned)).collect()
    }

    fn stop(mut self) {
        self.request("shutdown", &Value::Null);
        self.notify("exit", &Value::Null);
        assert!(self.process.wait().expect("rust-analyzer ends").success());
    }
}

impl Drop for LanguageServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A crate of `file` alone, which uses the runtime, which uses the macro.
fn project(file: &Path) -> Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member has a workspace");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let sysroot = Command::new(rustc).current_dir(root).args(["--print", "sysroot"]).output();
    let sysroot = String::from_utf8(sysroot.expect("rustc starts").stdout).expect("a path");
    let library = CompiledUnits::of_this_program().library("lock_macros");
    json!({
        "sysroot": sysroot.trim(),
        "crates": [
            {
                "root_module": root.join("lock-macros/src/lib.rs"),
                "edition": "2024",
                "deps": [],
                "is_proc_macro": true,
                "proc_macro_dylib_path": library,
            },
            {
                "root_module": root.join("lock-runtime/src/lib.rs"),
                "edition": "2024",
                "deps": [{ "crate": 0, "name": "lock_macros" }],
                "cfg": ["feature=\"macros\""],
            },
            {
                "root_module": file,
                "edition": "2024",
                "deps": [{ "crate": 1, "name": "lock_runtime" }],
                "is_workspace_member": true,
            },
        ],
    })
}

/// One message behind its headers; `None` at the end.
fn read_message(output: &mut BufReader<ChildStdout>) -> Option<Value> {
    let mut length = None;
    loop {
        let mut header = String::new();
        if output.read_line(&mut header).ok()? == 0 {
            return None;
        }
        if header.trim().is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("Content-Length:") {
            length = value.trim().parse().ok();
        }
    }
    let mut text = vec![0; length?];
    output.read_exact(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}
