//! TLS in front of a server that was built without it, as clouds and sidecars put it there.

use std::net::Ipv4Addr;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tempfile::TempDir;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;

use crate::folder::new_folder;
use crate::server::{RedisServer, listener};
use crate::tls::{Tls, TlsFiles};

/// Takes TLS connections of clients with a certificate of the authority. It ends with this value.
#[derive(Debug)]
pub struct TlsTunnel {
    files: TlsFiles,
    port: u16,
    _dir: TempDir,
    _stop: oneshot::Sender<()>,
}

impl TlsTunnel {
    /// To `server`'s port without TLS.
    ///
    /// # Panics
    ///
    /// When no port, thread or certificate is to be had.
    pub fn start(server: &RedisServer, tls: &Tls) -> Self {
        let dir = new_folder();
        let files = tls.write(dir.path());
        let acceptor = TlsAcceptor::from(Arc::new(config(&files)));
        let listener = listener();
        listener.set_nonblocking(true).expect("a socket can be non-blocking");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let (stop, stopped) = oneshot::channel();
        let upstream = server.port();
        std::thread::Builder::new()
            .name("tls-tunnel".into())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.expect("a runtime can be made").block_on(async {
                    tokio::select! {
                        () = serve(listener, upstream, &acceptor) => {}
                        _ = stopped => {}
                    }
                });
            })
            .expect("a thread can be started");
        Self { files, port, _dir: dir, _stop: stop }
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What a client needs.
    pub fn files(&self) -> &TlsFiles {
        &self.files
    }
}

async fn serve(listener: std::net::TcpListener, upstream: u16, acceptor: &TlsAcceptor) {
    let listener = TcpListener::from_std(listener).expect("a listener can be registered");
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        let acceptor = acceptor.clone();
        tokio::spawn(async move {
            let _ = client.set_nodelay(true);
            let Ok(mut client) = acceptor.accept(client).await else { return };
            let server = TcpStream::connect((Ipv4Addr::LOCALHOST, upstream)).await;
            let Ok(mut server) = server else { return };
            let _ = server.set_nodelay(true);
            let _ = copy_bidirectional(&mut client, &mut server).await;
        });
    }
}

fn config(files: &TlsFiles) -> ServerConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = |path| -> Vec<CertificateDer<'static>> {
        CertificateDer::pem_file_iter(path)
            .and_then(Iterator::collect)
            .expect("certificates can be read")
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(chain(&files.authority));
    let clients = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone());
    let key = PrivateKeyDer::from_pem_file(&files.key).expect("the key can be read");
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has the usual versions")
        .with_client_cert_verifier(clients.build().expect("the authority is a root"))
        .with_single_cert(chain(&files.certificate), key)
        .expect("the key is the certificate's")
}
