//! Read, compare and write by `WATCH` and `MULTI`: what a script does in one step.
//!
//! The server discards the writes if a key changed after it was read. Watched keys belong to the connection, so one transaction
//! has the connection for itself. A caller that is dropped midway closes the connection, and no key is watched any longer. Writes
//! that were sent by then are made completely or not at all, and only if no key has changed.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::sync::Mutex;
use tokio::time::sleep;

use crate::backend::redis::conn::connection::Connection;
use crate::backend::redis::conn::dedicated::DedicatedConnection;
use crate::backend::redis::protocol::value::{duration, unexpected};
use crate::backend::redis::server_error;
use crate::backend::{BackendError, FailureKind};
use crate::base::key::Key;

/// How many times a transaction starts over when a key changes meanwhile. Each change is another client's progress.
pub(super) const MAX_TRIES: usize = 4;

/// Runs one transaction at a time on a connection of its own, which it keeps between transactions.
pub(super) struct WatchTransaction {
    connection: Arc<Connection>,
    idle: Mutex<Option<DedicatedConnection>>,
}

/// What was read at a key.
#[derive(Clone, Debug)]
pub(super) enum Observed {
    Free,
    Held {
        by: Vec<u8>,
        /// `None` if the key does not expire.
        expires_in: Option<Duration>,
    },
    /// The key holds another type than a lock.
    WrongType(BackendError),
    Failed(BackendError),
}

#[derive(Debug)]
pub(super) enum TxnResult {
    /// The replies to the writes.
    Written(Vec<Value>),
    /// A key changed meanwhile, and nothing was written.
    Conflict,
}

impl Observed {
    /// From the answers to `GET` and `PTTL`.
    pub(super) fn new(
        connection: &Connection,
        holder: Result<Value, RedisError>,
        left: Result<Value, RedisError>,
    ) -> Self {
        match (holder, left) {
            (Err(error), _) if server_error::is_wrong_type(&error) => {
                Self::WrongType(connection.failure(error))
            }
            (Err(error), _) | (_, Err(error)) => Self::Failed(connection.failure(error)),
            // The key may expire between the two commands.
            (Ok(Value::Nil), _) | (_, Ok(Value::Int(-2))) => Self::Free,
            (Ok(Value::BulkString(by)), Ok(Value::Int(left))) => {
                Self::Held { by, expires_in: duration(left) }
            }
            (Ok(other), Ok(_)) => Self::Failed(unexpected(&other)),
        }
    }
}

