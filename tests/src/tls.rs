//! A private certificate authority for `rediss://` tests.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};

/// An authority that no client trusts by default.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate with its private key, in PEM.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The certificate.
    pub certificate: String,
    /// The private key.
    pub key: String,
}

impl Authority {
    /// A new authority with a fresh key.
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "lock-tests authority");
        let key = KeyPair::generate().expect("a key can be made");
        let pem = params.self_signed(&key).expect("the authority signs itself").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Its own certificate, what a client must trust.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// An identity for these host names and addresses.
    pub fn issue(&self, names: &[&str]) -> Identity {
        self.sign(&params(names))
    }

    /// An identity that was valid until 2001.
    pub fn issue_expired(&self, names: &[&str]) -> Identity {
        let mut params = params(names);
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(2001, 1, 1);
        self.sign(&params)
    }

    fn sign(&self, params: &CertificateParams) -> Identity {
        let key = KeyPair::generate().expect("a key can be made");
        let certificate = params.signed_by(&key, &self.issuer).expect("the authority signs");
        Identity { certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

/// The identity of a TLS server, and its demands on clients.
#[derive(Clone, Debug)]
pub struct Tls {
    authority: String,
    server: Identity,
    client: Identity,
    client_required: bool,
}

impl Tls {
    /// A valid certificate for 127.0.0.1 and localhost; clients need none.
    pub fn new(authority: &Authority) -> Self {
        Self {
            authority: authority.pem().into(),
            server: authority.issue(&["127.0.0.1", "localhost"]),
            client: authority.issue(&["client"]),
            client_required: false,
        }
    }

    /// A certificate that signs itself and is marked as an authority, as `openssl req -x509` makes it.
    pub fn self_signed(names: &[&str]) -> Self {
        let mut params = params(names);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key can be made");
        let certificate = params.self_signed(&key).expect("it signs itself").pem();
        let server = Identity { certificate, key: key.serialize_pem() };
        Self {
            authority: server.certificate.clone(),
            client: server.clone(),
            server,
            client_required: false,
        }
    }

    /// Shows this identity instead, e.g. an expired one.
    pub fn server(mut self, identity: Identity) -> Self {
        self.server = identity;
        self
    }

    /// Refuses clients without a certificate of the authority.
    pub fn require_client_certificate(mut self) -> Self {
        self.client_required = true;
        self
    }

    pub(crate) fn write(&self, dir: &Path) -> TlsFiles {
        let write = |name: &str, pem: &str| {
            let path = dir.join(name);
            fs::write(&path, pem).expect("the temporary directory takes files");
            path
        };
        TlsFiles {
            authority: write("ca.crt", &self.authority),
            certificate: write("server.crt", &self.server.certificate),
            key: write("server.key", &self.server.key),
            client_certificate: write("client.crt", &self.client.certificate),
            client_key: write("client.key", &self.client.key),
        }
    }

    pub(crate) fn config(&self, files: &TlsFiles) -> Vec<String> {
        let clients = if self.client_required { "yes" } else { "no" };
        vec![
            format!("tls-ca-cert-file {}", files.authority.display()),
            format!("tls-cert-file {}", files.certificate.display()),
            format!("tls-key-file {}", files.key.display()),
            format!("tls-auth-clients {clients}"),
        ]
    }
}

/// Where a server's PEM files are, e.g. for `SSL_CERT_FILE`.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The authority's certificate.
    pub authority: PathBuf,
    /// The server's certificate.
    pub certificate: PathBuf,
    /// The server's private key.
    pub key: PathBuf,
    /// A certificate that the server accepts from a client.
    pub client_certificate: PathBuf,
    /// Its private key.
    pub client_key: PathBuf,
}

fn params(names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
    CertificateParams::new(names).expect("names are host names or addresses")
}
