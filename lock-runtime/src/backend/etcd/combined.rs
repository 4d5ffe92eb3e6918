//! Many transactions that travel as one.
//!
//! A member takes some thousand changes a second, and further ones wait there, in front of the signs of life of all leases.
//! So the deletions of a connection wait here instead. When more of them are due than may be in flight, they travel together:
//! each is a nested transaction with conditions of its own, and the outer one has none.
//!
//! Only deletions do so. Keys that one transaction makes have one revision, and the revision is a position in the queue.

use std::collections::VecDeque;

use tokio::sync::oneshot;

use crate::backend::BackendError;
use crate::backend::etcd::protocol::protobuf::MalformedMessage;
use crate::backend::etcd::protocol::transaction::{
    KeyOperation, OperationResult, Transaction, TransactionAnswer,
};
use crate::base::mutex::{Mutex, MutexGuard};

/// How many transactions of a queue may be in flight. More of them are no faster: a member executes one after the other.
const MOST_IN_FLIGHT: usize = 8;

/// How many travel as one. The servers' default limit is 128 steps, which includes those of the longest nested transaction.
const MOST_TOGETHER: usize = 60;

type AnswerSender = oneshot::Sender<Result<TransactionAnswer, BackendError>>;

/// A transaction that waits to be sent.
pub(crate) struct QueuedTransaction {
    transaction: Transaction,
    reply: AnswerSender,
}

/// Transactions that are sent as one.
pub(crate) struct TransactionBatch(Vec<QueuedTransaction>);

/// The transactions of a connection that may travel together.
#[derive(Default)]
pub(crate) struct CombiningQueue(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    in_flight: usize,
    waiting: VecDeque<QueuedTransaction>,
}

impl CombiningQueue {
    /// Adds `transaction`. Returns what is to be sent now, if anything is.
    pub(crate) fn push(
        &self,
        transaction: Transaction,
        reply: AnswerSender,
    ) -> Option<TransactionBatch> {
        let mut queue = self.queue();
        queue.waiting.push_back(QueuedTransaction { transaction, reply });
        if queue.in_flight == MOST_IN_FLIGHT {
            return None;
        }
        queue.in_flight += 1;
        queue.take()
    }

    /// What is to be sent after the answer to a batch, if anything is.
    pub(crate) fn next(&self) -> Option<TransactionBatch> {
        let mut queue = self.queue();
        let next = queue.take();
        if next.is_none() {
            queue.in_flight -= 1;
        }
        next
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.0.lock()
    }
}

impl Queue {
    fn take(&mut self) -> Option<TransactionBatch> {
        let count = self.waiting.len().min(MOST_TOGETHER);
        (count > 0).then(|| TransactionBatch(self.waiting.drain(..count).collect()))
    }
}

impl TransactionBatch {
    pub(crate) fn is_single(&self) -> bool {
        self.0.len() == 1
    }

    /// Each transaction as a batch of its own, after all of them were refused as `sent`.
    pub(crate) fn one_by_one(self, sent: Transaction) -> impl Iterator<Item = Self> {
        let nested = sent.success.into_iter().filter_map(|operation| match operation {
            KeyOperation::Nested(transaction) => Some(transaction),
            _ => None,
        });
        self.0.into_iter().zip(nested).map(|(queued, transaction)| {
            Self(vec![QueuedTransaction { transaction, reply: queued.reply }])
        })
    }

    /// The transaction to be sent. One alone travels as it is.
    pub(crate) fn transaction(&mut self) -> Transaction {
        let mut all = self.0.iter_mut().map(|queued| std::mem::take(&mut queued.transaction));
        match (all.next(), all.len()) {
            (Some(only), 0) => only,
            (first, _) => {
                Transaction::of(first.into_iter().chain(all).map(KeyOperation::Nested).collect())
            }
        }
    }

    /// Passes the answer on, or the error to all.
    pub(crate) fn answer(self, answer: Result<TransactionAnswer, BackendError>) {
        let answers = answer.and_then(|answer| Ok(self.split(answer)?));
        match answers {
            Ok(answers) => {
                for (queued, answer) in self.0.into_iter().zip(answers) {
                    // The request may be gone.
                    let _ = queued.reply.send(Ok(answer));
                }
            }
            Err(error) => {
                for queued in self.0 {
                    let _ = queued.reply.send(Err(error.clone()));
                }
            }
        }
    }