impl WatchTransaction {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self { connection, idle: Mutex::new(None) }
    }

    /// Opens the connection for the next [`run`](Self::run), if there is none beside the main connection. That takes several
    /// round trips, and continues if the caller is dropped.
    pub(super) async fn prepare(self: &Arc<Self>) -> Result<(), BackendError> {
        // While the main connection is down, each transaction opens its own.
        if self.connection.generation().is_none() || self.is_ready(&*self.idle.lock().await) {
            return Ok(());
        }
        let transaction = self.clone();
        let opening = tokio::spawn(async move {
            let mut idle = transaction.idle.lock().await;
            if !transaction.is_ready(&idle) {
                *idle = None;
                *idle = Some(transaction.open().await?);
            }
            Ok(())
        });
        opening.await.unwrap_or_else(|_| Err(not_opened()))
    }

    fn is_ready(&self, idle: &Option<DedicatedConnection>) -> bool {
        idle.as_ref().is_some_and(|idle| self.connection.is_beside(idle))
    }

    /// A connection beside the main one. The attempt ends with the main connection, and so with the pool.
    async fn open(&self) -> Result<DedicatedConnection, BackendError> {
        const CHECK: Duration = Duration::from_millis(100);
        let generation = self.connection.generation();
        let mut opening = pin!(self.connection.open_dedicated());
        while generation.is_some() && self.connection.generation() == generation {
            tokio::select! {
                opened = &mut opening => return opened,
                () = sleep(CHECK) => {}
            }
        }
        Err(not_opened())
    }

    /// Reads `keys` and makes the writes that `decide` returns, unless one of the keys changes in between.
    pub(super) async fn run(
        &self,
        keys: &[&Key],
        decide: impl FnOnce(&[Observed]) -> Vec<Cmd>,
    ) -> Result<TxnResult, BackendError> {
        let mut idle = self.idle.lock().await;
        let mut reused = idle.take().filter(|idle| self.connection.is_beside(idle));
        let (mut connection, observed) = loop {
            let was_idle = reused.is_some();
            let mut connection = match reused.take() {
                Some(connection) => connection,
                None => self.connection.open_dedicated().await?,
            };
            match self.read(&mut connection, keys).await {
                Ok(observed) => break (connection, observed),
                // An idle connection may have ended since its last use.
                Err(error) if was_idle && server_error::is_hang_up(&error) => {}
                // Nothing but reads has been sent.
                Err(error) => return Err(self.failure(&connection, error).before_sending()),
            }
        };
        let writes = decide(&observed);
        let result = self.write(&mut connection, &writes).await?;
        *idle = Some(connection);
        Ok(result)
    }

    /// The failure of a request on `dedicated`. It says nothing about a connection that was opened later.
    fn failure(&self, dedicated: &DedicatedConnection, error: RedisError) -> BackendError {
        if self.connection.is_beside(dedicated) {
            self.connection.failure(error)
        } else {
            server_error::failure(&self.connection.server(), error)
        }
    }

    pub(super) async fn close(&self) {
        self.idle.lock().await.take();
    }

    async fn read(
        &self,
        connection: &mut DedicatedConnection,
        keys: &[&Key],
    ) -> Result<Vec<Observed>, RedisError> {
        let mut reads = Pipeline::with_capacity(1 + 2 * keys.len());
        let watch = reads.cmd("WATCH");
        for key in keys {
            watch.arg(key.as_str());
        }
        for key in keys {
            // Not `MGET`, which reports a key of another type as free.
            reads.cmd("GET").arg(key.as_str()).cmd("PTTL").arg(key.as_str());
        }
        let mut answers = connection.send_all(&reads).await?.into_iter();
        answers.next().unwrap_or(Ok(Value::Nil))?;
        let mut observed = Vec::with_capacity(keys.len());
        while let (Some(holder), Some(left)) = (answers.next(), answers.next()) {
            observed.push(Observed::new(&self.connection, holder, left));
        }
        Ok(observed)
    }

    async fn write(
        &self,
        connection: &mut DedicatedConnection,
        writes: &[Cmd],
    ) -> Result<TxnResult, BackendError> {
        let mut all = Pipeline::with_capacity(2 + writes.len());
        if writes.is_empty() {
            all.cmd("UNWATCH");
        } else {
            all.cmd("MULTI");
            for write in writes {
                all.add_command(write.clone());
            }
            all.cmd("EXEC");
        }
        let answers = connection.send_all(&all).await;
        let failure = |error| self.failure(connection, error);
        let answers = answers.map_err(failure)?;
        let mut refusal = None;
        for answer in answers {
            match answer {
                // Only `EXEC` replies with an array.
                Ok(Value::Array(answers)) => {
                    let answers = answers.into_iter().map(Value::extract_error);
                    return Ok(TxnResult::Written(
                        answers.collect::<Result<_, _>>().map_err(failure)?,
                    ));
                }
                Ok(Value::Nil) => return Ok(TxnResult::Conflict),
                Ok(_) => {}
                // The first error is also the reason why `EXEC` refuses.
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        match refusal {
            Some(error) => Err(failure(error)),
            None if writes.is_empty() => Ok(TxnResult::Written(Vec::new())),
            None => Err(BackendError::new(
                FailureKind::MaybeApplied,
                "Redis sent no reply to a transaction",
            )),
        }
    }
}

/// The connection for transactions was not opened. Nothing was sent on it.
#[cold]
fn not_opened() -> BackendError {
    BackendError::new(FailureKind::NotApplied, "the connection to Redis has ended in the meantime")
}
