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
    let end_of_head = text.windows(4).position(|bytes| bytes == b"\r\n\r\n");
    let no_response = || Error::other(format!("no response: {:?}", String::from_utf8_lossy(&text)));
    let end_of_head = end_of_head.ok_or_else(no_response)?;
    let (head, body) = (&text[..end_of_head], &text[end_of_head + 4..]);
    let head = String::from_utf8_lossy(head).to_ascii_lowercase();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| Error::other(format!("no status: {head:?}")))?;
    let is_chunked = head.lines().any(|line| line == "transfer-encoding: chunked");
    let body = if is_chunked { joined_chunks(body)? } else { body.to_owned() };
    Ok((status, head, String::from_utf8_lossy(&body).into_owned()))
}

/// The content of a body that is sent in chunks, RFC 9112, section 7.1.
fn joined_chunks(mut chunks: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let incomplete = || Error::other("the last chunk is missing");
        let end = chunks.windows(2).position(|bytes| bytes == b"\r\n").ok_or_else(incomplete)?;
        let size = std::str::from_utf8(&chunks[..end]).ok();
        let size = size.and_then(|size| usize::from_str_radix(size, 16).ok());
        let size = size.ok_or_else(|| Error::other("a chunk begins with its size"))?;
        if size == 0 {
            return Ok(body);
        }
        let start = end + 2;
        body.extend(chunks.get(start..start + size).ok_or_else(incomplete)?);
        chunks = chunks.get(start + size + 2..).ok_or_else(incomplete)?;
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_joined_and_a_missing_one_is_noticed() {
        let whole = b"3\r\na\r\n\r\nA\r\nbcdefghijk\r\n0\r\n\r\n";
        assert_eq!(joined_chunks(whole).unwrap(), b"a\r\nbcdefghijk");
        for end in 0..whole.len() - 4 {
            assert!(joined_chunks(&whole[..end]).is_err(), "{end}");
        }
    }
}
