//! Searches for locks on one server.

use redis::{Cmd, FromRedisValue, Pipeline, Value};

use crate::backend::redis::conn::connection::Connection;
use crate::backend::redis::protocol::scripted_server::ScriptedServer;
use crate::backend::redis::protocol::value::unexpected;
use crate::backend::redis::protocol::wait_queue::owner_in;
use crate::backend::redis::server_error;
use crate::backend::{BackendError, KeyList, KeyPattern};
use crate::base::key::Key;
use crate::base::key_rules::RESERVED;

/// How many keys the server looks at in one command, which takes well below a millisecond.
const LOOKED_AT: usize = 1_000;

/// How many of these commands one search sends: a million keys.
const MOST_COMMANDS: usize = 1_000;

/// The end of what is read of a value: more than its owner token.
const VALUE_END: isize = 255;

/// The locks on the server of `connection` with keys that match, at most `limit`. Other keys and values are left out: `is_lock`
/// is given the start of each value.
pub(crate) async fn locks_on(
    connection: &Connection,
    pattern: &KeyPattern,
    limit: usize,
    is_lock: impl Fn(&[u8]) -> bool,
) -> Result<KeyList, BackendError> {
    let glob = pattern.as_glob();
    let (mut locks, mut cursor) = (Vec::new(), Vec::from(*b"0"));
    let mut is_complete = true;
    for _ in 0..MOST_COMMANDS {
        let (next, found) = scanned(&connection.send(&scan(&cursor, &glob)).await?)?;
        let is_named = |key: &String| !key.contains(RESERVED) && pattern.key_of(key).is_some();
        let found: Vec<_> = found.into_iter().filter(is_named).collect();
        if !found.is_empty() {
            let mut reads = Pipeline::with_capacity(found.len());
            for key in &found {
                reads.cmd("GETRANGE").arg(key).arg(0).arg(VALUE_END);
            }
            let values = connection.send_all(&reads).await?;
            for (key, value) in found.into_iter().zip(values) {
                match value {
                    // Empty if the key is gone by now.
                    Ok(Value::BulkString(value)) => {
                        if is_lock(&value) {
                            locks.push(Key::from(key));
                        }
                    }
                    Ok(other) => return Err(unexpected(&other)),
                    Err(error) if server_error::is_wrong_type(&error) => {}
                    // Its slot is being moved.
                    Err(error) if server_error::is_about_slots(&error) => is_complete = false,
                    Err(error) => return Err(connection.failure(error)),
                }
            }
        }
        if next == b"0" {
            return Ok(KeyList::new(locks, is_complete, limit));
        }
        // A key may be found twice.
        if locks.len() > limit.saturating_mul(2) {
            break;
        }
        cursor = next;
    }
    Ok(KeyList::new(locks, false, limit))
}

fn scan(cursor: &[u8], glob: &str) -> Cmd {
    let mut scan = redis::cmd("SCAN");
    scan.arg(cursor).arg("MATCH").arg(glob).arg("COUNT").arg(LOOKED_AT).arg("TYPE").arg("string");
    scan
}

/// The cursor of the next command, and the keys.
fn scanned(reply: &Value) -> Result<(Vec<u8>, Vec<String>), BackendError> {
    let Value::Array(parts) = reply else { return Err(unexpected(reply)) };
    let [Value::BulkString(cursor), Value::Array(keys)] = parts.as_slice() else {
        return Err(unexpected(reply));
    };
    // A key of another program may not be text.
    let keys = keys.iter().filter_map(|key| String::from_redis_value_ref(key).ok());
    Ok((cursor.clone(), keys.collect()))
}

impl ScriptedServer {
    pub(crate) async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<KeyList, BackendError> {
        locks_on(self.connection(), pattern, limit, |value| owner_in(value).is_some()).await
    }
}
