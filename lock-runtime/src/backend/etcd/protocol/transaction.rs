//! Transactions: the only requests for keys.

use crate::backend::etcd::protocol::key_value::{AnswerOrigin, KeyValue};
use crate::backend::etcd::protocol::protobuf::{MalformedMessage, MessageWriter, each_field};

/// What has to be true of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeyCondition {
    /// The key was made by this revision. Zero: there is none.
    Created { key: Vec<u8>, revision: i64 },
    /// There is no key from `from` up to `to`.
    NoneIn { from: Vec<u8>, to: Vec<u8> },
    /// The key exists with this value.
    Value { key: Vec<u8>, value: Vec<u8> },
}

/// One step of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeyOperation {
    Get {
        key: Vec<u8>,
    },
    /// As the member has it, which may be behind the others. A transaction of only these is not confirmed by a majority.
    GetHere {
        key: Vec<u8>,
    },
    Find(KeySearch),
    Put {
        key: Vec<u8>,
        value: Vec<u8>,
        lease: i64,
    },
    /// Puts an existing key under another lease, with the value that it has.
    Move {
        key: Vec<u8>,
        lease: i64,
    },
    Delete {
        key: Vec<u8>,
    },
    /// A transaction with conditions of its own.
    Nested(Transaction),
}

/// A search for keys by the revisions that have made them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeySearch {
    pub(crate) from: Vec<u8>,
    pub(crate) to: Vec<u8>,
    pub(crate) order: SearchOrder,
    pub(crate) limit: i64,
    /// The first revision that counts. Zero for all.
    pub(crate) created_from: i64,
    /// The last revision that counts. Zero for all.
    pub(crate) created_to: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SearchOrder {
    OldestFirst,
    NewestFirst,
    ByName,
}

/// Steps under conditions. Without a change it is a read that a majority confirms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Transaction {
    pub(crate) conditions: Vec<KeyCondition>,
    /// Executed if all conditions are met.
    pub(crate) success: Vec<KeyOperation>,
    /// Executed otherwise.
    pub(crate) failure: Vec<KeyOperation>,
}

impl Transaction {
    pub(crate) fn of(success: Vec<KeyOperation>) -> Self {
        Self { success, ..Self::default() }
    }

    pub(crate) fn encoded(&self) -> Vec<u8> {
        let mut writer = MessageWriter::default();
        self.write(&mut writer);
        writer.into_bytes()
    }

    fn write(&self, writer: &mut MessageWriter) {
        for condition in &self.conditions {
            writer.message(1, |inner| condition.write(inner));
        }
        for (field, operations) in [(2, &self.success), (3, &self.failure)] {
            for operation in operations {
                writer.message(field, |inner| operation.write(inner));
            }
        }
    }
}

impl KeyCondition {
    fn write(&self, writer: &mut MessageWriter) {
        const CREATED: i64 = 1;
        const VALUE: i64 = 3;
        // The result is `equal`, which is zero.
        match self {
            Self::Created { key, revision } => {
                writer.int(2, CREATED);
                writer.bytes(3, key);
                writer.present_int(5, *revision);
            }
            Self::NoneIn { from, to } => {
                writer.int(2, CREATED);
                writer.bytes(3, from);
                writer.present_int(5, 0);
                writer.bytes(64, to);
            }
            Self::Value { key, value } => {
                writer.int(2, VALUE);
                writer.bytes(3, key);
                writer.present_bytes(7, value);
            }
        }
    }
}

impl KeyOperation {
    fn write(&self, writer: &mut MessageWriter) {
        match self {
            Self::Get { key } => writer.message(1, |get| get.bytes(1, key)),
            Self::GetHere { key } => writer.message(1, |get| {
                const SERIALIZABLE: u64 = 7;
                get.bytes(1, key);
                get.int(SERIALIZABLE, 1);
            }),
            Self::Find(search) => writer.message(1, |find| search.write(find)),
            Self::Put { key, value, lease } => writer.message(2, |put| {
                put.bytes(1, key);
                put.bytes(2, value);
                put.int(3, *lease);
            }),
            Self::Move { key, lease } => writer.message(2, |put| {
                const KEEPS_VALUE: u64 = 5;
                put.bytes(1, key);
                put.int(3, *lease);
                put.int(KEEPS_VALUE, 1);
            }),
            Self::Delete { key } => writer.message(3, |delete| delete.bytes(1, key)),
            Self::Nested(transaction) => writer.message(4, |inner| transaction.write(inner)),
        }
    }
}

