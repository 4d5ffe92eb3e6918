//! All watches of a pool, on one stream. After a reconnect, each continues from the revision that it had reached.
//!
//! A member reports changes as they happen to a watch that knows all earlier ones, and to others ten times a second. So the watch
//! of a waiter begins with its creation, and a look finds what has changed before.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::backend::etcd::grpc::{CallFailure, MessageSender};
use crate::backend::etcd::member::Member;
use crate::backend::etcd::member_task::MemberLink;
use crate::backend::etcd::protocol::watch::{self, KeyEvent, WatchMessage, WatchedKeys};
use crate::backend::etcd::server_error::CallStatus;

/// Receives what watches see. Methods never block.
pub(crate) trait WatchSink: Send + Sync {
    fn keys_changed(&self, watch: i64, events: &[KeyEvent]);
    /// The watch has begun, and there may have been changes between the revision that was asked for and its creation.
    fn began_late(&self, watch: i64);
    /// The watch has ended without all changes: the server no longer knows them, or refuses to report them.
    fn watch_ended(&self, watch: i64);
}

enum WatchCommand {
    Create { id: i64, keys: WatchedKeys, revision: i64 },
    Cancel { id: i64 },
}

/// Sends requests for watches. Dropping it ends the stream.
pub(crate) struct KeyWatches {
    commands: mpsc::UnboundedSender<WatchCommand>,
    last_id: AtomicI64,
}

impl KeyWatches {
    pub(crate) fn new() -> (Self, WatchInbox) {
        let (commands, inbox) = mpsc::unbounded_channel();
        (Self { commands, last_id: AtomicI64::new(0) }, WatchInbox(inbox))
    }

    /// A number for the next watch.
    pub(crate) fn next_id(&self) -> i64 {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Watches `keys` for changes from `revision` on.
    pub(crate) fn create(&self, id: i64, keys: WatchedKeys, revision: i64) {
        let _ = self.commands.send(WatchCommand::Create { id, keys, revision });
    }

    pub(crate) fn cancel(&self, id: i64) {
        let _ = self.commands.send(WatchCommand::Cancel { id });
    }
}

/// The receiving end of [`KeyWatches`].
pub(crate) struct WatchInbox(mpsc::UnboundedReceiver<WatchCommand>);

impl WatchInbox {
    /// Serves the requests until they end.
    pub(crate) fn serve(self, link: Arc<MemberLink>, sink: Arc<dyn WatchSink>) -> AbortHandle {
        let task = WatchTask { link, sink, commands: self.0, watches: HashMap::new() };
        tokio::spawn(task.run()).abort_handle()
    }
}

struct KeyWatch {
    keys: WatchedKeys,
    /// The first revision that it has not seen.
    revision: i64,
    /// Whether it begins with its creation, which has no answer yet.
    begins_late: bool,
}

struct WatchTask {
    link: Arc<MemberLink>,
    sink: Arc<dyn WatchSink>,
    commands: mpsc::UnboundedReceiver<WatchCommand>,
    watches: HashMap<i64, KeyWatch>,
}

impl WatchTask {
    async fn run(mut self) {
        let mut number = 0;
        loop {
            let Some(member) = self.link.next_member(number).await else { return };
            number = member.number;
            let Err(failure) = self.exchange(&member).await;
            let error = member.failed(failure);
            member.end(error);
        }
    }

    async fn exchange(&mut self, member: &Arc<Member>) -> Result<Infallible, CallFailure> {
        let (mut sender, mut reader) = member.grpc.stream("/etcdserverpb.Watch/Watch").await?;
        for (id, watch) in &mut self.watches {
            watch.begins_late = false;
            sender.send(&watch::create(*id, &watch.keys, watch.revision))?;
        }
        loop {
            tokio::select! {
                biased;
                message = reader.message() => {
                    let message =
                        WatchMessage::read(&message?).map_err(|_| CallFailure::Malformed)?;
                    self.on_message(message)?;
                }
                command = self.commands.recv() => match command {
                    Some(command) => self.on_command(command, &mut sender)?,
                    None => return Err(CallFailure::Unsent("the pool is closed".to_owned())),
                },
                error = member.ended() => return Err(CallFailure::Broken(error.to_string())),
            }
        }
    }

    fn on_command(
        &mut self,
        command: WatchCommand,
        sender: &mut MessageSender,
    ) -> Result<(), CallFailure> {
        match command {
            WatchCommand::Create { id, keys, revision } => {
                let begins_late = matches!(keys, WatchedKeys::Deletion { .. });
                let message = watch::create(id, &keys, if begins_late { 0 } else { revision });
                self.watches.insert(id, KeyWatch { keys, revision, begins_late });
                sender.send(&message)
            }
            WatchCommand::Cancel { id } => match self.watches.remove(&id) {
                Some(_) => sender.send(&watch::cancel(id)),
                None => Ok(()),
            },
        }
    }

    fn on_message(&mut self, message: WatchMessage) -> Result<(), CallFailure> {
        let WatchMessage { id, origin, is_created, is_cancelled, compacted, reason, events } =
            message;
        if is_created
            && !is_cancelled
            && let Some(watch) = self.watches.get_mut(&id)
            && std::mem::take(&mut watch.begins_late)
            && origin.revision >= watch.revision
        {
            self.sink.began_late(id);
        }
        if !events.is_empty()
            && let Some(watch) = self.watches.get_mut(&id)
        {
            let last = events.iter().map(|event| event.key.modified).max();
            watch.revision = last.map_or(watch.revision, |last| watch.revision.max(last + 1));
            self.sink.keys_changed(id, &events);
        }
        if !is_cancelled {
            return Ok(());
        }
        let status = CallStatus { code: 0, message: reason };
        if compacted == 0 && status.ends_connection() {
            // The watch continues on the next connection.
            return Err(CallFailure::Refused(status));
        }
        // Not after a cancellation that was requested.
        if self.watches.remove(&id).is_some() {
            self.sink.watch_ended(id);
        }
        Ok(())
    }
}
