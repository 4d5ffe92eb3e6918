//! Commands, written in the form in which their connection sends them.

use std::io::{self, Write};

use redis::{Cmd, RedisWrite, ToRedisArgs};

/// Receives the arguments of one command.
pub(crate) struct CommandWriter<'a>(CommandForm<'a>);

enum CommandForm<'a> {
    /// For a connection of the client library.
    Library(&'a mut Cmd),
    Packed(PackedArgs<'a>),
}

/// Writes one command.
pub(crate) type WriteCommand<'a> = dyn Fn(&mut CommandWriter<'_>) + Send + Sync + 'a;

/// Writes one of several commands, by its place.
pub(crate) type WriteNthCommand<'a> = dyn Fn(usize, &mut CommandWriter<'_>) + Send + Sync + 'a;

impl CommandWriter<'_> {
    pub(crate) fn arg(&mut self, arg: impl ToRedisArgs) -> &mut Self {
        match &mut self.0 {
            CommandForm::Library(command) => arg.write_redis_args(*command),
            CommandForm::Packed(args) => arg.write_redis_args(args),
        }
        self
    }
}

/// The command that `write` writes, for a connection of the client library.
pub(crate) fn library_command(write: impl FnOnce(&mut CommandWriter<'_>)) -> Cmd {
    /// Of a command with one lock.
    const USUAL_ARGS: usize = 10;
    let mut command = Cmd::with_capacity(USUAL_ARGS, PackedCommands::USUAL_SIZE);
    write(&mut CommandWriter(CommandForm::Library(&mut command)));
    command
}

/// Commands in the bytes that are sent: RESP, each an array of bulk strings.
///
/// Nothing is allocated for a command or an argument.
#[derive(Default)]
pub(crate) struct PackedCommands {
    bytes: Vec<u8>,
    count: usize,
}

impl PackedCommands {
    /// In bytes, of a command with one lock.
    const USUAL_SIZE: usize = 256;

    /// For about `count` commands, in the memory of `buffer`.
    pub(crate) fn within(mut buffer: Vec<u8>, count: usize) -> Self {
        buffer.clear();
        buffer.reserve(count * Self::USUAL_SIZE);
        Self { bytes: buffer, count: 0 }
    }

    /// A command or a pipeline of the client library.
    pub(crate) fn of_library(bytes: Vec<u8>, count: usize) -> Self {
        Self { bytes, count }
    }

    /// Adds the command that `write` writes.
    pub(crate) fn add(&mut self, write: impl FnOnce(&mut CommandWriter<'_>)) {
        let start = self.bytes.len();
        let args = PackedArgs { bytes: &mut self.bytes, count: 0 };
        let mut writer = CommandWriter(CommandForm::Packed(args));
        write(&mut writer);
        let CommandForm::Packed(PackedArgs { count, .. }) = writer.0 else { return };
        Header::new(b'*', count).insert(&mut self.bytes, start);
        self.count += 1;
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// The arguments of one command, without the header of the array.
struct PackedArgs<'a> {
    bytes: &'a mut Vec<u8>,
    count: usize,
}

impl RedisWrite for PackedArgs<'_> {
    fn write_arg(&mut self, arg: &[u8]) {
        self.count += 1;
        // Most arguments are short.
        match arg.len() {
            length @ ..10 => self.bytes.extend_from_slice(&[b'$', digit(length), b'\r', b'\n']),
            length @ ..100 => self.bytes.extend_from_slice(&[
                b'$',
                digit(length / 10),
                digit(length % 10),
                b'\r',
                b'\n',
            ]),
            length => self.bytes.extend_from_slice(Header::new(b'$', length).as_bytes()),
        }
        self.bytes.extend_from_slice(arg);
        self.bytes.extend_from_slice(b"\r\n");
    }

    fn writer_for_next_arg(&mut self) -> impl Write + '_ {
        self.count += 1;
        let start = self.bytes.len();
        UnfinishedArg { bytes: self.bytes, start }
    }
}

/// An argument that is written in parts. Drop writes its header.
struct UnfinishedArg<'a> {
    bytes: &'a mut Vec<u8>,
    start: usize,
}

impl Write for UnfinishedArg<'_> {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for UnfinishedArg<'_> {
    fn drop(&mut self) {
        let length = self.bytes.len() - self.start;
        Header::new(b'$', length).insert(self.bytes, self.start);
        self.bytes.extend_from_slice(b"\r\n");
    }
}

/// A type and a number.
struct Header {
    /// The text is at the end.
    text: [u8; Self::LONGEST],
    start: usize,
}

impl Header {
    /// The type, 20 digits, and the line break.
    const LONGEST: usize = 23;

    fn new(kind: u8, number: usize) -> Self {
        let mut text = [b'\n'; Self::LONGEST];
        let mut start = Self::LONGEST - 2;
        text[start] = b'\r';
        let mut left = number;
        loop {
            start -= 1;
            text[start] = digit(left % 10);
            left /= 10;
            if left == 0 {
                break;
            }
        }
        start -= 1;
        text[start] = kind;
        Self { text, start }
    }

    fn as_bytes(&self) -> &[u8] {
        &self.text[self.start..]
    }

    fn insert(&self, bytes: &mut Vec<u8>, at: usize) {
        let (header, end) = (self.as_bytes(), bytes.len());
        bytes.extend_from_slice(header);
        bytes.copy_within(at..end, at + header.len());
        bytes[at..at + header.len()].copy_from_slice(header);
    }
}

fn digit(number: usize) -> u8 {
    b"0123456789"[number]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes two arguments in one call, and one in parts.
    struct Parts<'a>(&'a str, &'a str);

    impl ToRedisArgs for Parts<'_> {
        fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
            out.write_arg(self.0.as_bytes());
            let mut argument = out.writer_for_next_arg();
            for part in [self.0, self.1] {
                argument.write_all(part.as_bytes()).unwrap();
            }
        }
    }

    fn write(out: &mut CommandWriter<'_>, text: &str) {
        out.arg("SET").arg(text).arg(Parts(text, "b")).arg(None::<String>).arg(Some("c"));
        out.arg(u64::MAX).arg(0).arg("");
    }

    #[test]
    fn a_packed_command_has_the_bytes_of_the_client_library() {
        for length in [0, 1, 9, 10, 99, 100, 255, 1_000, 10_000] {
            let text = "x".repeat(length);
            let mut packed = PackedCommands::default();
            packed.add(|out| write(out, &text));
            let expected = library_command(|out| write(out, &text)).get_packed_command();
            assert_eq!(packed.into_bytes(), expected);
        }
    }

    #[test]
    fn packed_commands_follow_each_other() {
        let mut packed = PackedCommands::within(b"rest".to_vec(), 3);
        for count in [0, 1, 12] {
            packed.add(|out| {
                for at in 0..count {
                    out.arg(at);
                }
            });
        }
        let twelve = (0..12).map(|at: usize| format!("${}\r\n{at}\r\n", at.to_string().len()));
        let expected = format!("*0\r\n*1\r\n$1\r\n0\r\n*12\r\n{}", twelve.collect::<String>());
        assert_eq!(packed.len(), 3);
        assert_eq!(String::from_utf8_lossy(&packed.into_bytes()), expected);
    }

    #[test]
    fn a_header_has_every_digit() {
        for number in [0, 7, 10, 99, 1_000_000, usize::MAX] {
            assert_eq!(Header::new(b'$', number).as_bytes(), format!("${number}\r\n").as_bytes());
        }
    }
}
