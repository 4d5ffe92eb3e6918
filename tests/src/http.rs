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

/// Sends `body` with this method, and returns the status, the head and the body of the response.
///
/// # Errors
/// The connection fails, or ends without a response.
pub async fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> std::io::Result<(u16, String, String)> {
    request_with(address, method, path, &[], body).await
}

/// [`request`] with these headers.
///
/// # Errors
/// As [`request`].
pub async fn request_with(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> std::io::Result<(u16, String, String)> {
    let mut stream = TcpStream::connect(address).await?;
    let length = body.len();
    let headers: String =
        headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let text = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(text.as_bytes()).await?;
    let mut text = Vec::new();
    // Not each server ends the connection.
    while !is_whole(&text) && stream.read_buf(&mut text).await? > 0 {}
    let text = String::from_utf8_lossy(&text).into_owned();
    let (head, body) = text
        .split_once("\r\n\r\n")
        .ok_or_else(|| Error::other(format!("no response: {text:?}")))?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| Error::other(format!("no status: {head:?}")))?;
    Ok((status, head.to_ascii_lowercase(), body.to_owned()))
}

/// Whether a response has a `content-length`, and its body is there.
fn is_whole(response: &[u8]) -> bool {
    let text = String::from_utf8_lossy(response).to_ascii_lowercase();
    let Some((head, _)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let Some(length) = length.and_then(|length| length.trim().parse::<usize>().ok()) else {
        return false;
    };
    let end_of_head = response.windows(4).position(|bytes| bytes == b"\r\n\r\n");
    end_of_head.is_some_and(|end| response.len() - end - 4 >= length)
}
