//! The requests of one connection that have no answer yet, without I/O.

use std::collections::VecDeque;

use tokio::sync::oneshot;

use crate::backend::BackendError;
use crate::backend::zookeeper::protocol::answer::{AnswerHeader, Answered, OperationAnswer};
use crate::backend::zookeeper::protocol::jute::{JuteReader, MalformedRecord};
use crate::backend::zookeeper::protocol::operation::{AnswerKind, NodeOperation};
use crate::backend::zookeeper::server_error::malformed;
use crate::base::clock::Instant;

/// One answer for each operation of a group. A failure says how certain the effect of all of them is.
pub(crate) type GroupAnswers = Result<Vec<Answered>, BackendError>;

/// Takes the answers of a group.
pub(crate) type GroupReply = oneshot::Sender<GroupAnswers>;

/// A group of operations that was sent.
struct SentGroup {
    /// Numbers and kinds of the answers that are missing.
    missing: VecDeque<(i32, AnswerKind)>,
    answers: Vec<Answered>,
    reply: GroupReply,
    sent: Instant,
}

/// Matches answers to requests, which come in the same order.
#[derive(Default)]
pub(crate) struct Exchange {
    last_xid: i32,
    groups: VecDeque<SentGroup>,
}

impl Exchange {
    /// Appends the frames of `operations` to `outgoing`.
    pub(crate) fn send(
        &mut self,
        operations: &[NodeOperation],
        reply: GroupReply,
        now: Instant,
        outgoing: &mut Vec<u8>,
    ) {
        if operations.is_empty() {
            let _ = reply.send(Ok(Vec::new()));
            return;
        }
        let mut missing = VecDeque::with_capacity(operations.len());
        for operation in operations {
            // Numbers below zero are reserved by the protocol.
            self.last_xid = self.last_xid.checked_add(1).unwrap_or(1);
            missing.push_back((self.last_xid, operation.answer_kind()));
            outgoing.extend_from_slice(&operation.frame(self.last_xid));
        }
        let answers = Vec::with_capacity(operations.len());
        self.groups.push_back(SentGroup { missing, answers, reply, sent: now });
    }

    /// Takes one answer, and passes the answers of its group on if it is the last one.
    ///
    /// # Errors
    /// If the answer belongs to another request than the oldest one. The connection is then unusable.
    pub(crate) fn on_answer(
        &mut self,
        header: AnswerHeader,
        reader: &mut JuteReader<'_>,
    ) -> Result<(), BackendError> {
        let group = self.groups.front_mut().ok_or_else(malformed)?;
        let (xid, kind) = group.missing.pop_front().ok_or_else(malformed)?;
        if xid != header.xid {
            return Err(malformed());
        }
        let answer =
            OperationAnswer::read(kind, header, reader).map_err(|MalformedRecord| malformed())?;
        group.answers.push(answer);
        if group.missing.is_empty()
            && let Some(group) = self.groups.pop_front()
        {
            let _ = group.reply.send(Ok(group.answers));
        }
        Ok(())
    }

    /// When the oldest request without an answer was sent.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.groups.front().map(|group| group.sent)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Answers that the connection has ended.
    pub(crate) fn fail(&mut self, error: &BackendError) {
        for group in self.groups.drain(..) {
            let _ = group.reply.send(Err(error.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::FailureKind;
    use crate::backend::zookeeper::protocol::server_code::ServerCode;
    use crate::backend::zookeeper::server_error::connection_lost;

    fn delete() -> NodeOperation {
        NodeOperation::Delete { path: "/a".to_owned() }
    }

    fn answer(exchange: &mut Exchange, xid: i32, code: i32) -> Result<(), BackendError> {
        let header = AnswerHeader { xid, zxid: 1, code };
        exchange.on_answer(header, &mut JuteReader::new(&[]))
    }

    #[test]
    fn a_group_is_answered_with_its_last_answer() {
        let (mut exchange, mut outgoing) = (Exchange::default(), Vec::new());
        let (reply, mut answered) = oneshot::channel();
        let now = Instant::from_nanos(7);
        exchange.send(&[delete(), delete()], reply, now, &mut outgoing);
        assert_eq!(exchange.oldest(), Some(now));
        answer(&mut exchange, 1, 0).unwrap();
        assert!(answered.try_recv().is_err());
        answer(&mut exchange, 2, -101).unwrap();
        let answers = answered.try_recv().unwrap().unwrap();
        assert_eq!(answers, [Ok(OperationAnswer::Done), Err(ServerCode::NO_NODE)]);
        assert!(exchange.is_empty());
        answer(&mut exchange, 3, 0).unwrap_err();
    }

    #[test]
    fn a_group_without_operations_is_answered_at_once() {
        let (reply, mut answered) = oneshot::channel();
        Exchange::default().send(&[], reply, Instant::ORIGIN, &mut Vec::new());
        assert_eq!(answered.try_recv().unwrap().unwrap(), []);
    }

    #[test]
    fn an_answer_to_another_request_is_refused() {
        let (mut exchange, mut outgoing) = (Exchange::default(), Vec::new());
        exchange.send(&[delete()], oneshot::channel().0, Instant::ORIGIN, &mut outgoing);
        answer(&mut exchange, 2, 0).unwrap_err();
    }

    #[test]
    fn a_cut_in_a_group_is_a_failure_of_all_of_it() {
        let (mut exchange, mut outgoing) = (Exchange::default(), Vec::new());
        let (reply, mut answered) = oneshot::channel();
        exchange.send(&[delete(), delete()], reply, Instant::ORIGIN, &mut outgoing);
        answer(&mut exchange, 1, 0).unwrap();
        exchange.fail(&connection_lost("h", "cut"));
        let error = answered.try_recv().unwrap().unwrap_err();
        assert_eq!(error.kind(), FailureKind::MaybeApplied);
    }
}
