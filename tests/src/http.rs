//! One request over a connection of its own.

use std::io::Error;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Posts an empty body to `path`, and returns the status and the head of the response.
///
/// # Errors
/// The connection fails, or ends without a response.
pub async fn post(address: SocketAddr, path: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| Error::other(format!("no response: {text:?}")))?;
    let head = text.split("\r\n\r\n").next().unwrap_or_default().to_ascii_lowercase();
    Ok((status, head))
}
