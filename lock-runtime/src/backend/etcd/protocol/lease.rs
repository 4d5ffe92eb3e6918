//! Leases.

use crate::backend::etcd::protocol::key_value::AnswerOrigin;
use crate::backend::etcd::protocol::protobuf::{MalformedMessage, MessageWriter, each_field};

/// A request for a lease of this many seconds.
pub(crate) fn grant(id: i64, seconds: i64) -> Vec<u8> {
    let mut writer = MessageWriter::default();
    writer.int(1, seconds);
    writer.int(2, id);
    writer.into_bytes()
}

/// A request to end a lease, or a sign of life for it.
pub(crate) fn of_lease(id: i64) -> Vec<u8> {
    let mut writer = MessageWriter::default();
    writer.int(1, id);
    writer.into_bytes()
}

/// A request for the keys of a lease.
pub(crate) fn keys_of(id: i64) -> Vec<u8> {
    let mut writer = MessageWriter::default();
    writer.int(1, id);
    writer.int(2, 1);
    writer.into_bytes()
}

/// The names of the keys in the answer to [`keys_of`].
pub(crate) fn read_keys(message: &[u8]) -> Result<Vec<Vec<u8>>, MalformedMessage> {
    let mut keys = Vec::new();
    each_field(message, |field, value| {
        if field == 5 {
            keys.push(value.bytes()?.to_vec());
        }
        Ok(())
    })?;
    Ok(keys)
}

/// The answer to the request for a lease, or to a sign of life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeaseAnswer {
    pub(crate) origin: AnswerOrigin,
    pub(crate) id: i64,
    /// How many seconds the lease lasts. Zero or less: there is none.
    pub(crate) seconds: i64,
}

impl LeaseAnswer {
    pub(crate) fn read(message: &[u8]) -> Result<Self, MalformedMessage> {
        let mut answer = Self::default();
        each_field(message, |field, value| {
            match field {
                1 => answer.origin = AnswerOrigin::read(value.bytes()?)?,
                2 => answer.id = value.int()?,
                3 => answer.seconds = value.int()?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(answer)
    }
}
