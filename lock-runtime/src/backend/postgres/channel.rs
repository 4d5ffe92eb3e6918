//! The notification channel of a pool, and the payloads that the statements send on it.

use std::time::Duration;

use crate::backend::Owner;
use crate::base::error::LockError;
use crate::base::hex;

/// The name of a channel: `lock_runtime_` as in `hand_off.sql`, the process id of the listener's server process, and random
/// digits. By the process id, a statement learns whether the listener is still connected.
pub(crate) fn name(server_process: i32) -> Result<String, LockError> {
    let random = Owner::random()?;
    let digits = std::str::from_utf8(&random.as_bytes()[..12]).unwrap_or_default();
    Ok(format!("lock_runtime_{server_process}_{digits}"))
}

/// A notification.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ChannelPayload {
    /// The owner was granted the key, or is the next in the queue and may request it after this time.
    HeadOfQueue { key: String, owner: Owner, available_in: Duration },
    /// Another owner has queued for a key of this process.
    Contended { key: String },
    /// A message of the pool to itself.
    Probe,
}

/// The payload that a pool sends to itself.
pub(crate) const PROBE: &str = "probe";

impl ChannelPayload {
    /// Parses an event, milliseconds, an owner and a key in hexadecimal digits. `None` for anything else.
    pub(crate) fn parse(payload: &str) -> Option<Self> {
        if payload == PROBE {
            return Some(Self::Probe);
        }
        let mut parts = payload.split(' ');
        let (event, millis) = (parts.next()?, parts.next()?);
        let owner = Owner::from_text(parts.next()?.as_bytes().try_into().ok()?);
        let key = String::from_utf8(hex::bytes(parts.next()?.as_bytes())?).ok()?;
        match event {
            "head" => {
                let available_in = Duration::from_millis(millis.parse().ok()?);
                Some(Self::HeadOfQueue { key, owner, available_in })
            }
            "wanted" => Some(Self::Contended { key }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_of_the_statements_are_understood_and_no_others() {
        let owner = Owner::random().unwrap();
        let text = String::from_utf8(owner.as_bytes().to_vec()).unwrap();
        let key = "a b→".to_owned();
        let head = format!("head 250 {text} 612062e28692");
        let available_in = Duration::from_millis(250);
        let expected = ChannelPayload::HeadOfQueue { key: key.clone(), owner, available_in };
        assert_eq!(ChannelPayload::parse(&head), Some(expected));
        let wanted = format!("wanted 0 {text} 612062e28692");
        assert_eq!(ChannelPayload::parse(&wanted), Some(ChannelPayload::Contended { key }));
        assert_eq!(ChannelPayload::parse(PROBE), Some(ChannelPayload::Probe));
        for other in
            ["", "head", "head x y z", &head.replace("612062", "61206"), &head.replace("61", "zz")]
        {
            assert_eq!(ChannelPayload::parse(other), None, "{other}");
        }
    }
}
