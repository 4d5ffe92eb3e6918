//! A private Prometheus, and the program that checks its files.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::eventually::eventually_async;
use crate::folder::new_folder;
use crate::http;
use crate::prelude::within;
use crate::process::Process;
use crate::server::{free_port, percent};

const DEADLINE: Duration = Duration::from_secs(60);

/// A Prometheus as a child process, on a port of its own. It ends with this value. A service of the machine is not
/// touched.
#[derive(Debug)]
pub struct PrometheusServer {
    process: Process,
    folder: TempDir,
    address: SocketAddr,
}

impl PrometheusServer {
    /// Starts it with the file `configuration`, and waits until it answers.
    ///
    /// # Panics
    ///
    /// With the log, when it ends. When it does not answer within a minute.
    pub async fn start(configuration: &Path) -> Self {
        let folder = new_folder();
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let log = File::create(folder.path().join("server.log")).expect("the folder takes files");
        let mut command = Process::command("prometheus");
        command
            .arg(format!("--config.file={}", configuration.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let process = Process::spawn(command)
            .unwrap_or_else(|error| panic!("cannot start prometheus: {error}"));
        let server = Self { process, folder, address };
        eventually_async(DEADLINE, "Prometheus is ready", async || {
            let ended = server.process.exit_status();
            assert!(ended.is_none(), "prometheus did not start:\n{}", server.log());
            let answer = http::request(address, "GET", "/-/ready", "").await;
            answer.is_ok_and(|(status, ..)| status == 200)
        })
        .await;
        server
    }

    /// The series of the result of `expression`, now.
    ///
    /// # Panics
    ///
    /// With the answer, when the expression is refused.
    pub async fn query(&self, expression: &str) -> Vec<Value> {
        let data = self.data("query", &[("query", expression)]).await;
        data["result"].as_array().cloned().unwrap_or_default()
    }

    /// What is found below `/api/v1/` at `path`, with these parameters.
    ///
    /// # Panics
    ///
    /// With the answer, when it is an error.
    pub async fn data(&self, path: &str, parameters: &[(&str, &str)]) -> Value {
        let parameters: Vec<_> =
            parameters.iter().map(|(name, value)| format!("{name}={}", percent(value))).collect();
        let path = format!("/api/v1/{path}?{}", parameters.join("&"));
        let answering = http::request(self.address, "GET", &path, "");
        let (_, _, text) = within(DEADLINE, &path, answering)
            .await
            .unwrap_or_else(|error| panic!("{path}: {error}\n{}", self.log()));
        let mut answer: Value =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error} in {text}"));
        assert_eq!(answer["status"], "success", "{path}: {answer}");
        answer["data"].take()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("server.log")).unwrap_or_default()
    }
}

/// Runs `promtool`, which comes with Prometheus, and returns its output.
///
/// # Panics
///
/// With its output, when it finds an error.
#[track_caller]
pub fn promtool(arguments: &[&str], file: &Path) -> String {
    let output = Command::new("promtool").args(arguments).arg(file).output();
    let output = output.expect("promtool can be started");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).expect("promtool prints UTF-8");
    assert!(output.status.success(), "promtool {arguments:?} {}: {text}", file.display());
    text
}
