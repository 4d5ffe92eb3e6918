//! What answers show of the connection on which they arrived.

use redis::{RedisError, Value};

use crate::backend::redis::server_error;

/// What an answer shows of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerSign {
    Served,
    /// The server has no data to serve.
    NotServed,
    /// The server queues commands for a transaction that nothing ends. The connection is of no more use.
    InTransaction,
}

impl AnswerSign {
    pub(super) fn of(answer: &Value) -> Self {
        match answer {
            Value::SimpleString(status) if status == "QUEUED" => Self::InTransaction,
            answer if server_error::is_loading_answer(answer) => Self::NotServed,
            _ => Self::Served,
        }
    }

    pub(super) fn of_all(answers: &[Value]) -> Self {
        let signs = || answers.iter().map(Self::of);
        signs().find(|sign| *sign != Self::Served).unwrap_or(Self::Served)
    }

    /// Of the answers to a request, which `sign` judges.
    pub(super) fn of_result<T>(
        answer: &Result<T, RedisError>,
        sign: impl FnOnce(&T) -> Self,
    ) -> Self {
        match answer {
            Ok(values) => sign(values),
            Err(error) if server_error::is_hang_up(error) => Self::NotServed,
            Err(_) => Self::Served,
        }
    }
}
