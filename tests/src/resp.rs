//! The Redis protocol, versions 2 and 3, as far as the tests need it: parsing and writing commands.

use std::fmt;

/// One reply, push or command.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `$-1`, `*-1` or `_`.
    Nil,
    /// `:`
    Int(i64),
    /// `+`, and the scalars of RESP3 that are lines of text: `,` `#` `(`.
    Text(String),
    /// `-` or `!`
    Error(String),
    /// `$` or `=`
    Bulk(Vec<u8>),
    /// `*`, `~`, and `%` as key, value, key, value.
    Array(Vec<Self>),
    /// `>`: out of band, answers no command.
    Push(Vec<Self>),
}

/// What arrived is not RESP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotResp;

impl Value {
    /// The first value of `bytes` and its length; `None` while it is incomplete.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, NotResp> {
        let mut reader = Reader { bytes, at: 0 };
        Ok(reader.value()?.map(|value| (value, reader.at)))
    }

    /// The elements of an array or push; none for a scalar.
    pub fn items(&self) -> &[Self] {
        match self {
            Self::Array(items) | Self::Push(items) => items,
            _ => &[],
        }
    }

    /// The integer, also when it came as text.
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Self::Int(n) => Some(*n),
            _ => self.to_string().parse().ok(),
        }
    }
}

/// Like `redis-cli` without quotes: `(nil)` for nil, arrays one element a line.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nil => f.write_str("(nil)"),
            Self::Int(n) => write!(f, "{n}"),
            Self::Text(text) | Self::Error(text) => f.write_str(text),
            Self::Bulk(bytes) => f.write_str(&String::from_utf8_lossy(bytes)),
            Self::Array(items) | Self::Push(items) => {
                for (i, item) in items.iter().enumerate() {
                    let separator = if i == 0 { "" } else { "\n" };
                    write!(f, "{separator}{item}")?;
                }
                Ok(())
            }
        }
    }
}

/// A command as it goes over the wire.
pub fn command<A: AsRef<[u8]>>(args: &[A]) -> Vec<u8> {
    let mut wire = format!("*{}\r\n", args.len()).into_bytes();
    for arg in args {
        let arg = arg.as_ref();
        wire.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
        wire.extend_from_slice(arg);
        wire.extend_from_slice(b"\r\n");
    }
    wire
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn value(&mut self) -> Result<Option<Value>, NotResp> {
        let Some(&kind) = self.bytes.get(self.at) else { return Ok(None) };
        if !b"*$+-:_,#(!=%~>|".contains(&kind) {
            return Err(NotResp);
        }
        self.at += 1;
        let Some(line) = self.line() else { return Ok(None) };
        Ok(match kind {
            b'+' | b',' | b'#' | b'(' => Some(Value::Text(line)),
            b'-' => Some(Value::Error(line)),
            b'_' => Some(Value::Nil),
            b':' => Some(Value::Int(number(&line)?)),
            b'$' | b'!' | b'=' => match number(&line)? {
                -1 => Some(Value::Nil),
                len => self.bulk(kind, len)?,
            },
            b'%' => self.items(number(&line)? * 2)?.map(Value::Array),
            b'>' => self.items(number(&line)?)?.map(Value::Push),
            // An attribute stands before the value it describes.
            b'|' => match self.items(number(&line)? * 2)? {
                Some(_) => self.value()?,
                None => None,
            },
            _ => match number(&line)? {
                -1 => Some(Value::Nil),
                len => self.items(len)?.map(Value::Array),
            },
        })
    }

    fn line(&mut self) -> Option<String> {
        let rest = &self.bytes[self.at..];
        let end = rest.windows(2).position(|pair| pair == b"\r\n")?;
        self.at += end + 2;
        Some(String::from_utf8_lossy(&rest[..end]).into_owned())
    }

    fn bulk(&mut self, kind: u8, len: i64) -> Result<Option<Value>, NotResp> {
        let len = usize::try_from(len).map_err(|_| NotResp)?;
        let Some(bytes) = self.bytes.get(self.at..self.at + len + 2) else { return Ok(None) };
        self.at += len + 2;
        let bytes = bytes[..len].to_vec();
        Ok(Some(match kind {
            b'!' => Value::Error(String::from_utf8_lossy(&bytes).into_owned()),
            _ => Value::Bulk(bytes),
        }))
    }

    fn items(&mut self, len: i64) -> Result<Option<Vec<Value>>, NotResp> {
        let len = usize::try_from(len).map_err(|_| NotResp)?;
        let mut items = Vec::new();
        for _ in 0..len {
            let Some(item) = self.value()? else { return Ok(None) };
            items.push(item);
        }
        Ok(Some(items))
    }
}

fn number(line: &str) -> Result<i64, NotResp> {
    line.parse().map_err(|_| NotResp)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_of(wire: &[u8]) -> Value {
        for cut in 0..wire.len() {
            assert_eq!(Value::parse(&wire[..cut]), Ok(None), "{cut} bytes are not the whole value");
        }
        let (value, len) = Value::parse(wire).unwrap().unwrap();
        assert_eq!(len, wire.len());
        value
    }

    fn bulk(text: &str) -> Value {
        Value::Bulk(text.into())
    }

    #[test]
    fn replies_of_both_versions_are_read_whole_or_not_at_all() {
        assert_eq!(all_of(b"+OK\r\n"), Value::Text("OK".into()));
        assert_eq!(all_of(b"-ERR no\r\n"), Value::Error("ERR no".into()));
        assert_eq!(all_of(b":-7\r\n"), Value::Int(-7));
        assert_eq!(all_of(b"$4\r\na\r\nb\r\n"), bulk("a\r\nb"));
        assert_eq!(all_of(b"$-1\r\n"), Value::Nil);
        assert_eq!(all_of(b"_\r\n"), Value::Nil);
        assert_eq!(all_of(b"*-1\r\n"), Value::Nil);
        assert_eq!(all_of(b"!5\r\nERR x\r\n"), Value::Error("ERR x".into()));
        assert_eq!(
            all_of(b"%1\r\n$1\r\nk\r\n*2\r\n:1\r\n*0\r\n"),
            Value::Array(vec![bulk("k"), Value::Array(vec![Value::Int(1), Value::Array(vec![])])])
        );
        assert_eq!(
            all_of(b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n"),
            Value::Push(vec![bulk("invalidate"), Value::Array(vec![bulk("k")])])
        );
        assert_eq!(all_of(b"|1\r\n+ttl\r\n:3\r\n#t\r\n"), Value::Text("t".into()));
    }

    #[test]
    fn a_command_reads_back() {
        assert_eq!(
            all_of(&command(&["SET", "k", "a b"])),
            Value::Array(vec![bulk("SET"), bulk("k"), bulk("a b")])
        );
    }

    #[test]
    fn other_protocols_are_refused() {
        assert_eq!(Value::parse(b"\x16\x03\x01"), Err(NotResp));
        assert_eq!(Value::parse(b"*x\r\n"), Err(NotResp));
        assert_eq!(Value::parse(b"$-5\r\n"), Err(NotResp));
    }
}
