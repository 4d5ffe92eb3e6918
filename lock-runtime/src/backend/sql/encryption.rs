//! What the URL of a database says about TLS.

use crate::backend::tls_files::{TlsFiles, Trust};
use crate::base::error::{ErrorKind, LockError};

/// The files of a connection that is `encrypted`, by the parameter `setting` of the URL. `None` for one that is not. The flag
/// beside the feature says whether this build has it.
pub(crate) fn tls_of_url(
    files: TlsFiles,
    encrypted: bool,
    setting: &str,
    (feature, has_feature): (&str, bool),
) -> Result<Option<TlsFiles>, LockError> {
    let wrong = |cause: String, remedy: String| {
        Err(LockError::new(ErrorKind::Config, cause).remedy(remedy))
    };
    let names_files = [&files.ca, &files.cert, &files.key].iter().any(|file| file.is_some());
    if !encrypted && (names_files || files.trust == Trust::Any) {
        return wrong(
            "`ca`, `cert`, `key` and `insecure` are for TLS".to_owned(),
            format!("add `{setting}` to the URL"),
        );
    }
    if files.cert.is_some() != files.key.is_some() {
        return wrong(
            "a client certificate needs both `cert` and `key`".to_owned(),
            format!("write `?{setting}&cert=/path.pem&key=/path.key`"),
        );
    }
    if files.trust == Trust::Any && files.ca.is_some() {
        return wrong(
            "`insecure` accepts any certificate, and `ca` only those of an authority".to_owned(),
            "leave `insecure` out".to_owned(),
        );
    }
    if encrypted && !has_feature {
        return wrong(
            format!("`{setting}` needs TLS, which this build does not have"),
            format!("enable the feature `{feature}` of lock-runtime"),
        );
    }
    Ok(encrypted.then_some(files))
}
