//! The Lua scripts, each callable by its hash and by its text.

use std::borrow::Cow;
use std::collections::HashSet;

use once_cell::sync::Lazy;
use redis::Value;

use crate::backend::BackendError;
use crate::backend::redis::conn::connection::{Connection, ServerAnswer};
use crate::backend::redis::conn::path::Path;
use crate::backend::redis::conn::prelude::Prelude;
use crate::backend::redis::keyspace::Keyspace;
use crate::backend::redis::net::command::{CommandWriter, library_command};
use crate::backend::redis::server_error;

/// The text of a script, and the hash by which a server knows it after the first call by text.
#[derive(Debug)]
pub(crate) struct Script {
    sha: String,
    text: Cow<'static, str>,
}

const FENCE: &str = include_str!("fence.lua");

/// Takes locks, all or none, with a fence if one is required.
pub(crate) static ACQUIRE: Lazy<Script> =
    Lazy::new(|| Script::new([FENCE, include_str!("acquire.lua")].concat()));
/// Mints fences for held locks.
pub(crate) static MINT: Lazy<Script> =
    Lazy::new(|| Script::new([FENCE, include_str!("mint.lua")].concat()));
/// Extends leases.
pub(crate) static RENEW: Lazy<Script> = Lazy::new(|| Script::new(include_str!("renew.lua")));
/// Frees an uncontended lock.
pub(crate) static RELEASE: Lazy<Script> = Lazy::new(|| Script::new(include_str!("release.lua")));
/// Frees a lock, whatever waits for it.
pub(crate) static FREE: Lazy<Script> = Lazy::new(|| Script::new(include_str!("free.lua")));
/// Reads a lock and its wait queue.
pub(crate) static INSPECT: Lazy<Script> = Lazy::new(|| Script::new(include_str!("inspect.lua")));
/// Writes held locks once more.
pub(crate) static CONFIRM: Lazy<Script> = Lazy::new(|| Script::new(include_str!("confirm.lua")));
/// Claims a lock or a position in its wait queue, and releases both.
pub(crate) static WAIT_QUEUE: Lazy<Script> =
    Lazy::new(|| Script::new([FENCE, include_str!("wait_queue.lua")].concat()));

/// How a command names a script.
#[derive(Clone, Copy, Debug)]
pub(crate) enum By {
    Hash,
    Text,
}

/// Writes one command.
pub(crate) type WriteCall<'a> = dyn Fn(By, &mut CommandWriter<'_>) + Send + Sync + 'a;

/// Writes one of several commands, by its place.
pub(crate) type WriteNthCall<'a> = dyn Fn(usize, By, &mut CommandWriter<'_>) + Send + Sync + 'a;

impl Script {
    pub(crate) fn new(text: impl Into<Cow<'static, str>>) -> Self {
        let text = text.into();
        Self { sha: redis::Script::new(&text).get_hash().to_owned(), text }
    }

    /// Writes the start of a call with `keys` keys. The caller appends the keys, and the arguments after them.
    pub(crate) fn call<'a, 'b>(
        &self,
        out: &'a mut CommandWriter<'b>,
        by: By,
        keys: usize,
    ) -> &'a mut CommandWriter<'b> {
        let (command, script) = match by {
            By::Hash => ("EVALSHA", self.sha.as_str()),
            By::Text => ("EVAL", &*self.text),
        };
        out.arg(command).arg(script).arg(keys)
    }
}

/// Sends the command that `command` writes, after `prelude`. A script is sent by its hash, and once more by its text if the
/// server does not know the hash.
pub(crate) async fn run_one(
    connection: &Connection,
    path: Path,
    prelude: Prelude,
    command: &WriteCall<'_>,
) -> Result<Value, BackendError> {
    let by_hash = |out: &mut CommandWriter<'_>| command(By::Hash, out);
    let mut answer = connection.try_send_after(path, prelude, &by_hash).await?;
    if answer.as_ref().is_err_and(server_error::is_unknown_script) {
        let by_text = |out: &mut CommandWriter<'_>| command(By::Text, out);
        answer = connection.try_send_after(path, prelude, &by_text).await?;
    }
    answer.map_err(|error| connection.failure(error))
}

