//! What the URL of a database says about TLS.

use crate::backend::tls_files::TlsFiles;
use crate::base::error::{ErrorKind, LockError};

/// The files of a connection that is `encrypted`, by the parameter `setting` of the URL. `None` for one that is not. The flag
/// beside the feature says whether this build has it.
pub(crate) fn tls_of_url(
    files: TlsFiles,
    encrypted: bool,
    setting: &str,
    (feature, has_feature): (&str, bool),
) -> Result<Option<TlsFiles>, LockError> {
    let encrypt = format!("add `{setting}` to the URL");
    let tls = files.checked(encrypted, encrypt, &format!("{setting}&"))?;
    if encrypted && !has_feature {
        let cause = format!("`{setting}` needs TLS, which this build does not have");
        let remedy = format!("enable the feature `{feature}` of lock-runtime");
        return Err(LockError::new(ErrorKind::Config, cause).remedy(remedy));
    }
    Ok(tls)
}
