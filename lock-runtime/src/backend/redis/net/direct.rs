//! A connection without pushes, for a few requests at a time.
//!
//! From a command to its reply, it takes a third of the steps of the client library's connection. Commands are written in the
//! order of the requests, and the replies arrive in that order.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use redis::aio::ConnectionLike;
use redis::{Cmd, Pipeline, RedisError, RedisFuture, Value};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;

use crate::backend::redis::net::command::PackedCommands;
use crate::backend::redis::net::reply;
use crate::base::sync::{Mutex, MutexGuard};

/// Sends requests to a [`DirectIo`]. Clones share the connection.
///
/// A request that is dropped stays on the connection, and its reply is skipped.
#[derive(Clone)]
pub(crate) struct DirectConnection(Arc<Mutex<PendingRequests>>);

/// Requests on their way to the I/O.
#[derive(Default)]
struct PendingRequests {
    commands: Vec<u8>,
    /// Memory for the commands of another request.
    spare: Vec<u8>,
    due: VecDeque<DueReply>,
    /// Wakes the I/O for the next request. `None` while it is going to be polled anyway.
    io: Option<Waker>,
    has_ended: bool,
}

/// What the next replies belong to.
enum DueReply {
    One(oneshot::Sender<Value>),
    Several { left: usize, replies: Vec<Value>, to: oneshot::Sender<Vec<Value>> },
}

/// A request and all of its replies.
enum AnsweredRequest {
    One(oneshot::Sender<Value>, Value),
    Several(oneshot::Sender<Vec<Value>>, Vec<Value>),
}

/// The I/O of a connection. It ends with the stream, or at a reply that cannot be read. When it ends or is dropped, every request
/// fails immediately.
pub(crate) struct DirectIo<S> {
    stream: S,
    requests: DirectConnection,
    /// The requests that are taken from `requests` and not answered.
    due: VecDeque<DueReply>,
    /// Their commands, of which the first `written` bytes are written.
    sending: Vec<u8>,
    written: usize,
    /// Whether the stream has passed on all that was written. A stream with its own buffer, such as TLS, may keep a part.
    is_flushed: bool,
    /// Bytes of replies: the bytes before `end` have been received, and of these the bytes before `start` have been read.
    received: Vec<u8>,
    start: usize,
    end: usize,
}

/// The two halves of a connection over `stream`. Requests are served while the I/O is polled.
pub(crate) fn connection<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
) -> (DirectConnection, DirectIo<S>) {
    const BUFFER: usize = 4096;
    let requests = DirectConnection(Arc::new(Mutex::new(PendingRequests::default())));
    let io = DirectIo {
        stream,
        requests: requests.clone(),
        due: VecDeque::new(),
        sending: Vec::new(),
        written: 0,
        is_flushed: true,
        received: vec![0; BUFFER],
        start: 0,
        end: 0,
    };
    (requests, io)
}

impl DirectConnection {
    /// Sends one command. An error of the server is a value.
    ///
    /// # Errors
    /// The connection has ended.
    pub(crate) async fn send(&self, command: &Cmd) -> Result<Value, RedisError> {
        self.send_packed(PackedCommands::of_library(command.get_packed_command(), 1)).await
    }

    /// As [`send`](Self::send).
    pub(crate) async fn send_packed(&self, command: PackedCommands) -> Result<Value, RedisError> {
        let (to, reply) = oneshot::channel();
        self.push(DueReply::One(to), command)?;
        reply.await.map_err(|_| ended())
    }

