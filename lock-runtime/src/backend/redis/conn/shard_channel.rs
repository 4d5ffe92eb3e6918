//! The channel of a pool in one shard of a cluster: a message on it goes to that shard's servers and not to all.
//!
//! A shard channel is heard and spoken to at the server that has the slot of its name (`SSUBSCRIBE`, `SPUBLISH`, Redis 7.0).
//! So each connection to a server of a cluster looks for four digits that put the name of the pool's channel into a slot of that
//! server, and the tokens that are stored there end with them. Whatever goes wrong with it, a message goes to the channel without
//! the digits, as in a server that knows no shards: it reaches all connections of the pool.
//!
//! The digits say where a message goes and nothing else: a key that has moved with its slot keeps those of the server that stored
//! it, and its holder is told by what stands before them. An entry in a line that has moved is called over the pool's
//! channel; if its owner has claimed anew meanwhile, the call is that of a name given up, and the lock is passed on.
//!
//! When the slot of the name leaves the server, the server takes the channel away by an unrequested push. The client
//! library takes that push for the answer to the request in front, and all later answers for those of the requests before
//! them. [`UntilTakenAway`] ends the connection before; the next one finds other digits.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::task::{Context, Poll, ready};

use redis::Value;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::backend::redis::channel::Channel;
use crate::backend::redis::net::transport::Stream;
use crate::backend::redis::routing::slots::slot;
use crate::backend::redis::server_error;

/// Which shard channel of a pool is heard on the connection to one server; clones share it. Zero is none.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shard(Arc<AtomicU16>);

impl Shard {
    /// The channel that a token names at this server.
    pub(crate) fn of(&self, channel: Channel) -> Channel {
        channel.in_shard(self.0.load(Ordering::Relaxed))
    }

    /// Has messages told on `connection`, on a channel whose slot `is_here`.
    pub(crate) async fn listen(
        &self,
        connection: &mut MultiplexedConnection,
        channel: Channel,
        is_here: impl Fn(u16) -> bool,
    ) {
        // The map may not know yet of slots that have left.
        const TRIES: usize = 8;
        // Enough for a server that has one slot in two hundred, and no time that the driver would miss.
        const NUMBERS: u16 = 2_048;
        self.0.store(0, Ordering::Relaxed);
        let mut gone = Vec::new();
        for number in 1..=NUMBERS {
            let name = channel.in_shard(number).shard_name();
            let its_slot = slot(&name);
            if !is_here(its_slot) || gone.contains(&its_slot) {
                continue;
            }
            let mut subscribe = redis::cmd("SSUBSCRIBE");
            subscribe.arg(name);
            let answer = connection.req_packed_command(&subscribe).await;
            match answer.and_then(Value::extract_error) {
                Ok(Value::Push { .. }) => return self.0.store(number, Ordering::Relaxed),
                Err(error) if server_error::is_about_slots(&error) && gone.len() < TRIES => {
                    gone.push(its_slot);
                }
                // An older server, or a user without the right to it.
                Ok(_) | Err(_) => return,
            }
        }
    }
}

/// The beginning of the push by which a server takes a shard channel away.
const TAKEN_AWAY: &[u8] = b">3\r\n$12\r\nsunsubscribe\r\n";

/// A stream that ends where a shard channel is taken away.
pub(crate) struct UntilTakenAway {
    stream: Box<dyn Stream>,
    /// How much of [`TAKEN_AWAY`] the bytes so far end with. All of it: nothing more is read.
    matched: usize,
}

impl UntilTakenAway {
    pub(crate) fn new(stream: Box<dyn Stream>) -> Self {
        Self { stream, matched: 0 }
    }

    /// Whether `bytes`, which come next, bring what is looked for to its end. Then none of them may be passed on: the push
    /// ends behind them.
    fn has_come(&mut self, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        while self.matched < TAKEN_AWAY.len() {
            if self.matched == 0 {
                let Some(at) = rest.iter().position(|byte| *byte == TAKEN_AWAY[0]) else { break };
                rest = &rest[at..];
            }
            let Some((byte, behind)) = rest.split_first() else { break };
            if *byte == TAKEN_AWAY[self.matched] {
                self.matched += 1;
                rest = behind;
            } else if self.matched == 0 {
                rest = behind;
            } else {
                // Its first byte is nowhere else in it, so the byte at hand may be a new beginning.
                self.matched = 0;
            }
        }
        self.matched == TAKEN_AWAY.len()
    }
}

impl AsyncRead for UntilTakenAway {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        if self.matched < TAKEN_AWAY.len() {
            ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        }
        if self.has_come(&buffer.filled()[before..]) {
            buffer.set_filled(before);
            let message = "the slot of a shard channel has left the server";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, message)));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for UntilTakenAway {
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

    /// What comes through of parts that arrive one after the other, and whether the stream fails then.
    async fn read(parts: &[&[u8]]) -> (Vec<u8>, bool) {
        let (ours, mut theirs) = duplex(1024);
        let mut stream = UntilTakenAway::new(Box::new(ours));
        let (mut got, mut fails) = (Vec::new(), false);
        for part in parts {
            theirs.write_all(part).await.unwrap();
            let mut chunk = [0; 1024];
            match stream.read(&mut chunk).await {
                Ok(len) => got.extend_from_slice(&chunk[..len]),
                Err(_) => fails = true,
            }
        }
        (got, fails)
    }

    #[tokio::test]
    async fn what_is_no_end_of_a_channel_passes() {
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
    async fn the_end_of_a_channel_is_never_passed_on_as_a_whole() {
        for front in [&b""[..], b"+OK\r\n", b":1\r\n>", b">3\r\n>3\r\n$12\r\n"] {
            let all = [front, FRAME].concat();
            for cut in 1..all.len() {
                let (got, fails) = read(&[&all[..cut], &all[cut..]]).await;
                assert!(fails && got.len() < front.len() + TAKEN_AWAY.len(), "{cut}: {got:?}");
            }
        }
    }
}