    fn split(&self, answer: TransactionAnswer) -> Result<Vec<TransactionAnswer>, MalformedMessage> {
        if self.0.len() == 1 {
            return Ok(vec![answer]);
        }
        let nested = answer.steps.into_iter().map(OperationResult::into_nested);
        let answers = nested.collect::<Result<Vec<_>, _>>()?;
        if answers.len() == self.0.len() { Ok(answers) } else { Err(MalformedMessage) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::etcd::protocol::transaction::KeyCondition;
    use crate::backend::etcd::server_error::closed;

    type Answer = oneshot::Receiver<Result<TransactionAnswer, BackendError>>;

    fn deletion(key: usize) -> Transaction {
        let key = key.to_string().into_bytes();
        Transaction {
            conditions: vec![KeyCondition::Created { key: key.clone(), revision: 7 }],
            success: vec![KeyOperation::Delete { key: key.clone() }],
            failure: vec![KeyOperation::Get { key }],
        }
    }

    fn push(queue: &CombiningQueue, key: usize) -> (Option<TransactionBatch>, Answer) {
        let (reply, answer) = oneshot::channel();
        (queue.push(deletion(key), reply), answer)
    }

    fn deleted(count: i64) -> TransactionAnswer {
        let steps = vec![OperationResult::Deleted(count)];
        TransactionAnswer { is_met: true, steps, ..TransactionAnswer::default() }
    }

    #[test]
    fn what_exceeds_the_limit_travels_together_in_its_order() {
        let queue = CombiningQueue::default();
        let mut sent = Vec::new();
        for key in 0..MOST_IN_FLIGHT {
            let (batch, answer) = push(&queue, key);
            let mut batch = batch.expect("there is room");
            assert_eq!(batch.transaction(), deletion(key), "one alone is not nested");
            sent.push((batch, answer));
        }
        let waiting: Vec<_> = (0..MOST_TOGETHER + 1).map(|key| push(&queue, 100 + key)).collect();
        assert!(waiting.iter().all(|(batch, _)| batch.is_none()));
        let (first, mut answer) = sent.swap_remove(0);
        first.answer(Ok(deleted(1)));
        assert_eq!(answer.try_recv().unwrap().unwrap().steps, [OperationResult::Deleted(1)]);

        let mut together = queue.next().expect("as many as fit");
        let nested = (0..MOST_TOGETHER).map(|key| KeyOperation::Nested(deletion(100 + key)));
        assert_eq!(together.transaction(), Transaction::of(nested.collect()));
        let steps = (0..MOST_TOGETHER).map(|at| OperationResult::Nested(deleted(at as i64)));
        let answers = TransactionAnswer { steps: steps.collect(), ..TransactionAnswer::default() };
        together.answer(Ok(answers));
        let mut rest = queue.next().expect("one is left");
        assert_eq!(rest.transaction(), deletion(100 + MOST_TOGETHER));
        rest.answer(Err(closed()));
        for (at, (_, mut answer)) in waiting.into_iter().enumerate() {
            let answer = answer.try_recv().unwrap().map(|answer| answer.steps);
            match at {
                MOST_TOGETHER => assert_eq!(answer.unwrap_err().message(), closed().message()),
                _ => assert_eq!(answer.unwrap(), [OperationResult::Deleted(at as i64)]),
            }
        }
    }

    #[test]
    fn what_was_refused_together_is_sent_one_by_one() {
        let queued: Vec<_> = (0..3).map(|key| (key, oneshot::channel())).collect();
        let (queued, answers): (Vec<_>, Vec<_>) = queued
            .into_iter()
            .map(|(key, (reply, answer))| {
                (QueuedTransaction { transaction: deletion(key), reply }, answer)
            })
            .unzip();
        let mut batch = TransactionBatch(queued);
        let sent = batch.transaction();
        for (key, mut single) in batch.one_by_one(sent).enumerate() {
            assert_eq!(single.transaction(), deletion(key));
            single.answer(if key == 1 { Err(closed()) } else { Ok(deleted(1)) });
        }
        let answered: Vec<_> =
            answers.into_iter().map(|mut answer| answer.try_recv().unwrap().is_ok()).collect();
        assert_eq!(answered, [true, false, true]);
    }

    #[test]
    fn a_place_is_free_again_when_nothing_waits() {
        let queue = CombiningQueue::default();
        for key in 0..10 * MOST_IN_FLIGHT {
            assert!(push(&queue, key).0.is_some());
            assert!(queue.next().is_none());
        }
        assert_eq!(queue.queue().in_flight, 0);
    }

    #[test]
    fn an_answer_with_other_parts_fails_all() {
        for steps in [vec![], vec![OperationResult::Put, OperationResult::Put]] {
            let queued: Vec<_> = (0..2).map(|_| oneshot::channel()).collect();
            let (replies, answers): (Vec<_>, Vec<_>) = queued.into_iter().unzip();
            let queued = |reply| QueuedTransaction { transaction: deletion(1), reply };
            let batch = TransactionBatch(replies.into_iter().map(queued).collect());
            batch.answer(Ok(TransactionAnswer { steps, ..TransactionAnswer::default() }));
            for mut answer in answers {
                assert!(answer.try_recv().unwrap().is_err());
            }
        }
    }
}
