//! A byte stream that ends where the server takes away a shard channel.
//!
//! When the slot of a shard channel leaves the server, the server unsubscribes the connection by an unrequested push.
//! The client library takes this push for the answer to the oldest pending request, and each later answer for that to
//! the request after it. So the stream fails before the push is complete, and the connection is replaced.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The beginning of the push that ends a subscription to a shard channel.
const UNSUBSCRIBED: &[u8] = b">3\r\n$12\r\nsunsubscribe\r\n";

/// Passes the bytes of `stream` on, and fails once [`UNSUBSCRIBED`] has been read.
pub(crate) struct ShardStream<S> {
    stream: S,
    /// How many bytes of [`UNSUBSCRIBED`] the bytes read so far end with. At its full length nothing more is read.
    matched: usize,
}

impl<S> ShardStream<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, matched: 0 }
    }

    /// Whether `bytes`, the next ones read, complete [`UNSUBSCRIBED`]. If so none of them may be passed on: the push
    /// ends after them.
    fn is_unsubscribed(&mut self, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        while self.matched < UNSUBSCRIBED.len() {
            if self.matched == 0 {
                let Some(at) = rest.iter().position(|byte| *byte == UNSUBSCRIBED[0]) else { break };
                rest = &rest[at..];
            }
            let Some((byte, behind)) = rest.split_first() else { break };
            if *byte == UNSUBSCRIBED[self.matched] {
                self.matched += 1;
                rest = behind;
            } else if self.matched == 0 {
                rest = behind;
            } else {
                // The first byte occurs only once in the pattern, so the current byte may start a new match.
                self.matched = 0;
            }
        }
        self.matched == UNSUBSCRIBED.len()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ShardStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        if self.matched < UNSUBSCRIBED.len() {
            ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        }
        if self.is_unsubscribed(&buffer.filled()[before..]) {
            buffer.set_filled(before);
            let message = "the slot of a shard channel has left the server";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, message)));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ShardStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    const FRAME: &[u8] =
        b">3\r\n$12\r\nsunsubscribe\r\n$29\r\nlock_runtime:0123456789ab0001\r\n:0\r\n";

    /// The bytes passed on from `parts` that arrive one after the other, and whether the stream fails.
    async fn read(parts: &[&[u8]]) -> (Vec<u8>, bool) {
        let (client, mut server) = duplex(1024);
        let mut stream = ShardStream::new(client);
        let (mut got, mut fails) = (Vec::new(), false);
        for part in parts {
            server.write_all(part).await.unwrap();
            let mut chunk = [0; 1024];
            match stream.read(&mut chunk).await {
                Ok(len) => got.extend_from_slice(&chunk[..len]),
                Err(_) => fails = true,
            }
        }
        (got, fails)
    }

    #[tokio::test]
    async fn other_bytes_are_passed_on() {
        for bytes in [
            &b">3\r\n$8\r\nsmessage\r\n"[..],
            b">3\r\n$12\r\nsunsubscrib",
            b">3\r\n$12\r\nsunsubscriber\r\n",
            b":1\r\n$5\r\n>>>3\r\r\n",
        ] {
            assert_eq!(read(&[bytes]).await, (bytes.to_vec(), false));
            for cut in 1..bytes.len() {
                assert_eq!(read(&[&bytes[..cut], &bytes[cut..]]).await, (bytes.to_vec(), false));
            }
        }
    }

    #[tokio::test]
    async fn the_end_of_a_subscription_is_never_passed_on_completely() {
        for front in [&b""[..], b"+OK\r\n", b":1\r\n>", b">3\r\n>3\r\n$12\r\n"] {
            let all = [front, FRAME].concat();
            for cut in 1..all.len() {
                let (got, fails) = read(&[&all[..cut], &all[cut..]]).await;
                assert!(fails && got.len() < front.len() + UNSUBSCRIBED.len(), "{cut}: {got:?}");
            }
        }
    }
}