    /// Sends several commands together. One reply per command, in order.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    pub(crate) async fn send_all(&self, commands: &Pipeline) -> Result<Vec<Value>, RedisError> {
        let packed = commands.get_packed_pipeline();
        self.send_all_packed(PackedCommands::of_library(packed, commands.len())).await
    }

    /// As [`send_all`](Self::send_all).
    pub(crate) async fn send_all_packed(
        &self,
        commands: PackedCommands,
    ) -> Result<Vec<Value>, RedisError> {
        let count = commands.len();
        if count == 0 {
            return Ok(Vec::new());
        }
        let (to, replies) = oneshot::channel();
        self.push(
            DueReply::Several { left: count, replies: Vec::with_capacity(count), to },
            commands,
        )?;
        replies.await.map_err(|_| ended())
    }

    /// No command, in memory of an earlier request. There is room for `count` usual ones.
    pub(crate) fn empty_commands(&self, count: usize) -> PackedCommands {
        let spare = mem::take(&mut self.requests().spare);
        PackedCommands::within(spare, count)
    }

    fn push(&self, due: DueReply, commands: PackedCommands) -> Result<(), RedisError> {
        /// More is not kept.
        const LONGEST_SPARE: usize = 64 * 1024;
        let mut commands = commands.into_bytes();
        let mut requests = self.requests();
        if requests.has_ended {
            return Err(ended());
        }
        if requests.commands.is_empty() {
            mem::swap(&mut requests.commands, &mut commands);
        } else {
            requests.commands.extend_from_slice(&commands);
        }
        if commands.capacity() <= LONGEST_SPARE {
            mem::swap(&mut requests.spare, &mut commands);
        }
        requests.due.push_back(due);
        let io = requests.io.take();
        drop(requests);
        if let Some(io) = io {
            io.wake();
        }
        Ok(())
    }

    fn end(&self) {
        let mut requests = self.requests();
        requests.has_ended = true;
        let rest = (mem::take(&mut requests.due), requests.io.take());
        drop(requests);
        // This wakes the requests, so it must not happen under the lock.
        drop(rest);
    }

    fn requests(&self) -> MutexGuard<'_, PendingRequests> {
        self.0.lock()
    }
}

/// For the requests of a handshake.
impl ConnectionLike for DirectConnection {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(self.send(command))
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        commands: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            let replies = self.send_all(commands).await?;
            Ok(replies.into_iter().skip(offset).take(count).collect())
        })
    }

    fn get_db(&self) -> i64 {
        0
    }
}

#[cold]
fn ended() -> RedisError {
    io::Error::from(io::ErrorKind::BrokenPipe).into()
}

impl<S: AsyncRead + AsyncWrite + Unpin> DirectIo<S> {
    /// Writes what it can. An error ends the connection.
    fn write(&mut self, cx: &mut Context<'_>) -> Result<(), RedisError> {
        loop {
            if self.sending.is_empty() {
                self.take_requests(cx.waker());
            }
            if self.sending.is_empty() {
                return self.flush(cx);
            }
            let unwritten = &self.sending[self.written..];
            match Pin::new(&mut self.stream).poll_write(cx, unwritten) {
                Poll::Ready(Ok(0)) => return Err(ended()),
                Poll::Ready(count) => self.written += count?,
                Poll::Pending => return Ok(()),
            }
            self.is_flushed = false;
            if self.written == self.sending.len() {
                self.sending.clear();
                self.written = 0;
            }
        }
    }

    /// Takes the requests that have arrived. Without any, the next one wakes `io`.
    fn take_requests(&mut self, io: &Waker) {
        let mut requests = self.requests.requests();
        mem::swap(&mut requests.commands, &mut self.sending);
        self.due.append(&mut requests.due);
        if self.sending.is_empty() {
            requests.io = Some(io.clone());
        }
    }

    fn flush(&mut self, cx: &mut Context<'_>) -> Result<(), RedisError> {
        if !self.is_flushed
            && let Poll::Ready(flushed) = Pin::new(&mut self.stream).poll_flush(cx)
        {
            flushed?;
            self.is_flushed = true;
        }
        Ok(())
    }

