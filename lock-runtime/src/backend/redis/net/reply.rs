//! Reads the replies of RESP2.

use redis::{ErrorKind, RedisError, Value};

/// Arrays of arrays. No reply to a command of this crate is deeper.
const DEEPEST: u8 = 8;

/// The longest text that a server stores or sends (`proto-max-bulk-len`).
const LONGEST: i64 = 512 * 1024 * 1024;

/// The first reply in `bytes` and its length; `None` if it is incomplete.
///
/// # Errors
/// `bytes` is not a reply, so the connection can no longer be used.
pub(super) fn read(bytes: &[u8]) -> Result<Option<(Value, usize)>, RedisError> {
    let mut unread = UnreadBytes { bytes, at: 0 };
    Ok(unread.value(DEEPEST)?.map(|value| (value, unread.at)))
}

struct UnreadBytes<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> UnreadBytes<'a> {
    fn value(&mut self, depth: u8) -> Result<Option<Value>, RedisError> {
        let start = self.at;
        let Some(line) = self.line() else { return Ok(None) };
        Ok(Some(match line {
            b"+OK" => Value::Okay,
            b"+QUEUED" => Value::SimpleString("QUEUED".to_owned()),
            [b':', number @ ..] => Value::Int(integer(number)?),
            [b'$', length @ ..] => match count(length)? {
                Some(length) => match self.take(length)? {
                    Some(text) => Value::BulkString(text.to_vec()),
                    None => return Ok(None),
                },
                None => Value::Nil,
            },
            [b'*', length @ ..] => match count(length)? {
                Some(_) if depth == 0 => return Err(malformed()),
                Some(length) => {
                    let mut values = Vec::with_capacity(length.min(1024));
                    for _ in 0..length {
                        let Some(value) = self.value(depth - 1)? else { return Ok(None) };
                        values.push(value);
                    }
                    Value::Array(values)
                }
                None => Value::Nil,
            },
            // Errors, and other statuses.
            _ => redis::parse_redis_value(&self.bytes[start..self.at])?,
        }))
    }

    /// The bytes up to the next line break, without it.
    fn line(&mut self) -> Option<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let end = rest.windows(2).position(|pair| pair == b"\r\n")?;
        self.at += end + 2;
        Some(&rest[..end])
    }

    /// `length` bytes that precede a line break.
    fn take(&mut self, length: usize) -> Result<Option<&'a [u8]>, RedisError> {
        let rest = &self.bytes[self.at..];
        let end = length.checked_add(2).ok_or_else(malformed)?;
        match rest.get(length..end) {
            Some(b"\r\n") => {
                self.at += end;
                Ok(Some(&rest[..length]))
            }
            Some(_) => Err(malformed()),
            None => Ok(None),
        }
    }
}

/// A length, or `None` for that of a null.
fn count(digits: &[u8]) -> Result<Option<usize>, RedisError> {
    match integer(digits)? {
        ..0 => Ok(None),
        length if length > LONGEST => Err(malformed()),
        length => usize::try_from(length).map(Some).map_err(|_| malformed()),
    }
}

fn integer(digits: &[u8]) -> Result<i64, RedisError> {
    let text = std::str::from_utf8(digits).ok();
    text.and_then(|text| text.parse().ok()).ok_or_else(malformed)
}

#[cold]
fn malformed() -> RedisError {
    (ErrorKind::Parse, "the server sent something other than a RESP2 reply").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPLIES: [&str; 15] = [
        "+OK\r\n",
        "+QUEUED\r\n",
        "+PONG\r\n",
        ":0\r\n",
        ":-9223372036854775808\r\n",
        "$-1\r\n",
        "$0\r\n\r\n",
        "$4\r\n\r\n\r\n\r\n",
        "$11\r\nwith\r\nbreak\r\n",
        "*-1\r\n",
        "*0\r\n",
        "*3\r\n:1\r\n$2\r\nab\r\n*2\r\n$-1\r\n+OK\r\n",
        "-ERR unknown command\r\n",
        "-NOSCRIPT No matching script.\r\n",
        "*2\r\n-MOVED 7 127.0.0.1:6379\r\n:7\r\n",
    ];

    #[test]
    fn replies_are_read_as_the_client_library_does() {
        for reply in REPLIES {
            let expected = redis::parse_redis_value(reply.as_bytes()).unwrap();
            let (value, length) = read(reply.as_bytes()).unwrap().unwrap();
            assert_eq!((value, length), (expected, reply.len()), "{reply:?}");
        }
    }

    #[test]
    fn a_reply_is_read_when_all_of_it_has_arrived() {
        for reply in REPLIES {
            for end in 0..reply.len() {
                assert_eq!(read(&reply.as_bytes()[..end]).unwrap(), None, "{reply:?} at {end}");
            }
            let more = [reply, ":7\r\n"].concat();
            assert_eq!(read(more.as_bytes()).unwrap().unwrap().1, reply.len(), "{reply:?}");
        }
    }

    #[test]
    fn what_is_no_reply_is_an_error() {
        for bytes in [
            "hello\r\n",
            ":x\r\n",
            "$x\r\n",
            "$2\r\nabc\r\n",
            "$536870913\r\nab\r\n",
            "*1x\r\n:1\r\n",
            "\r\n",
        ] {
            assert!(read(bytes.as_bytes()).is_err(), "{bytes:?}");
        }
        let deep = "*1\r\n".repeat(100_000);
        assert!(read(deep.as_bytes()).is_err());
    }
}
