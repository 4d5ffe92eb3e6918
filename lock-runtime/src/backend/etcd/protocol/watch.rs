//! Watches: changes of keys as they happen.

use crate::backend::etcd::protocol::key_value::{AnswerOrigin, KeyValue};
use crate::backend::etcd::protocol::protobuf::{MalformedMessage, MessageWriter, each_field};

/// The keys that are watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WatchedKeys {
    /// The deletion of one key.
    Deletion { key: Vec<u8> },
    /// All changes from one key up to another.
    Range { from: Vec<u8>, to: Vec<u8> },
}

/// A request for all changes from `revision` on. Zero: from the creation of the watch on.
pub(crate) fn create(id: i64, keys: &WatchedKeys, revision: i64) -> Vec<u8> {
    const NO_PUT: u8 = 0;
    let mut writer = MessageWriter::default();
    writer.message(1, |create| {
        match keys {
            WatchedKeys::Deletion { key } => {
                create.bytes(1, key);
                create.present_bytes(5, &[NO_PUT]);
            }
            WatchedKeys::Range { from, to } => {
                create.bytes(1, from);
                create.bytes(2, to);
            }
        }
        create.int(3, revision);
        create.int(7, id);
    });
    writer.into_bytes()
}

pub(crate) fn cancel(id: i64) -> Vec<u8> {
    let mut writer = MessageWriter::default();
    writer.message(2, |cancel| cancel.int(1, id));
    writer.into_bytes()
}

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyEvent {
    pub(crate) is_deletion: bool,
    /// The key after the change.
    pub(crate) key: KeyValue,
}

impl KeyEvent {
    fn read(message: &[u8]) -> Result<Self, MalformedMessage> {
        let (mut is_deletion, mut key) = (false, KeyValue::default());
        each_field(message, |field, value| {
            match field {
                1 => is_deletion = value.flag()?,
                2 => key = KeyValue::read(value.bytes()?)?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(Self { is_deletion, key })
    }
}

/// A message of the stream of watches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WatchMessage {
    pub(crate) id: i64,
    pub(crate) origin: AnswerOrigin,
    /// The watch begins after the revision of `origin`, or with the one that was asked for.
    pub(crate) is_created: bool,
    /// The server has ended the watch.
    pub(crate) is_cancelled: bool,
    /// The first revision that the server still knows, if the watch was for an earlier one.
    pub(crate) compacted: i64,
    pub(crate) reason: String,
    pub(crate) events: Vec<KeyEvent>,
}

impl WatchMessage {
    pub(crate) fn read(message: &[u8]) -> Result<Self, MalformedMessage> {
        let mut read = Self::default();
        each_field(message, |field, value| {
            match field {
                1 => read.origin = AnswerOrigin::read(value.bytes()?)?,
                2 => read.id = value.int()?,
                3 => read.is_created = value.flag()?,
                4 => read.is_cancelled = value.flag()?,
                5 => read.compacted = value.int()?,
                6 => read.reason = value.text()?,
                11 => read.events.push(KeyEvent::read(value.bytes()?)?),
                _ => {}
            }
            Ok(())
        })?;
        Ok(read)
    }
}