    /// Receives bytes. Ends only with an error.
    fn read(&mut self, cx: &mut Context<'_>) -> Poll<RedisError> {
        loop {
            if self.end == self.received.len() {
                self.received.resize(2 * self.end, 0);
            }
            let mut buffer = ReadBuf::new(&mut self.received[self.end..]);
            let count = match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer)) {
                Ok(()) => buffer.filled().len(),
                Err(error) => return Poll::Ready(error.into()),
            };
            if count == 0 {
                return Poll::Ready(ended());
            }
            self.end += count;
            if let Err(error) = self.answer_all() {
                return Poll::Ready(error);
            }
        }
    }

    /// Passes on all complete replies.
    fn answer_all(&mut self) -> Result<(), RedisError> {
        while let Some((reply, length)) = reply::read(&self.received[self.start..self.end])? {
            self.start += length;
            // The request may be gone.
            match self.answered(reply)? {
                Some(AnsweredRequest::One(to, reply)) => drop(to.send(reply)),
                Some(AnsweredRequest::Several(to, replies)) => drop(to.send(replies)),
                None => {}
            }
        }
        self.received.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        Ok(())
    }

    /// The request, if `reply` is its last one. `None` if more of its replies are due.
    ///
    /// # Errors
    /// All requests were already answered.
    fn answered(&mut self, reply: Value) -> Result<Option<AnsweredRequest>, RedisError> {
        match self.due.pop_front() {
            Some(DueReply::One(to)) => Ok(Some(AnsweredRequest::One(to, reply))),
            Some(DueReply::Several { left, mut replies, to }) => {
                replies.push(reply);
                if left == 1 {
                    return Ok(Some(AnsweredRequest::Several(to, replies)));
                }
                self.due.push_front(DueReply::Several { left: left - 1, replies, to });
                Ok(None)
            }
            None => Err(ended()),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Future for DirectIo<S> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // Reads first: what has arrived answers no request that is written now.
        if self.read(cx).is_ready() || self.write(cx).is_err() {
            return Poll::Ready(());
        }
        Poll::Pending
    }
}

impl<S> Drop for DirectIo<S> {
    fn drop(&mut self) {
        self.requests.end();
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, BufWriter, duplex};
    use tokio::task::JoinHandle;

    use super::*;
    use crate::backend::redis::server_error;

    fn echo(text: &str) -> Cmd {
        let mut echo = redis::cmd("ECHO");
        echo.arg(text);
        echo
    }

    fn echoed(text: &str) -> String {
        format!("${}\r\n{text}\r\n", text.len())
    }

    /// A connection, and the server's end of it, through which `capacity` bytes fit at a time. The stream has a buffer of its
    /// own.
    fn connected(capacity: usize) -> (DirectConnection, JoinHandle<()>, tokio::io::DuplexStream) {
        let (stream, server) = duplex(capacity);
        let (requests, io) = connection(BufWriter::with_capacity(100, stream));
        (requests, tokio::spawn(io), server)
    }

    async fn received(server: &mut tokio::io::DuplexStream, commands: &[Cmd]) {
        let expected: Vec<u8> = commands.iter().flat_map(Cmd::get_packed_command).collect();
        let mut bytes = vec![0; expected.len()];
        server.read_exact(&mut bytes).await.unwrap();
        assert_eq!(bytes, expected);
    }

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    /// Even if each byte of a command or a reply is a separate write or read.
    #[tokio::test]
    async fn replies_belong_to_the_requests_in_their_order() {
        for capacity in [1, 7, 10_000] {
            let (requests, _io, mut server) = connected(capacity);
            let long = "x".repeat(9_000);
            let (first, second) = (echo("a"), echo(&long));
            let mut several = Pipeline::new();
            several.add_command(echo("b")).add_command(echo("c"));
            let answers = async {
                tokio::join!(
                    biased;
                    requests.send(&first),
                    requests.send_all(&several),
                    requests.send(&second)
                )
            };
            let serve = async {
                received(&mut server, &[echo("a"), echo("b"), echo("c"), echo(&long)]).await;
                let replies = ["a", "b", "c", &long].map(echoed).concat();
                server.write_all(replies.as_bytes()).await.unwrap();
            };
            let ((one, two, three), ()) = tokio::join!(answers, serve);
            assert_eq!(one.unwrap(), bulk("a"));
            assert_eq!(two.unwrap(), [bulk("b"), bulk("c")]);
            assert_eq!(three.unwrap(), bulk(&long));
            assert!(requests.send_all(&Pipeline::new()).await.unwrap().is_empty());
        }
    }

