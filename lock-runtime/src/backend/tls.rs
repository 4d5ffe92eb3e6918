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
    let builder = match files.trust {
        Trust::Verified => {
            let trusted = trusted(files.ca.as_deref())?;
            let provider = builder.crypto_provider().clone();
            let verifier = WebPkiServerVerifier::builder_with_provider(roots(&trusted)?, provider)
                .build()
                .map_err(|error| wrong(format!("the server cannot be verified: {error}")))?;
            let verifier = Verified { verifier, trusted };
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        }
        Trust::Any => {
            let algorithms = builder.crypto_provider().signature_verification_algorithms;
            builder.dangerous().with_custom_certificate_verifier(Arc::new(Unverified(algorithms)))
        }
    };
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

/// Verifies the server by the `trusted` certificates.
///
/// A certificate of a server must not be marked as an authority (RFC 5280, 4.2.1.9), and `openssl req -x509` marks it so. It is
/// accepted for its names if it is itself trusted, as by other clients.
#[derive(Debug)]
struct Verified {
    verifier: Arc<WebPkiServerVerifier>,
    trusted: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for Verified {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified =
            self.verifier.verify_server_cert(certificate, intermediates, server, ocsp, now);
        match verified {
            Err(error) if is_of_authority(&error) && self.trusted.contains(certificate) => {
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
        self.verifier.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}

/// Whether a certificate was refused only because it is marked as an authority. Its period of validity was checked before that.
fn is_of_authority(error: &rustls::Error) -> bool {
    // The type of the cause is of a crate that rustls does not export.
    matches!(error, rustls::Error::InvalidCertificate(CertificateError::Other(cause))
        if format!("{cause:?}").contains("CaUsedAsEndEntity"))
}

/// Accepts every certificate: `?insecure`. The server must still prove that it has the key of its certificate.
#[derive(Debug)]
struct Unverified(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
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
