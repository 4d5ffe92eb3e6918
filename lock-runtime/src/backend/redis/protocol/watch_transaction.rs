//! Read, compare, write: what a script does, by `WATCH` and `MULTI` on a connection of its own.
//!
//! The server forgets what was to be written if a key changed after it was read. What is watched belongs to the
//! connection, so one exchange has it for itself, and whoever is dropped half-way closes it: then nothing is
//! watched any more, and what was sent by then is written as a whole or not at all, and only if it still holds.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::sync::Mutex;

use crate::backend::redis::conn::connection::Node;
use crate::backend::redis::conn::dedicated::Spare;
use crate::backend::redis::server_error;
use crate::backend::{BackendError, FailureKind};
use crate::base::key::Key;

pub(crate) struct Desk {
    node: Arc<Node>,
    /// At hand between two exchanges.
    spare: Mutex<Option<Spare>>,
}

/// What was read at a key.
#[derive(Clone, Debug)]
pub(crate) enum Seen {
    Free,
    Held {
        by: Vec<u8>,
        /// `None` if it does not expire.
        left: Option<Duration>,
    },
    /// Something that is no lock of this kind.
    Strange(BackendError),
    Failed(BackendError),
}

/// What came of an exchange.
#[derive(Debug)]
pub(crate) enum Exchanged {
    /// The answers to what was written.
    Written(Vec<Value>),
    /// A key was changed meanwhile, and nothing was written.
    Disturbed,
}

impl Seen {
    /// From the answers to `GET` and `PTTL`.
    pub(crate) fn new(
        node: &Node,
        holder: Result<Value, RedisError>,
        left: Result<Value, RedisError>,
    ) -> Self {
        match (holder, left) {
            (Err(error), _) if server_error::is_wrong_type(&error) => {
                Self::Strange(node.failure(error))
            }
            (Err(error), _) | (_, Err(error)) => Self::Failed(node.failure(error)),
            // Over between the two.
            (Ok(Value::Nil), _) | (_, Ok(Value::Int(-2))) => Self::Free,
            (Ok(Value::BulkString(by)), Ok(Value::Int(left))) => {
                Self::Held { by, left: u64::try_from(left).ok().map(Duration::from_millis) }
            }
            (Ok(other), Ok(_)) => {
                Self::Failed(crate::backend::redis::protocol::scripted::unexpected(&other))
            }
        }
    }
}

impl Desk {
    pub(crate) fn new(node: Arc<Node>) -> Self {
        Self { node, spare: Mutex::new(None) }
    }

    /// Reads `keys` and writes what `decide` makes of them, unless one of them changes in between.
    pub(crate) async fn exchange(
        &self,
        keys: &[&Key],
        decide: impl FnOnce(&[Seen]) -> Vec<Cmd>,
    ) -> Result<Exchanged, BackendError> {
        let mut place = self.spare.lock().await;
        let mut at_hand = place.take();
        let (mut spare, seen) = loop {
            let was_idle = at_hand.is_some();
            let mut spare = match at_hand.take() {
                Some(spare) => spare,
                None => self.node.another().await?,
            };
            match self.read(&mut spare, keys).await {
                Ok(seen) => break (spare, seen),
                // It may have ended since it was used last.
                Err(error) if was_idle && server_error::is_hang_up(&error) => {}
                // Nothing but reads has been sent.
                Err(error) => return Err(self.node.failure(error).before_sending()),
            }
        };
        let writes = decide(&seen);
        let exchanged = self.write(&mut spare, &writes).await?;
        *place = Some(spare);
        Ok(exchanged)
    }

    pub(crate) async fn close(&self) {
        self.spare.lock().await.take();
    }

    async fn read(&self, spare: &mut Spare, keys: &[&Key]) -> Result<Vec<Seen>, RedisError> {
        let mut reads = Pipeline::with_capacity(1 + 2 * keys.len());
        let watch = reads.cmd("WATCH");
        for key in keys {
            watch.arg(key.as_str());
        }
        for key in keys {
            // Not `MGET`, to which a key of another type is a free one.
            reads.cmd("GET").arg(key.as_str()).cmd("PTTL").arg(key.as_str());
        }
        let mut answers = spare.send_all(&reads).await?.into_iter();
        answers.next().unwrap_or(Ok(Value::Nil))?;
        let mut seen = Vec::with_capacity(keys.len());
        while let (Some(holder), Some(left)) = (answers.next(), answers.next()) {
            seen.push(Seen::new(&self.node, holder, left));
        }
        Ok(seen)
    }

    async fn write(&self, spare: &mut Spare, writes: &[Cmd]) -> Result<Exchanged, BackendError> {
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
        let failure = |error| self.node.failure(error);
        let answers = spare.send_all(&all).await.map_err(failure)?;
        let mut refusal = None;
        for answer in answers {
            match answer {
                // `EXEC` alone answers like this.
                Ok(Value::Array(answers)) => {
                    let answers = answers.into_iter().map(Value::extract_error);
                    return Ok(Exchanged::Written(
                        answers.collect::<Result<_, _>>().map_err(failure)?,
                    ));
                }
                Ok(Value::Nil) => return Ok(Exchanged::Disturbed),
                Ok(_) => {}
                // The first says why `EXEC` refuses too.
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        match refusal {
            Some(error) => Err(failure(error)),
            None if writes.is_empty() => Ok(Exchanged::Written(Vec::new())),
            None => Err(BackendError::new(
                FailureKind::MaybeApplied,
                "Redis gave no answer to a transaction",
            )),
        }
    }
}
