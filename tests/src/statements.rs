//! A TCP proxy in front of a MySQL server that changes statements on their way.

use std::io;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::server::listener;

/// A text of statements, and what the server gets in its place.
type Change = (String, String);

/// A proxy that changes texts of statements, so that a test can stop a script between two of its statements.
///
/// It runs on a thread and a runtime of its own. Connections with TLS pass as they are.
#[derive(Debug)]
pub struct StatementProxy {
    port: u16,
    changes: Arc<Mutex<Vec<Change>>>,
    /// Dropped, it ends the thread.
    _stop: oneshot::Sender<()>,
}

impl StatementProxy {
    /// A proxy without changes to a port of this machine.
    ///
    /// # Panics
    ///
    /// When no port or thread is to be had.
    pub fn to_port(upstream: u16) -> Self {
        let listener = listener();
        listener.set_nonblocking(true).expect("a socket can be non-blocking");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let changes = Arc::new(Mutex::default());
        let (stop, stopped) = oneshot::channel();
        let shared = Arc::clone(&changes);
        std::thread::Builder::new()
            .name("statement-proxy".into())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.expect("a runtime can be made").block_on(async {
                    tokio::select! {
                        () = serve(listener, upstream, &shared) => {}
                        _ = stopped => {}
                    }
                });
            })
            .expect("a thread can be started");
        Self { port, changes, _stop: stop }
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// From now on the server gets `by` wherever a statement has `text`.
    ///
    /// # Panics
    ///
    /// When its thread has panicked.
    pub fn replace(&self, text: &str, by: &str) {
        self.changes.lock().unwrap().push((text.to_owned(), by.to_owned()));
    }

    /// From now on a script waits in front of a statement that starts with `start`, while another session holds the named
    /// lock `gate`.
    pub fn stop_before(&self, start: &str, gate: &str) {
        let stop = format!("DO GET_LOCK('{gate}', 60), RELEASE_LOCK('{gate}')");
        self.replace(&format!(";\n{start}"), &format!(";\n{stop};\n{start}"));
    }
}

async fn serve(listener: std::net::TcpListener, upstream: u16, changes: &Arc<Mutex<Vec<Change>>>) {
    let listener = TcpListener::from_std(listener).expect("a listener can be registered");
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        let changes = Arc::clone(changes);
        tokio::spawn(async move {
            // The end of one direction ends the other.
            let _ = carry(client, upstream, &changes).await;
        });
    }
}

async fn carry(
    mut client: TcpStream,
    upstream: u16,
    changes: &Mutex<Vec<Change>>,
) -> io::Result<()> {
    let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, upstream)).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let statements = async {
        loop {
            let packet = changed(read_packet(&mut from_client).await?, changes);
            to_server.write_all(&packet).await?;
        }
    };
    let answers = async { tokio::io::copy(&mut from_server, &mut to_client).await.map(drop) };
    tokio::select! {
        ended = statements => ended,
        ended = answers => ended,
    }
}

/// A packet with its header: three bytes with the length, one with a number.
async fn read_packet(from: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Vec<u8>> {
    let mut packet = vec![0; HEADER];
    from.read_exact(&mut packet).await?;
    let length =
        usize::from(packet[0]) | usize::from(packet[1]) << 8 | usize::from(packet[2]) << 16;
    packet.resize(HEADER + length, 0);
    from.read_exact(&mut packet[HEADER..]).await?;
    Ok(packet)
}

const HEADER: usize = 4;

fn changed(packet: Vec<u8>, changes: &Mutex<Vec<Change>>) -> Vec<u8> {
    /// The command of a packet with statements.
    const QUERY: u8 = 3;
    let changes = changes.lock().unwrap();
    let Some((QUERY, Ok(text))) =
        packet.get(HEADER).map(|command| (*command, std::str::from_utf8(&packet[HEADER + 1..])))
    else {
        return packet;
    };
    if !changes.iter().any(|(from, _)| text.contains(from)) {
        return packet;
    }
    let text = changes.iter().fold(text.to_owned(), |text, (from, by)| text.replace(from, by));
    let length = u32::try_from(1 + text.len()).expect("a short script").to_le_bytes();
    [&[length[0], length[1], length[2], packet[3], QUERY], text.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_statement_has_the_right_length() {
        let changes = Mutex::new(vec![("b".to_owned(), "long".to_owned())]);
        let packet = |text: &str| {
            [&[u8::try_from(text.len()).unwrap() + 1, 0, 0, 7, 3], text.as_bytes()].concat()
        };
        assert_eq!(changed(packet("a b c"), &changes), packet("a long c"));
        assert_eq!(changed(packet("a"), &changes), packet("a"));
        assert_eq!(changed(vec![0, 0, 0, 7], &changes), [0, 0, 0, 7]);
    }
}