    #[tokio::test]
    async fn the_reply_to_a_dropped_request_is_skipped() {
        let (requests, _io, mut server) = connected(1_000);
        let (given_up, kept) = (echo("a"), echo("b"));
        let mut dropped = Box::pin(requests.send(&given_up));
        assert!(is_pending(&mut dropped).await);
        drop(dropped);
        let serve = async {
            received(&mut server, &[echo("a"), echo("b")]).await;
            server.write_all([echoed("a"), echoed("b")].concat().as_bytes()).await.unwrap();
        };
        let (answer, ()) = tokio::join!(requests.send(&kept), serve);
        assert_eq!(answer.unwrap(), bulk("b"));
    }

    async fn is_pending(future: &mut (impl Future + Unpin)) -> bool {
        std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *future).poll(cx).is_pending())).await
    }

    /// How a connection ends: a request in flight fails, and each later one.
    async fn ends(end: impl AsyncFnOnce(&JoinHandle<()>, tokio::io::DuplexStream)) {
        let (requests, io, mut server) = connected(1_000);
        let command = echo("a");
        let answer = requests.send(&command);
        let end = async {
            received(&mut server, &[echo("a")]).await;
            end(&io, server).await;
        };
        let (answer, ()) = tokio::join!(answer, end);
        assert!(server_error::is_hang_up(&answer.unwrap_err()));
        let _ = io.await;
        assert!(server_error::is_hang_up(&requests.send(&command).await.unwrap_err()));
    }

    #[tokio::test]
    async fn all_requests_fail_when_the_connection_ends() {
        ends(async |_, server| drop(server)).await;
        ends(async |io: &JoinHandle<()>, _| io.abort()).await;
        ends(async |_, mut server| {
            server.write_all(b"hello\r\n").await.unwrap();
        })
        .await;
        // Half of a reply, then the end.
        ends(async |_, mut server| {
            server.write_all(b"$10\r\nabc").await.unwrap();
        })
        .await;
    }

    /// No request can be told from one that was answered twice.
    #[tokio::test]
    async fn a_reply_without_a_request_ends_the_connection() {
        let (requests, io, mut server) = connected(1_000);
        server.write_all(b":1\r\n").await.unwrap();
        io.await.unwrap();
        assert!(requests.send(&echo("a")).await.is_err());
    }

    #[tokio::test]
    async fn a_reply_that_is_there_before_the_request_is_none_to_it() {
        let (stream, mut server) = duplex(1_000);
        let (requests, mut io) = connection(stream);
        server.write_all(b"+OK\r\n").await.unwrap();
        let command = echo("a");
        let mut request = Box::pin(requests.send(&command));
        assert!(is_pending(&mut request).await);
        assert!(!is_pending(&mut io).await, "the connection goes on");
        drop(io);
        assert!(server_error::is_hang_up(&request.await.unwrap_err()));
    }

    /// The server may answer a request and close the connection while another request is written.
    #[tokio::test]
    async fn a_reply_in_front_of_the_end_is_received() {
        let (stream, mut server) = duplex(1_000);
        let (requests, mut io) = connection(stream);
        let (first, second) = (echo("a"), echo("b"));
        let mut answered = Box::pin(requests.send(&first));
        assert!(is_pending(&mut answered).await && is_pending(&mut io).await);
        received(&mut server, &[echo("a")]).await;
        server.write_all(echoed("a").as_bytes()).await.unwrap();
        drop(server);
        let mut failed = Box::pin(requests.send(&second));
        assert!(is_pending(&mut failed).await && !is_pending(&mut io).await);
        drop(io);
        assert_eq!(answered.await.unwrap(), bulk("a"));
        assert!(server_error::is_hang_up(&failed.await.unwrap_err()));
    }
}
