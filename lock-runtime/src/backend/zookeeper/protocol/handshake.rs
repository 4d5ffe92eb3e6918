//! The first exchange of a connection: it opens a session, or resumes one.

use std::time::Duration;

use crate::backend::zookeeper::protocol::jute::{JuteReader, JuteWriter, MalformedRecord};

/// A session, as its next connection names it. `Debug` shows no password: with it, any client could end the session.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct SessionIdentity {
    /// Zero for a session that is not open yet.
    pub(crate) id: i64,
    pub(crate) password: Vec<u8>,
    /// The last transaction that this session has seen. A server that is behind that transaction refuses the connection.
    pub(crate) last_zxid: i64,
}

impl SessionIdentity {
    pub(crate) fn is_new(&self) -> bool {
        self.id == 0
    }

    /// The frame that asks for a session that the server keeps for `timeout` after each sign of life.
    pub(crate) fn frame(&self, timeout: Duration) -> Vec<u8> {
        const VERSION: i32 = 0;
        const NO_PASSWORD: [u8; 16] = [0; 16];
        let timeout = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        let password = if self.is_new() { &NO_PASSWORD[..] } else { &self.password };
        let mut writer = JuteWriter::new();
        writer.int(VERSION).long(self.last_zxid).int(timeout).long(self.id).buffer(password);
        // No connection to a server without a quorum.
        writer.boolean(false);
        writer.finish()
    }
}

impl std::fmt::Debug for SessionIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionIdentity").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The answer to the first frame.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum SessionOffer {
    Open {
        id: i64,
        password: Vec<u8>,
        timeout: Duration,
    },
    /// The session that was named has ended, and its nodes with it.
    Expired,
}

impl SessionOffer {
    pub(crate) fn read(frame: &[u8]) -> Result<Self, MalformedRecord> {
        let mut reader = JuteReader::new(frame);
        let (_version, timeout, id) = (reader.int()?, reader.int()?, reader.long()?);
        let password = reader.buffer()?.to_vec();
        let timeout = u64::try_from(timeout).unwrap_or_default();
        if timeout == 0 || id == 0 {
            return Ok(Self::Expired);
        }
        Ok(Self::Open { id, password, timeout: Duration::from_millis(timeout) })
    }
}
