//! Answers and notifications.

use crate::backend::zookeeper::protocol::jute::{JuteReader, MalformedRecord};
use crate::backend::zookeeper::protocol::operation::AnswerKind;
use crate::backend::zookeeper::protocol::server_code::ServerCode;

/// What precedes the record of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AnswerHeader {
    pub(crate) xid: i32,
    /// The last transaction that the server had seen.
    pub(crate) zxid: i64,
    pub(crate) code: i32,
}

impl AnswerHeader {
    pub(crate) fn read(reader: &mut JuteReader<'_>) -> Result<Self, MalformedRecord> {
        Ok(Self { xid: reader.int()?, zxid: reader.long()?, code: reader.int()? })
    }
}

/// Properties of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeStat {
    /// The transaction that created it.
    pub(crate) created: i64,
    /// The transaction that wrote its data last.
    pub(crate) written: i64,
    /// The session that it ends with, or zero.
    pub(crate) session: i64,
}

impl NodeStat {
    fn read(reader: &mut JuteReader<'_>) -> Result<Self, MalformedRecord> {
        let (created, written) = (reader.long()?, reader.long()?);
        let (_ctime, _mtime) = (reader.long()?, reader.long()?);
        let (_version, _cversion, _aversion) = (reader.int()?, reader.int()?, reader.int()?);
        let session = reader.long()?;
        let (_length, _children, _last_child) = (reader.int()?, reader.int()?, reader.long()?);
        Ok(Self { created, written, session })
    }
}

/// Which clients have access to a node: rights as bits, scheme, and id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AccessEntry {
    pub(crate) rights: i32,
    pub(crate) scheme: String,
    pub(crate) id: String,
}

/// The answer to an operation that succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OperationAnswer {
    Done,
    Created { path: String, stat: NodeStat },
    Node(NodeStat),
    Data(Vec<u8>),
    Children { names: Vec<String>, stat: NodeStat },
    Access(Vec<AccessEntry>),
    Transaction(Vec<Self>),
}

/// The answer to any operation.
pub(crate) type Answered = Result<OperationAnswer, ServerCode>;

impl OperationAnswer {
    /// The record after `header`.
    pub(crate) fn read(
        kind: AnswerKind,
        header: AnswerHeader,
        reader: &mut JuteReader<'_>,
    ) -> Result<Answered, MalformedRecord> {
        if let Err(code) = ServerCode::check(header.code) {
            return Ok(Err(code));
        }
        match kind {
            AnswerKind::Transaction => read_transaction(reader),
            kind => Self::read_record(kind, reader).map(Ok),
        }
    }

    fn read_record(kind: AnswerKind, reader: &mut JuteReader<'_>) -> Result<Self, MalformedRecord> {
        Ok(match kind {
            AnswerKind::Empty => Self::Done,
            AnswerKind::Path => {
                reader.text()?;
                Self::Done
            }
            AnswerKind::Created => {
                let path = reader.text()?.to_owned();
                Self::Created { path, stat: NodeStat::read(reader)? }
            }
            AnswerKind::Node => Self::Node(NodeStat::read(reader)?),
            AnswerKind::Data => {
                let data = reader.buffer()?.to_vec();
                NodeStat::read(reader)?;
                Self::Data(data)
            }
            AnswerKind::Children => {
                let names = reader.list(|reader| reader.text().map(str::to_owned))?;
                Self::Children { names, stat: NodeStat::read(reader)? }
            }
            AnswerKind::Access => Self::Access(reader.list(|reader| {
                let rights = reader.int()?;
                let (scheme, id) = (reader.text()?.to_owned(), reader.text()?.to_owned());
                Ok(AccessEntry { rights, scheme, id })
            })?),
            AnswerKind::Transaction => return Err(MalformedRecord),
        })
    }
}

