//! Keys, their values, and the header of each answer.

use crate::backend::etcd::protocol::protobuf::{MalformedMessage, each_field};

/// What each answer says about the member that gave it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnswerOrigin {
    /// The number of the cluster's last change that the member knows.
    pub(crate) revision: i64,
    /// The number of the election that the member knows of.
    pub(crate) term: u64,
}

impl AnswerOrigin {
    pub(crate) fn read(message: &[u8]) -> Result<Self, MalformedMessage> {
        let mut origin = Self::default();
        each_field(message, |field, value| {
            match field {
                3 => origin.revision = value.int()?,
                4 => origin.term = value.unsigned()?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(origin)
    }
}

/// A key and its value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeyValue {
    pub(crate) key: Vec<u8>,
    /// The revision that has made the key.
    pub(crate) created: i64,
    /// The revision of its last change.
    pub(crate) modified: i64,
    pub(crate) value: Vec<u8>,
    /// The lease that the key ends with. Zero for none.
    pub(crate) lease: i64,
}

impl KeyValue {
    pub(crate) fn read(message: &[u8]) -> Result<Self, MalformedMessage> {
        let mut read = Self::default();
        each_field(message, |field, value| {
            match field {
                1 => read.key = value.bytes()?.to_vec(),
                2 => read.created = value.int()?,
                3 => read.modified = value.int()?,
                5 => read.value = value.bytes()?.to_vec(),
                6 => read.lease = value.int()?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(read)
    }
}