impl KeySearch {
    fn write(&self, writer: &mut MessageWriter) {
        const BY_NAME: i64 = 0;
        const BY_CREATION: i64 = 2;
        writer.bytes(1, &self.from);
        writer.bytes(2, &self.to);
        writer.int(3, self.limit);
        writer.int(
            5,
            match self.order {
                // etcd applies no limit while it reads for a sorted answer. Unsorted ones are in the order of names.
                SearchOrder::ByName => 0,
                SearchOrder::OldestFirst => 1,
                SearchOrder::NewestFirst => 2,
            },
        );
        writer.int(6, if self.order == SearchOrder::ByName { BY_NAME } else { BY_CREATION });
        writer.int(12, self.created_from);
        writer.int(13, self.created_to);
    }
}

/// The answer to a [`Transaction`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TransactionAnswer {
    pub(crate) origin: AnswerOrigin,
    /// Whether the conditions were met.
    pub(crate) is_met: bool,
    /// The answer of each step.
    pub(crate) steps: Vec<OperationResult>,
}

/// The answer to a [`KeyOperation`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OperationResult {
    Found {
        keys: Vec<KeyValue>,
        /// The number of keys, including those beyond the limit.
        count: i64,
    },
    Put,
    Deleted(i64),
    Nested(TransactionAnswer),
}

impl OperationResult {
    pub(crate) fn found(&self) -> Result<&[KeyValue], MalformedMessage> {
        let Self::Found { keys, .. } = self else { return Err(MalformedMessage) };
        Ok(keys)
    }

    pub(crate) const fn count(&self) -> Result<i64, MalformedMessage> {
        let Self::Found { count, .. } = self else { return Err(MalformedMessage) };
        Ok(*count)
    }

    pub(crate) const fn deleted(&self) -> Result<i64, MalformedMessage> {
        let Self::Deleted(count) = self else { return Err(MalformedMessage) };
        Ok(*count)
    }

    pub(crate) fn into_nested(self) -> Result<TransactionAnswer, MalformedMessage> {
        let Self::Nested(answer) = self else { return Err(MalformedMessage) };
        Ok(answer)
    }

    fn read(message: &[u8]) -> Result<Self, MalformedMessage> {
        let mut read = None;
        each_field(message, |field, value| {
            let body = value.bytes()?;
            read = match field {
                1 => {
                    let (mut keys, mut count) = (Vec::new(), 0);
                    each_field(body, |field, value| {
                        match field {
                            2 => keys.push(KeyValue::read(value.bytes()?)?),
                            4 => count = value.int()?,
                            _ => {}
                        }
                        Ok(())
                    })?;
                    Some(Self::Found { keys, count })
                }
                2 => Some(Self::Put),
                3 => {
                    let mut count = 0;
                    each_field(body, |field, value| {
                        if field == 2 {
                            count = value.int()?;
                        }
                        Ok(())
                    })?;
                    Some(Self::Deleted(count))
                }
                4 => Some(Self::Nested(TransactionAnswer::read(body)?)),
                _ => None,
            };
            Ok(())
        })?;
        read.ok_or(MalformedMessage)
    }
}

impl TransactionAnswer {
    pub(crate) fn read(message: &[u8]) -> Result<Self, MalformedMessage> {
        let mut answer = Self::default();
        each_field(message, |field, value| {
            match field {
                1 => answer.origin = AnswerOrigin::read(value.bytes()?)?,
                2 => answer.is_met = value.flag()?,
                3 => answer.steps.push(OperationResult::read(value.bytes()?)?),
                _ => {}
            }
            Ok(())
        })?;
        Ok(answer)
    }

    pub(crate) fn step(&self, at: usize) -> Result<&OperationResult, MalformedMessage> {
        self.steps.get(at).ok_or(MalformedMessage)
    }

    /// What a read at this position has found.
    pub(crate) fn found(&self, at: usize) -> Result<&[KeyValue], MalformedMessage> {
        self.step(at)?.found()
    }
}
