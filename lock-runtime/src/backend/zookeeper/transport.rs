//! Byte streams to a server, and the first frames on them.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::backend::coordination::addresses::{ServerAddresses, ServerStream};
use crate::backend::coordination::first_server::OpenFailure;
use crate::backend::credentials::Provider;
use crate::backend::zookeeper::protocol::handshake::{SessionIdentity, SessionOffer};
use crate::backend::zookeeper::protocol::jute::MalformedRecord;
use crate::backend::zookeeper::protocol::operation::{NodeOperation, login};
use crate::backend::zookeeper::server_error::{malformed, unreachable};
use crate::backend::zookeeper::url::Ensemble;
use crate::backend::{BackendError, Limits};
use crate::base::error::LockError;
use crate::base::mutex::Mutex;
use crate::base::text::rounded;

/// The longest frame that is read. The names in the queue of a key come in one frame.
const LONGEST_FRAME: usize = 32 << 20;

/// Opens connections to the servers of one ensemble.
pub(crate) struct EnsembleDialer {
    pub(crate) ensemble: Ensemble,
    pub(crate) credentials: Option<Provider>,
    /// What the provider has given so far, in this order, as `user:password`.
    former_logins: Mutex<Vec<String>>,
    pub(crate) servers: ServerAddresses,
    pub(crate) limits: Limits,
}

/// No more logins are sent on a connection, and none that came before them.
const MOST_LOGINS: usize = 8;

impl EnsembleDialer {
    /// Reads the certificate files.
    pub(crate) async fn new(
        ensemble: Ensemble,
        credentials: Option<Provider>,
        limits: Limits,
    ) -> Result<Self, LockError> {
        let (servers, tls) = (ensemble.servers.clone(), ensemble.tls.clone());
        let servers = ServerAddresses::new(servers, tls, None).await?;
        Ok(Self { ensemble, credentials, former_logins: Mutex::default(), servers, limits })
    }

    pub(crate) fn has_login(&self) -> bool {
        self.ensemble.login.is_some() || self.credentials.is_some()
    }

    /// Connects to `server` within `limit`, and opens the session `identity` there or resumes it.
    pub(crate) async fn open(
        &self,
        server: usize,
        identity: &SessionIdentity,
        asked: Duration,
        limit: Duration,
    ) -> Result<(Box<dyn ServerStream>, SessionOffer), OpenFailure> {
        let name = self.servers.name(server);
        let opened = timeout(limit, self.open_in_time(server, &name, identity, asked)).await;
        opened.unwrap_or_else(|_| {
            let why = format!("it has not opened a session within {:?}", rounded(limit));
            Err(unreachable(&name, &why).into())
        })
    }

    async fn open_in_time(
        &self,
        server: usize,
        name: &str,
        identity: &SessionIdentity,
        asked: Duration,
    ) -> Result<(Box<dyn ServerStream>, SessionOffer), OpenFailure> {
        let logins = self.logins().await?;
        let failed = |error: std::io::Error| unreachable(name, &why(&error));
        let mut stream = self.servers.connect(server).await.map_err(failed)?;
        let refused = |error: std::io::Error| OpenFailure {
            may_serve_soon: is_hang_up(&error),
            error: failed(error),
        };
        stream.write_all(&identity.frame(asked)).await.map_err(refused)?;
        let frame = read_frame(&mut stream).await.map_err(refused)?;
        let offer =
            SessionOffer::read(&frame).map_err(|MalformedRecord| malformed().before_sending())?;
        if identity.is_new() && matches!(offer, SessionOffer::Expired) {
            // A session that was never open cannot have expired.
            return Err(malformed().before_sending().into());
        }
        if let SessionOffer::Open { .. } = offer {
            for user_and_password in logins {
                stream.write_all(&login(&user_and_password)).await.map_err(failed)?;
            }
        }
        Ok((stream, offer))
    }

    /// The shortest timeout of a session at `server`: that of a session which asks for less, and is ended immediately.
    pub(crate) async fn shortest_session(&self, server: usize) -> Result<Duration, BackendError> {
        let (identity, asked) = (SessionIdentity::default(), Duration::from_millis(1));
        let opened = self.open(server, &identity, asked, self.limits.connect).await;
        let (mut stream, offer) = opened.map_err(|failure| failure.error)?;
        let SessionOffer::Open { timeout, .. } = offer else {
            return Err(malformed().before_sending());
        };
        // It also ends on its own.
        let _ = stream.write_all(&NodeOperation::CloseSession.frame(1)).await;
        Ok(timeout)
    }

    /// Each `user:password` for this connection. ZooKeeper compares a password only with those that nodes belong to. So the former
    /// ones are sent, too: the nodes of this pool belong to them, among these the locks that it holds.
    async fn logins(&self) -> Result<Vec<String>, BackendError> {
        let Some(provider) = &self.credentials else {
            return Ok(self.ensemble.login.iter().cloned().collect());
        };
        let given = provider.credentials().await?;
        let login = format!("{}:{}", given.named_user()?, given.secret());
        let mut logins = self.former_logins.lock();
        if !logins.contains(&login) {
            if logins.len() == MOST_LOGINS {
                logins.remove(0);
            }
            logins.push(login);
        }
        Ok(logins.clone())
    }
}

async fn read_frame(stream: &mut dyn ServerStream) -> std::io::Result<Vec<u8>> {
    const LONGEST_OFFER: u32 = 1 << 16;
    let length = stream.read_u32().await?;
    if length > LONGEST_OFFER {
        return Err(std::io::Error::other("the answer is not one of ZooKeeper"));
    }
    let mut frame = vec![0; length as usize];
    stream.read_exact(&mut frame).await?;
    Ok(frame)
}

/// What a server without a leader does.
fn is_hang_up(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

/// The end of the connection in words: servers that cannot serve say nothing else.
pub(crate) fn why(error: &std::io::Error) -> String {
    if error.kind() == std::io::ErrorKind::UnexpectedEof {
        return "it has closed the connection, as a server without a leader does".to_owned();
    }
    error.to_string()
}

/// Takes the frames that `bytes` has in full, and leaves the rest.
pub(crate) fn take_frames(
    bytes: &mut Vec<u8>,
    mut take: impl FnMut(&[u8]) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    let mut at = 0;
    let outcome = loop {
        let Some((length, rest)) = bytes[at..].split_first_chunk::<4>() else { break Ok(()) };
        let length = u32::from_be_bytes(*length) as usize;
        if length > LONGEST_FRAME {
            break Err(malformed());
        }
        let Some(frame) = rest.get(..length) else { break Ok(()) };
        if let Err(error) = take(frame) {
            break Err(error);
        }
        at += 4 + length;
    };
    bytes.drain(..at);
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_taken_when_they_are_complete() {
        let mut bytes = vec![0, 0, 0, 1, 7, 0, 0, 0, 0, 0, 0, 0, 2, 8];
        let mut taken = Vec::new();
        let mut take = |bytes: &mut Vec<u8>| {
            take_frames(bytes, |frame| {
                taken.push(frame.to_vec());
                Ok(())
            })
        };
        take(&mut bytes).unwrap();
        assert_eq!(bytes, [0, 0, 0, 2, 8]);
        bytes.push(9);
        take(&mut bytes).unwrap();
        assert!(bytes.is_empty());
        let mut bytes = vec![0xff; 4];
        assert!(take(&mut bytes).is_err());
        assert_eq!(taken, [vec![7], vec![], vec![8, 9]]);
    }
}
