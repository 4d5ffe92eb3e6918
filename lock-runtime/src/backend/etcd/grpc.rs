//! Calls by gRPC: messages on streams of one HTTP/2 connection.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::header::{CONTENT_TYPE, TE};
use http::{HeaderMap, HeaderValue, Method, Request, Uri, Version};
use percent_encoding::percent_decode;

use crate::backend::coordination::addresses::ServerStream;
use crate::backend::etcd::server_error::CallStatus;

/// How many bytes of one answer, and of all answers together, may be in flight. Both are far above what a lock needs.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// The longest message that is read.
const LONGEST_MESSAGE: usize = 32 << 20;

/// Why a call has no answer.
#[derive(Clone, Debug)]
pub(crate) enum CallFailure {
    /// The server has answered with an error.
    Refused(CallStatus),
    /// Nothing was sent.
    Unsent(String),
    /// The connection or the stream has ended first.
    Broken(String),
    Malformed,
}

impl CallFailure {
    fn broken(error: &h2::Error) -> Self {
        // The server has not looked at it.
        if error.reason() == Some(h2::Reason::REFUSED_STREAM) {
            return Self::Unsent(error.to_string());
        }
        Self::Broken(error.to_string())
    }
}

/// The part of a connection that sends calls.
#[derive(Clone)]
pub(crate) struct GrpcClient {
    requests: SendRequest<Bytes>,
    /// `http://host:port`
    base: String,
    token: Option<HeaderValue>,
}

/// The part of a connection that moves bytes.
pub(crate) type GrpcDriver = h2::client::Connection<Box<dyn ServerStream>>;

impl GrpcClient {
    /// Begins a connection. Nothing moves until the driver is polled.
    pub(crate) async fn open(
        stream: Box<dyn ServerStream>,
        authority: &str,
        is_encrypted: bool,
    ) -> Result<(Self, GrpcDriver), h2::Error> {
        let (requests, driver) = h2::client::Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .enable_push(false)
            .handshake(stream)
            .await?;
        let scheme = if is_encrypted { "https" } else { "http" };
        let base = format!("{scheme}://{authority}");
        Ok((Self { requests, base, token: None }, driver))
    }

    /// Further calls carry this token. `false` if it cannot be sent.
    pub(crate) fn set_token(&mut self, token: &str) -> bool {
        let Ok(mut token) = HeaderValue::from_str(token) else { return false };
        token.set_sensitive(true);
        self.token = Some(token);
        true
    }

    /// Sends `message` and waits for the one message of the answer.
    pub(crate) async fn call(&self, method: &str, message: &[u8]) -> Result<Bytes, CallFailure> {
        let (response, mut body) = self.begin(method).await?;
        body.send_data(frame(message), true).map_err(|error| CallFailure::broken(&error))?;
        let mut answer = MessageReader::new(response);
        let first = answer.next().await?.ok_or(CallFailure::Malformed)?;
        // What follows the message says whether it counts.
        while answer.next().await?.is_some() {}
        Ok(first)
    }

    /// Begins a call on which both sides send messages.
    pub(crate) async fn stream(
        &self,
        method: &str,
    ) -> Result<(MessageSender, MessageReader), CallFailure> {
        let (response, body) = self.begin(method).await?;
        Ok((MessageSender(body), MessageReader::new(response)))
    }

    async fn begin(
        &self,
        method: &str,
    ) -> Result<(h2::client::ResponseFuture, SendStream<Bytes>), CallFailure> {
        let unsent = |error: h2::Error| CallFailure::Unsent(error.to_string());
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.version_mut() = Version::HTTP_2;
        *request.uri_mut() = Uri::try_from(format!("{}{method}", self.base))
            .map_err(|error| CallFailure::Unsent(error.to_string()))?;
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(TE, HeaderValue::from_static("trailers"));
        // A member that has lost the leader refuses the call, instead of waiting for another leader.
        headers.insert("hasleader", HeaderValue::from_static("true"));
        if let Some(token) = &self.token {
            headers.insert("token", token.clone());
        }
        let mut requests = self.requests.clone().ready().await.map_err(unsent)?;
        requests.send_request(request, false).map_err(unsent)
    }
}

/// Sends messages on a stream.
pub(crate) struct MessageSender(SendStream<Bytes>);

