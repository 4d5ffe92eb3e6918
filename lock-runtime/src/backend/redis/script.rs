//! The Lua scripts, by hash and by text.

use once_cell::sync::Lazy;
use redis::Cmd;

use crate::key::Key;

/// A script that the server may or may not know yet.
#[derive(Debug)]
pub(super) struct Script {
    sha: String,
    text: &'static str,
}

pub(super) static ACQUIRE: Lazy<Script> = Lazy::new(|| Script::new(include_str!("acquire.lua")));
pub(super) static RENEW: Lazy<Script> = Lazy::new(|| Script::new(include_str!("renew.lua")));
pub(super) static RELEASE: Lazy<Script> = Lazy::new(|| Script::new(include_str!("release.lua")));

/// How a script is named in a command.
#[derive(Clone, Copy, Debug)]
pub(super) enum By {
    Hash,
    Text,
}

impl Script {
    fn new(text: &'static str) -> Self {
        Self { sha: redis::Script::new(text).get_hash().to_owned(), text }
    }

    /// A call with `keys` and, if given, one key more.
    pub(super) fn call(&self, by: By, keys: &[Key], last_key: Option<&str>, args: &[&[u8]]) -> Cmd {
        let (command, script) = match by {
            By::Hash => ("EVALSHA", self.sha.as_str()),
            By::Text => ("EVAL", self.text),
        };
        let mut call = redis::cmd(command);
        call.arg(script).arg(keys.len() + usize::from(last_key.is_some()));
        for key in keys {
            call.arg(key.as_str());
        }
        if let Some(last_key) = last_key {
            call.arg(last_key);
        }
        for arg in args {
            call.arg(*arg);
        }
        call
    }
}