/// Sends `count` commands in one write, each after `prelude`. `command` writes them. Scripts are sent by their hash.
/// Commands of unknown scripts are sent once more, the first command of each script by its text.
pub(crate) async fn run(
    connection: &Connection,
    path: Path,
    count: usize,
    prelude: Prelude,
    command: &WriteNthCall<'_>,
) -> Vec<Result<Value, BackendError>> {
    let by_hash = |at: usize, out: &mut CommandWriter<'_>| command(at, By::Hash, out);
    let answers = match connection.send_after(path, prelude, count, &by_hash).await {
        Ok(answers) => answers,
        Err(error) => return vec![Err(error); count],
    };
    let is_unknown =
        |answer: &ServerAnswer| answer.as_ref().is_err_and(server_error::is_unknown_script);
    let mut unknown: Vec<_> = (0..answers.len()).filter(|at| is_unknown(&answers[*at])).collect();
    let outcome = |answer: ServerAnswer| answer.map_err(|error| connection.failure(error));
    let mut outcomes: Vec<_> = answers.into_iter().map(outcome).collect();
    // The text makes the script known for the commands after it, and is much longer than a command. A proxy may send these to other
    // servers than the text: each of them is then sent by text.
    for once in [true, false] {
        if unknown.is_empty() {
            break;
        }
        let mut known = HashSet::new();
        let form = |at: &usize| {
            let is_new = known.insert(hash_of(&|out| command(*at, By::Hash, out)));
            (*at, if once && !is_new { By::Hash } else { By::Text })
        };
        let forms: Vec<_> = unknown.iter().map(form).collect();
        let command = |n: usize, out: &mut CommandWriter<'_>| {
            let (at, by) = forms[n];
            command(at, by, out);
        };
        let answers = match connection.send_after(path, prelude, forms.len(), &command).await {
            Ok(answers) => answers,
            Err(error) => {
                unknown.into_iter().for_each(|at| outcomes[at] = Err(error.clone()));
                break;
            }
        };
        let mut still_unknown = Vec::new();
        for (at, answer) in unknown.into_iter().zip(answers) {
            if is_unknown(&answer) {
                still_unknown.push(at);
            }
            outcomes[at] = outcome(answer);
        }
        unknown = still_unknown;
    }
    outcomes
}

/// The hash of the script that `command` calls.
fn hash_of(command: &dyn Fn(&mut CommandWriter<'_>)) -> Option<Vec<u8>> {
    library_command(command).args_iter().nth(1).and_then(|arg| match arg {
        redis::Arg::Simple(hash) => Some(hash.to_vec()),
        _ => None,
    })
}

/// The error with which the server refuses all scripts of this user, if it does.
///
/// The probe is a release of a lock that no process takes, together with its wait queue. If the server refuses these two
/// keys in one script, `keyspace` is tagged from then on. A script without keys would not work: a proxy could not route
/// it. `slot` is a slot of this server.
pub(crate) async fn refusal(
    connection: &Connection,
    keyspace: &Keyspace,
    slot: u16,
) -> Result<Option<BackendError>, BackendError> {
    let call = || {
        let probe = keyspace.probe(slot);
        library_command(|out| {
            let call = RELEASE.call(out, By::Text, 2);
            call.arg(probe.as_str()).arg(keyspace.wait_queue(&probe)).arg("");
        })
    };
    let mut answer = connection.try_send(&call()).await?;
    if answer.as_ref().is_err_and(server_error::crosses_slots) && !keyspace.is_tagged() {
        keyspace.use_tags();
        answer = connection.try_send(&call()).await?;
    }
    let Err(error) = answer else { return Ok(None) };
    // The server accepts the script, and refuses only this key, or the key is elsewhere.
    if server_error::is_forbidden_key(&error) || server_error::is_about_slots(&error) {
        return Ok(None);
    }
    if server_error::is_unknown_command(&error) {
        return Ok(Some(connection.failure(error)));
    }
    if server_error::is_hang_up(&error) {
        // Either an accident, or how a proxy refuses. The second try has a connection of its own, which ends with it.
        let again = connection.open_dedicated().await?.send(&call()).await;
        if again.is_err_and(|again| server_error::is_hang_up(&again)) {
            return Ok(Some(connection.failure(error)));
        }
    }
    Err(connection.failure(error))
}