/// The entries of a transaction, or the first error.
fn read_transaction(reader: &mut JuteReader<'_>) -> Result<Answered, MalformedRecord> {
    const ERROR: i32 = -1;
    let (mut answers, mut failed) = (Vec::new(), Ok(()));
    loop {
        let (number, is_end) = (reader.int()?, reader.boolean()?);
        let _code = reader.int()?;
        if is_end {
            break;
        }
        let kind = match number {
            ERROR => {
                let code = ServerCode::check(reader.int()?);
                if failed.is_ok() && code != Err(ServerCode::INCONSISTENT) {
                    failed = code;
                }
                continue;
            }
            1 => AnswerKind::Path,
            5 => AnswerKind::Node,
            15 | 19 => AnswerKind::Created,
            2 | 13 => AnswerKind::Empty,
            _ => return Err(MalformedRecord),
        };
        answers.push(OperationAnswer::read_record(kind, reader)?);
    }
    Ok(failed.map(|()| OperationAnswer::Transaction(answers)))
}

/// A watched node has changed. Each watch sends one notification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeEvent {
    pub(crate) path: String,
    pub(crate) change: NodeChange,
}

/// How a watched node has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeChange {
    Created,
    Deleted,
    Data,
    Children,
}

impl NodeEvent {
    /// `None` for notifications about something other than a node.
    pub(crate) fn read(reader: &mut JuteReader<'_>) -> Result<Option<Self>, MalformedRecord> {
        let (number, _state, path) = (reader.int()?, reader.int()?, reader.text()?);
        let change = match number {
            1 => NodeChange::Created,
            2 => NodeChange::Deleted,
            3 => NodeChange::Data,
            4 => NodeChange::Children,
            _ => return Ok(None),
        };
        Ok(Some(Self { path: path.to_owned(), change }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::zookeeper::protocol::jute::JuteWriter;

    const HEADER: AnswerHeader = AnswerHeader { xid: 1, zxid: 2, code: 0 };

    fn stat(writer: &mut JuteWriter) {
        writer
            .long(11)
            .long(12)
            .long(0)
            .long(0)
            .int(1)
            .int(2)
            .int(3)
            .long(77)
            .int(0)
            .int(4)
            .long(13);
    }

    fn read(kind: AnswerKind, writer: JuteWriter) -> Result<Answered, MalformedRecord> {
        OperationAnswer::read(kind, HEADER, &mut JuteReader::new(&writer.finish()[4..]))
    }

    #[test]
    fn children_come_with_the_properties_of_their_parent() {
        let mut writer = JuteWriter::new();
        writer.int(2).text("a").text("b");
        stat(&mut writer);
        let stat = NodeStat { created: 11, written: 12, session: 77 };
        let names = vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(
            read(AnswerKind::Children, writer),
            Ok(Ok(OperationAnswer::Children { names, stat }))
        );
    }

    #[test]
    fn a_transaction_fails_with_its_first_error() {
        let mut writer = JuteWriter::new();
        for code in [0, -101, -2] {
            writer.int(-1).boolean(false).int(code).int(code);
        }
        writer.int(-1).boolean(true).int(-1);
        assert_eq!(read(AnswerKind::Transaction, writer), Ok(Err(ServerCode::NO_NODE)));
    }

    #[test]
    fn a_transaction_answers_for_each_of_its_entries() {
        let mut writer = JuteWriter::new();
        writer.int(15).boolean(false).int(0).text("/k/n");
        stat(&mut writer);
        writer.int(2).boolean(false).int(0);
        writer.int(-1).boolean(true).int(-1);
        let Ok(Ok(OperationAnswer::Transaction(answers))) = read(AnswerKind::Transaction, writer)
        else {
            panic!("it succeeded");
        };
        assert_eq!(answers.len(), 2);
        assert!(matches!(&answers[0], OperationAnswer::Created { path, .. } if path == "/k/n"));
    }

    #[test]
    fn an_answer_of_another_form_is_malformed() {
        assert_eq!(read(AnswerKind::Node, JuteWriter::new()), Err(MalformedRecord));
        let mut writer = JuteWriter::new();
        writer.int(7).boolean(false).int(0);
        assert_eq!(read(AnswerKind::Transaction, writer), Err(MalformedRecord));
    }
}
