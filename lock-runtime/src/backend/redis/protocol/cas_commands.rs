//! Writes that compare a key with its owner token, and the commands that make them in one step.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Pipeline};

use crate::backend::redis::conn::connection::Connection;
use crate::backend::redis::protocol::value::millis;
use crate::backend::redis::protocol::wait_queue::QueueToken;
use crate::backend::redis::server_error;
use crate::backend::{BackendError, LeaseRef, Owner, ReleaseRequest};
use crate::base::key::Key;

/// A write to the keys of a lease, which changes only keys that its owner holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnedWrite<'a> {
    pub(super) lease: &'a LeaseRef,
    pub(super) write: KeyWrite,
    /// Whether a key that is not held leaves the others unchanged.
    pub(super) all_or_none: bool,
}

/// What is written to a key.
#[derive(Clone, Copy, Debug)]
pub(super) enum KeyWrite {
    Delete,
    /// A new expiry, in milliseconds from now.
    Expire(u64),
}

/// The commands of a server that compare and write in one step, and whether it has transactions.
#[derive(Clone, Copy, Debug)]
pub(super) struct CasCommands {
    delete: Option<CasDelete>,
    /// `SET IFEQ`.
    set: bool,
    /// `WATCH` and `MULTI`.
    pub(super) watch: bool,
}

#[derive(Clone, Copy, Debug)]
enum CasDelete {
    Delex,
    Delifeq,
}

impl<'a> OwnedWrite<'a> {
    pub(super) fn renewal(lease: &'a LeaseRef) -> Self {
        Self { lease, write: KeyWrite::Expire(millis(lease.kept_for())), all_or_none: true }
    }

    pub(super) fn release(request: &'a ReleaseRequest) -> Self {
        let write = match request.free_after {
            Duration::ZERO => KeyWrite::Delete,
            free_after => KeyWrite::Expire(millis(free_after)),
        };
        Self { lease: &request.lease, write, all_or_none: false }
    }
}

impl KeyWrite {
    /// Without a comparison: for a transaction.
    pub(super) fn command(self, key: &Key) -> Cmd {
        match self {
            Self::Delete => {
                let mut delete = redis::cmd("DEL");
                delete.arg(key.as_str());
                delete
            }
            Self::Expire(millis) => expire(key, millis),
        }
    }
}

impl CasCommands {
    /// Finds out what the server supports. Each test has its own connection, as a proxy may close it over an unknown
    /// command. Nothing is written; `probe` is a lock that no process takes.
    pub(super) async fn of(connection: &Connection, probe: &Key) -> Result<Self, BackendError> {
        let keys: Arc<[Key]> = Arc::new([probe.clone()]);
        let lease = LeaseRef::new(keys, Owner::from_text([b'0'; 32]), Duration::from_millis(1));
        let supports = async |commands: Self, write| {
            let mut all = Pipeline::new();
            let write = OwnedWrite { lease: &lease, write, all_or_none: true };
            for command in commands.commands(&write) {
                all.add_command(command);
            }
            is_supported(connection, &all).await
        };
        let none = Self { delete: None, set: false, watch: false };
        let set = supports(Self { set: true, ..none }, KeyWrite::Expire(1)).await?;
        let mut delete = None;
        if set {
            for command in [CasDelete::Delex, CasDelete::Delifeq] {
                if supports(Self { delete: Some(command), ..none }, KeyWrite::Delete).await? {
                    delete = Some(command);
                    break;
                }
            }
        }
        let mut transaction = Pipeline::new();
        let key = probe.as_str();
        transaction.cmd("WATCH").arg(key).cmd("GET").arg(key).cmd("PTTL").arg(key).cmd("UNWATCH");
        transaction.cmd("WATCH").arg(key).cmd("MULTI");
        transaction.add_command(KeyWrite::Delete.command(probe));
        transaction.add_command(KeyWrite::Expire(1).command(probe));
        transaction.cmd("EXEC");
        let watch = is_supported(connection, &transaction).await?;
        Ok(Self { delete, set, watch })
    }

    /// Whether a lock can be released without the risk of freeing another owner's lock.
    pub(super) fn are_safe(self) -> bool {
        self.watch || (self.set && self.delete.is_some())
    }

    /// One compare-and-write command per key. Empty if the write needs a transaction.
    pub(super) fn commands(self, write: &OwnedWrite<'_>) -> Vec<Cmd> {
        // Separate commands cannot write either all of several keys or none.
        if write.all_or_none && write.lease.keys.len() > 1 && self.watch {
            return Vec::new();
        }
        let token = QueueToken::new(&write.lease.owner, None);
        let token = token.as_bytes();
        let command = |key: &Key| {
            let key = key.as_str();
            let mut command;
            match (write.write, self.delete) {
                (KeyWrite::Delete, Some(CasDelete::Delex)) => {
                    command = redis::cmd("DELEX");
                    command.arg(key).arg("IFEQ").arg(token);
                }
                (KeyWrite::Delete, Some(CasDelete::Delifeq)) => {
                    command = redis::cmd("DELIFEQ");
                    command.arg(key).arg(token);
                }
                (KeyWrite::Expire(millis), _) if self.set => {
                    command = redis::cmd("SET");
                    command.arg(key).arg(token).arg("IFEQ").arg(token).arg("PX").arg(millis);
                }
                (KeyWrite::Delete, None) | (KeyWrite::Expire(_), _) => return None,
            }
            Some(command)
        };
        write.lease.keys.iter().filter_map(command).collect()
    }

    /// Forgets the command for `write`: the server no longer supports it.
    pub(super) fn forget(&mut self, write: KeyWrite) {
        match write {
            KeyWrite::Delete => self.delete = None,
            KeyWrite::Expire(_) => self.set = false,
        }
    }
}

pub(super) fn expire(key: &Key, millis: u64) -> Cmd {
    let mut expire = redis::cmd("PEXPIRE");
    expire.arg(key.as_str()).arg(millis);
    expire
}

/// Whether the server knows all of `commands` and allows them to this user.
async fn is_supported(connection: &Connection, commands: &Pipeline) -> Result<bool, BackendError> {
    match connection.open_dedicated().await?.send_all(commands).await {
        Ok(answers) => {
            for error in answers.into_iter().filter_map(Result::err) {
                // `EXECABORT` means that an earlier command failed, or, with a cause, that `EXEC` itself is refused.
                let aborted = error.code() == Some("EXECABORT");
                let refused =
                    aborted && error.detail().is_some_and(|it| it.contains("because of:"));
                if server_error::is_forbidden_key(&error) || (aborted && !refused) {
                    continue;
                }
                if refused || server_error::is_unsupported(&error) {
                    return Ok(false);
                }
                return Err(connection.failure(error).before_sending());
            }
            Ok(true)
        }
        Err(error) if server_error::is_hang_up(&error) => Ok(false),
        Err(error) => Err(connection.failure(error).before_sending()),
    }
}