impl MessageSender {
    pub(crate) fn send(&mut self, message: &[u8]) -> Result<(), CallFailure> {
        self.0.send_data(frame(message), false).map_err(|error| CallFailure::broken(&error))
    }
}

/// Reads the messages of an answer.
pub(crate) struct MessageReader {
    state: ReaderState,
    unread: BytesMut,
    /// The end of the answer, where it has nothing else.
    status: Option<CallStatus>,
}

enum ReaderState {
    /// A server begins its answer with the first message.
    Opening(h2::client::ResponseFuture),
    Open(RecvStream),
}

impl MessageReader {
    fn new(response: h2::client::ResponseFuture) -> Self {
        Self { state: ReaderState::Opening(response), unread: BytesMut::new(), status: None }
    }

    async fn body(&mut self) -> Result<&mut RecvStream, CallFailure> {
        if let ReaderState::Opening(response) = &mut self.state {
            let response = response.await.map_err(|error| CallFailure::broken(&error))?;
            let (head, body) = response.into_parts();
            if !head.status.is_success() {
                return Err(CallFailure::Malformed);
            }
            self.status = status(&head.headers);
            self.state = ReaderState::Open(body);
        }
        match &mut self.state {
            ReaderState::Open(body) => Ok(body),
            ReaderState::Opening(_) => Err(CallFailure::Malformed),
        }
    }

    /// The next message. `None` at the end of a successful call. May be dropped and called again.
    async fn next(&mut self) -> Result<Option<Bytes>, CallFailure> {
        loop {
            if let Some(message) = self.complete()? {
                return Ok(Some(message));
            }
            let body = self.body().await?;
            match body.data().await {
                Some(Ok(data)) => {
                    let _ = body.flow_control().release_capacity(data.len());
                    self.unread.extend_from_slice(&data);
                }
                Some(Err(error)) => return Err(CallFailure::broken(&error)),
                None => return self.end().await,
            }
        }
    }

    /// The next message of a call that has no end. May be dropped and called again.
    pub(crate) async fn message(&mut self) -> Result<Bytes, CallFailure> {
        let ended = || CallFailure::Broken("a stream has ended".to_owned());
        self.next().await?.ok_or_else(ended)
    }

    fn complete(&mut self) -> Result<Option<Bytes>, CallFailure> {
        let Some((head, rest)) = self.unread.split_first_chunk::<5>() else { return Ok(None) };
        let [compressed, length @ ..] = *head;
        let length = u32::from_be_bytes(length) as usize;
        if compressed != 0 || length > LONGEST_MESSAGE {
            return Err(CallFailure::Malformed);
        }
        if rest.len() < length {
            return Ok(None);
        }
        self.unread.advance(head.len());
        Ok(Some(self.unread.split_to(length).freeze()))
    }

    async fn end(&mut self) -> Result<Option<Bytes>, CallFailure> {
        if self.status.is_none() {
            let trailers = self.body().await?.trailers().await;
            let trailers = trailers.map_err(|error| CallFailure::broken(&error))?;
            self.status = trailers.as_ref().and_then(status);
        }
        match self.status.clone() {
            Some(CallStatus { code: 0, .. }) => Ok(None),
            Some(status) => Err(CallFailure::Refused(status)),
            None => Err(CallFailure::Malformed),
        }
    }
}

fn frame(message: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(message.len() + 5);
    frame.put_u8(0);
    frame.put_u32(message.len() as u32);
    frame.put_slice(message);
    frame.freeze()
}

fn status(headers: &HeaderMap) -> Option<CallStatus> {
    let code = headers.get("grpc-status")?.to_str().ok()?.parse().ok()?;
    let message = headers.get("grpc-message").map_or(&[][..], HeaderValue::as_bytes);
    let message = percent_decode(message).decode_utf8_lossy().into_owned();
    Some(CallStatus { code, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read_with_its_escaped_text() {
        let mut headers = HeaderMap::new();
        assert_eq!(status(&headers), None);
        headers.insert("grpc-status", HeaderValue::from_static("7"));
        headers.insert("grpc-message", HeaderValue::from_static("no%2C not this"));
        let read = status(&headers).unwrap();
        assert_eq!((read.code, read.message.as_str()), (7, "no, not this"));
    }
}
