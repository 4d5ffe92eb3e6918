//! A headless Chromium, driven over the WebDriver protocol.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::folder::new_folder;
use crate::http;
use crate::prelude::within;
use crate::process::Worker;

const START_DEADLINE: Duration = Duration::from_secs(60);

/// A window of the browser. It ends with this value.
#[derive(Debug)]
pub struct Browser {
    _driver: Worker,
    _profile: TempDir,
    address: SocketAddr,
    session: String,
}

impl Browser {
    /// Starts it with a window of this size, in CSS pixels.
    ///
    /// # Panics
    ///
    /// When Chromium or its driver is not installed, or does not start within a minute.
    pub async fn start(width: u32, height: u32) -> Self {
        let profile = new_folder();
        let (driver, port) = start_driver();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let arguments = [
            "--headless".to_owned(),
            "--no-sandbox".to_owned(),
            "--disable-gpu".to_owned(),
            "--disable-quic".to_owned(),
            "--disable-dev-shm-usage".to_owned(),
            "--no-first-run".to_owned(),
            "--disable-background-networking".to_owned(),
            "--disable-component-update".to_owned(),
            "--disable-sync".to_owned(),
            format!("--window-size={width},{height}"),
            format!("--user-data-dir={}", profile.path().display()),
        ];
        let options = json!({ "args": arguments });
        let wanted = json!({ "alwaysMatch": { "goog:chromeOptions": options } });
        let mut browser =
            Self { _driver: driver, _profile: profile, address, session: String::new() };
        let answer = browser.send("POST", "/session", &json!({ "capabilities": wanted })).await;
        let session = answer["sessionId"].as_str().expect("a session has a number");
        session.clone_into(&mut browser.session);
        browser
    }

    /// Opens a page, and waits until it is loaded.
    ///
    /// # Panics
    ///
    /// As [`run`](Self::run).
    pub async fn open(&self, url: &str) {
        self.send("POST", &self.path("url"), &json!({ "url": url })).await;
    }

    /// The value that this body of a JavaScript function returns.
    ///
    /// # Panics
    ///
    /// With the answer of the driver, when the function throws.
    pub async fn run(&self, script: &str) -> Value {
        let body = json!({ "script": script, "args": [] });
        self.send("POST", &self.path("execute/sync"), &body).await
    }

    /// Writes a picture of the window to this file, as PNG.
    ///
    /// # Panics
    ///
    /// When the file cannot be written.
    pub async fn save_picture(&self, file: &Path) {
        let picture = self.send("GET", &self.path("screenshot"), &Value::Null).await;
        let text = picture.as_str().expect("a picture is a text");
        std::fs::write(file, decoded_base64(text)).expect("the file can be written");
    }

    fn path(&self, name: &str) -> String {
        format!("/session/{}/{name}", self.session)
    }

    async fn send(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let answering = http::request(self.address, method, path, &body);
        let answer = within(START_DEADLINE, path, answering).await;
        let (status, _, text) = answer.expect("chromedriver answers");
        let mut answer: Value = serde_json::from_str(&text).expect("chromedriver answers in JSON");
        assert_eq!(status, 200, "{method} {path}: {answer}");
        answer["value"].take()
    }
}

/// The driver, and its port. It takes a free port of IPv6 or IPv4, and ends if the port of the other one is in use.
fn start_driver() -> (Worker, u16) {
    const NO_PORT: &str = "port not available";
    for _ in 0..10 {
        let driver = Worker::start("chromedriver", &["--port=0"]);
        let line = driver.wait_for_line(START_DEADLINE, |line| {
            line.contains("started successfully") || line.contains(NO_PORT)
        });
        if !line.contains(NO_PORT) {
            let digits: String = line.chars().filter(char::is_ascii_digit).collect();
            return (driver, digits.parse().expect("the line ends with the port"));
        }
    }
    panic!("chromedriver finds no port that is free for IPv4 and IPv6");
}

/// The driver ends its browser.
impl Drop for Browser {
    fn drop(&mut self) {
        let Ok(mut stream) = TcpStream::connect(self.address) else { return };
        let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
        let path = format!("/session/{}", self.session);
        let request = format!(
            "DELETE {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        );
        if stream.write_all(request.as_bytes()).is_ok() {
            let _ = stream.read_to_end(&mut Vec::new());
        }
    }
}

fn decoded_base64(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let (mut bits, mut count) = (0_u32, 0);
    for digit in text.bytes().filter(|digit| *digit != b'=') {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            _ => 63,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from(bits >> count & 0xff).expect("eight bits"));
        }
    }
    bytes
}
