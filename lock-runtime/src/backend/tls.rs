//! TLS settings for rustls. Certificate files are read once; server certificates are verified unless the URL says
//! `?insecure`.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
};

use crate::backend::tls_files::{TlsFiles, Trust};
use crate::base::error::{ErrorKind, LockError};

/// The settings of connections with these files.
pub(crate) async fn client_config(files: TlsFiles) -> Result<ClientConfig, LockError> {
    // Reading the system's root certificates takes milliseconds, which would block the driver.
    tokio::task::spawn_blocking(move || config(&files))
        .await
        .map_err(|_| wrong("certificates could not be read"))?
}

fn config(files: &TlsFiles) -> Result<ClientConfig, LockError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(format!("TLS cannot be set up: {error}")))?;
    let provider = builder.crypto_provider().clone();
    let algorithms = provider.signature_verification_algorithms;
    let check = match files.trust {
        Trust::Verified => {
            let trusted = trusted(files.ca.as_deref())?;
            let verifier = WebPkiServerVerifier::builder_with_provider(roots(&trusted)?, provider)
                .build()
                .map_err(|error| wrong(format!("the server cannot be verified: {error}")))?;
            // A server shows no root of the system as its own certificate.
            let trusted = if files.ca.is_some() { trusted } else { Vec::new() };
            CertificateCheck::Verified { verifier, trusted }
        }
        Trust::Any => CertificateCheck::Any,
    };
    let verifier = Arc::new(Verifier { algorithms, check });
    let builder = builder.dangerous().with_custom_certificate_verifier(verifier);
    let (Some(cert), Some(key)) = (&files.cert, &files.key) else {
        return Ok(builder.with_no_client_auth());
    };
    let chain = certificates(cert)?;
    let key = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| wrong(format!("no private key can be read from {key}: {error}")))?;
    builder
        .with_client_auth_cert(chain, key)
        .map_err(|error| wrong(format!("the client certificate {cert} cannot be used: {error}")))
}

/// Verifies servers. Each must prove that it has the key of its certificate.
#[derive(Debug)]
struct Verifier {
    algorithms: WebPkiSupportedAlgorithms,
    check: CertificateCheck,
}

/// Which certificates are accepted.
#[derive(Debug)]
enum CertificateCheck {
    /// Certificates that `verifier` accepts, and the `trusted` ones themselves for their names.
    ///
    /// A certificate of a server must not be marked as an authority (RFC 5280, 4.2.1.9), and `openssl req -x509` marks it so. Other
    /// clients accept it too if it is itself trusted.
    Verified { verifier: Arc<WebPkiServerVerifier>, trusted: Vec<CertificateDer<'static>> },
    /// All: `?insecure`.
    Any,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let CertificateCheck::Verified { verifier, trusted } = &self.check else {
            return Ok(ServerCertVerified::assertion());
        };
        match verifier.verify_server_cert(certificate, intermediates, server, ocsp, now) {
            Err(error) if is_of_authority(&error) && trusted.contains(certificate) => {
                verify_server_name(&ParsedCertificate::try_from(certificate)?, server)?;
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Whether a certificate was refused only because it is marked as an authority. Its period of validity was checked before that.
fn is_of_authority(error: &rustls::Error) -> bool {
    // The type of the cause is of a crate that rustls does not export.
    matches!(error, rustls::Error::InvalidCertificate(CertificateError::Other(cause))
        if format!("{cause:?}").contains("CaUsedAsEndEntity"))
}

fn roots(trusted: &[CertificateDer<'static>]) -> Result<Arc<RootCertStore>, LockError> {
    let mut roots = RootCertStore::empty();
    let (usable, _) = roots.add_parsable_certificates(trusted.iter().cloned());
    if usable == 0 {
        return Err(wrong("no root certificate can be used to verify the server"));
    }
    Ok(Arc::new(roots))
}

/// The usable certificates of the authorities in the file `ca`, or of the system.
#[cfg(feature = "mysql-tls")]
pub(crate) fn root_certificates(
    ca: Option<&str>,
) -> Result<Vec<CertificateDer<'static>>, LockError> {
    let is_usable =
        |root: &CertificateDer<'static>| RootCertStore::empty().add(root.clone()).is_ok();
    Ok(trusted(ca)?.into_iter().filter(is_usable).collect())
}

fn trusted(ca: Option<&str>) -> Result<Vec<CertificateDer<'static>>, LockError> {
    match ca {
        Some(ca) => certificates(ca),
        None => Ok(rustls_native_certs::load_native_certs().certs),
    }
}

fn certificates(path: &str) -> Result<Vec<CertificateDer<'static>>, LockError> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| wrong(format!("no certificate can be read from {path}: {error}")))
}

#[cold]
pub(crate) fn wrong(cause: impl Into<String>) -> LockError {
    LockError::new(ErrorKind::Config, cause.into()).remedy(
        "name PEM files in the URL: `?ca=/path/ca.pem&cert=/path/client.pem&key=/path/client.key`",
    )
}
