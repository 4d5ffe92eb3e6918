//! The Lua scripts, by hash and by text.

use std::borrow::Cow;

use once_cell::sync::Lazy;
use redis::Cmd;

use crate::backend::BackendError;
use crate::backend::redis::conn::connection::Node;
use crate::backend::redis::keyspace::Names;
use crate::backend::redis::server_error;

/// A script that the server may or may not know yet.
#[derive(Debug)]
pub(crate) struct Script {
    sha: String,
    text: Cow<'static, str>,
}

const FENCE: &str = include_str!("fence.lua");

/// Takes locks, all or none, with a fence if one is wanted.
pub(crate) static ACQUIRE: Lazy<Script> =
    Lazy::new(|| Script::new([FENCE, include_str!("acquire.lua")].concat()));
/// Extends leases.
pub(crate) static RENEW: Lazy<Script> = Lazy::new(|| Script::new(include_str!("renew.lua")));
/// Frees a lock that nobody waits for.
pub(crate) static RELEASE: Lazy<Script> = Lazy::new(|| Script::new(include_str!("release.lua")));
/// Writes locks that somebody has once more.
pub(crate) static CONFIRM: Lazy<Script> = Lazy::new(|| Script::new(include_str!("confirm.lua")));
/// Claims a lock or a place in its line, and releases both.
pub(crate) static LINE: Lazy<Script> =
    Lazy::new(|| Script::new([FENCE, include_str!("wait_queue.lua")].concat()));

/// A node's part in a quorum.
pub(crate) static BALLOT: Lazy<Script> =
    Lazy::new(|| Script::new(include_str!("../quorum/ballot.lua")));

/// How a script is named in a command.
#[derive(Clone, Copy, Debug)]
pub(crate) enum By {
    Hash,
    Text,
}

impl Script {
    fn new(text: impl Into<Cow<'static, str>>) -> Self {
        let text = text.into();
        Self { sha: redis::Script::new(&text).get_hash().to_owned(), text }
    }

    /// The beginning of a call with `keys` keys and about `args` arguments, to which both are added.
    pub(crate) fn call(&self, by: By, keys: usize, args: usize) -> Cmd {
        const USUAL_SIZE: usize = 48;
        let (command, script) = match by {
            By::Hash => ("EVALSHA", self.sha.as_str()),
            By::Text => ("EVAL", &*self.text),
        };
        let mut call = Cmd::with_capacity(3 + keys + args, (4 + keys + args) * USUAL_SIZE);
        call.arg(command).arg(script).arg(keys);
        call
    }
}

/// Why the server runs no scripts for this user, if it does not. Asks with a lock that no process takes and its line, and
/// has `names` tagged if the server refuses those two together. Without any key a proxy would not know which
/// server to ask; `slot` is one that this server has.
pub(crate) async fn refusal(
    node: &Node,
    names: &Names,
    slot: u16,
) -> Result<Option<BackendError>, BackendError> {
    let call = || {
        let probe = names.probe(slot);
        let mut call = RELEASE.call(By::Text, 2, 1);
        call.arg(probe.as_str()).arg(names.line(&probe)).arg("");
        call
    };
    let mut answer = node.try_send(&call()).await?;
    if answer.as_ref().is_err_and(server_error::crosses_slots) && !names.are_tagged() {
        names.tag_all();
        answer = node.try_send(&call()).await?;
    }
    let Err(error) = answer else { return Ok(None) };
    // The script was looked at, and it is only the key that is not for us, or not here.
    if server_error::is_beyond_this_user(&error) || server_error::is_about_slots(&error) {
        return Ok(None);
    }
    if server_error::is_unknown_command(&error) {
        return Ok(Some(node.failure(error)));
    }
    if server_error::is_hang_up(&error) {
        // An accident, or a proxy's way to say no. On a connection of its own, as that ends with it.
        let again = node.another().await?.send(&call()).await;
        if again.is_err_and(|again| server_error::is_hang_up(&again)) {
            return Ok(Some(node.failure(error)));
        }
    }
    Err(node.failure(error))
}
