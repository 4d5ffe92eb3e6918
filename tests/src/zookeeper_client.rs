//! A client of ZooKeeper that a test inspects and changes nodes with.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// A session. Its ephemeral nodes are there for a minute after the last request, or until it is dropped.
#[derive(Debug)]
pub struct ZooKeeperClient {
    stream: TcpStream,
}

/// An error code of the protocol, -101 for a missing node.
pub type Code = i32;

const EPHEMERAL: i32 = 1;
const EPHEMERAL_SEQUENTIAL: i32 = 3;

impl ZooKeeperClient {
    /// Opens a session at a server on this machine.
    pub fn connect(port: u16) -> io::Result<Self> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        let mut request = Vec::new();
        request.extend(0_i32.to_be_bytes());
        request.extend(0_i64.to_be_bytes());
        request.extend(60_000_i32.to_be_bytes());
        request.extend(0_i64.to_be_bytes());
        put(&mut request, &[0; 16]);
        send(&mut stream, &request)?;
        receive(&mut stream)?;
        Ok(Self { stream })
    }

    /// The names of a node's children.
    pub fn children(&mut self, path: &str) -> Result<Vec<String>, Code> {
        let mut request = Vec::new();
        put(&mut request, path.as_bytes());
        request.push(0);
        let answer = self.ask(8, &request)?;
        let mut rest = &answer[..];
        let count = int(&mut rest);
        Ok((0..count).map(|_| String::from_utf8(bytes(&mut rest)).expect("UTF-8")).collect())
    }

    /// The data of a node.
    pub fn data(&mut self, path: &str) -> Result<Vec<u8>, Code> {
        let mut request = Vec::new();
        put(&mut request, path.as_bytes());
        request.push(0);
        let answer = self.ask(4, &request)?;
        Ok(bytes(&mut &answer[..]))
    }

    /// Makes an ephemeral node; its path, with a number if `sequential`.
    pub fn create(&mut self, path: &str, sequential: bool) -> Result<String, Code> {
        self.create_with(path, if sequential { EPHEMERAL_SEQUENTIAL } else { EPHEMERAL })
    }

    /// Makes a node that stays.
    pub fn create_persistent(&mut self, path: &str) -> Result<String, Code> {
        self.create_with(path, 0)
    }

    fn create_with(&mut self, path: &str, flags: i32) -> Result<String, Code> {
        let mut request = Vec::new();
        put(&mut request, path.as_bytes());
        put(&mut request, b"");
        request.extend(1_i32.to_be_bytes());
        request.extend(31_i32.to_be_bytes());
        put(&mut request, b"world");
        put(&mut request, b"anyone");
        request.extend(flags.to_be_bytes());
        let answer = self.ask(1, &request)?;
        Ok(String::from_utf8(bytes(&mut &answer[..])).expect("UTF-8"))
    }

    /// Deletes a node.
    pub fn delete(&mut self, path: &str) -> Result<(), Code> {
        let mut request = Vec::new();
        put(&mut request, path.as_bytes());
        request.extend((-1_i32).to_be_bytes());
        self.ask(2, &request).map(drop)
    }

    /// Sets the rights of all clients on a node, as bits.
    pub fn set_rights(&mut self, path: &str, rights: i32) -> Result<(), Code> {
        let mut request = Vec::new();
        put(&mut request, path.as_bytes());
        request.extend(1_i32.to_be_bytes());
        request.extend(rights.to_be_bytes());
        put(&mut request, b"world");
        put(&mut request, b"anyone");
        request.extend((-1_i32).to_be_bytes());
        self.ask(7, &request).map(drop)
    }

    /// How often a child of the node was created or deleted.
    ///
    /// # Panics
    ///
    /// When there is no such node.
    #[track_caller]
    pub fn changes_of_children(&mut self, path: &str) -> i32 {
        let mut request = Vec::new();
        put(&mut request, path.as_bytes());
        request.push(0);
        let stat = self.ask(3, &request).expect("the node is there");
        // Behind four long numbers and the version of the data.
        int(&mut &stat[36..])
    }

    /// The session that an ephemeral node ends with.
    ///
    /// # Panics
    ///
    /// When there is no such node.
    #[track_caller]
    pub fn session_of(&mut self, path: &str) -> [u8; 8] {
        let mut request = Vec::new();
        put(&mut request, path.as_bytes());
        request.push(0);
        let stat = self.ask(3, &request).expect("the node is there");
        // Behind four long numbers and three versions.
        stat[44..52].try_into().expect("eight bytes")
    }

    /// Whether a transaction that only checks for the node has an answer within `limit`. The client is of no use behind a lost one.
    pub fn answers_a_check(mut self, path: &str, limit: Duration) -> bool {
        let mut request = 1_i32.to_be_bytes().to_vec();
        for number in [14_i32, 13] {
            request.extend(number.to_be_bytes());
        }
        request.push(0);
        request.extend((-1_i32).to_be_bytes());
        put(&mut request, path.as_bytes());
        for number in [-1_i32, -1] {
            request.extend(number.to_be_bytes());
        }
        request.push(1);
        request.extend((-1_i32).to_be_bytes());
        let limited = self.stream.set_read_timeout(Some(limit));
        limited.and_then(|()| send(&mut self.stream, &request)).expect("the server takes it");
        receive(&mut self.stream).is_ok()
    }

    /// Ends the session, and its ephemeral nodes.
    pub fn close(mut self) {
        self.ask(-11, &[]).expect("the server ends the session");
    }

    fn ask(&mut self, number: i32, record: &[u8]) -> Result<Vec<u8>, Code> {
        let mut request = Vec::new();
        request.extend(1_i32.to_be_bytes());
        request.extend(number.to_be_bytes());
        request.extend(record);
        send(&mut self.stream, &request).expect("the server takes the request");
        let answer = receive(&mut self.stream).expect("the server answers");
        let mut rest = &answer[..];
        let _xid = int(&mut rest);
        rest = &rest[8..];
        match int(&mut rest) {
            0 => Ok(rest.to_vec()),
            code => Err(code),
        }
    }
}

impl Drop for ZooKeeperClient {
    fn drop(&mut self) {
        let mut request = 2_i32.to_be_bytes().to_vec();
        request.extend((-11_i32).to_be_bytes());
        let _ = send(&mut self.stream, &request);
    }
}

fn put(record: &mut Vec<u8>, bytes: &[u8]) {
    record.extend(u32::try_from(bytes.len()).expect("a short text").to_be_bytes());
    record.extend(bytes);
}

fn int(rest: &mut &[u8]) -> i32 {
    let (first, others) = rest.split_first_chunk::<4>().expect("a whole answer");
    *rest = others;
    i32::from_be_bytes(*first)
}

fn bytes(rest: &mut &[u8]) -> Vec<u8> {
    let length = usize::try_from(int(rest)).unwrap_or_default();
    let (first, others) = rest.split_at(length);
    *rest = others;
    first.to_vec()
}

fn send(stream: &mut TcpStream, record: &[u8]) -> io::Result<()> {
    let length = u32::try_from(record.len()).expect("a short request");
    let mut frame = length.to_be_bytes().to_vec();
    frame.extend(record);
    stream.write_all(&frame)
}

fn receive(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut record = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut record)?;
    Ok(record)
}
