//! URLs that name several servers: `scheme://user:password@host1:port,host2/path?parameters`.

use std::time::Duration;

use percent_encoding::percent_decode_str;

use crate::backend::tls_files::{TlsFiles, Trust};
use crate::base::error::{ErrorKind, LockError};
use crate::base::text;

/// What is specific to the URLs of one store.
pub(crate) struct UrlForm {
    /// As error texts name it.
    pub(crate) store: &'static str,
    /// The scheme; with an `s` appended for TLS.
    pub(crate) scheme: &'static str,
    pub(crate) port: u16,
    pub(crate) tls_port: u16,
    /// Whether this build has TLS for the store.
    pub(crate) has_tls: bool,
    /// The rest of the remedy that names the scheme with TLS.
    pub(crate) tls_servers: &'static str,
    /// The names of parameters that other stores do not have, as a list with a comma after each.
    pub(crate) parameters: &'static str,
}

/// The parts of a URL, all decoded.
pub(crate) struct ClusterUrl {
    /// Host and port of each server.
    pub(crate) servers: Vec<(String, u16)>,
    /// Without a trailing slash.
    pub(crate) path: String,
    pub(crate) login: Option<(String, String)>,
    /// With the scheme for TLS.
    pub(crate) tls: Option<TlsFiles>,
    pub(crate) connect_timeout: Option<Duration>,
}

impl UrlForm {
    /// Reads `url`. `own` takes a parameter that other stores do not have, and returns whether the parameter exists.
    ///
    /// # Errors
    ///
    /// Of kind `Config`, without the password.
    pub(crate) fn parse(
        &self,
        url: &str,
        mut own: impl FnMut(&str, &str) -> Result<bool, LockError>,
    ) -> Result<ClusterUrl, LockError> {
        let Self { store, scheme: plain, parameters, tls_servers, .. } = *self;
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let is_encrypted = scheme.strip_suffix('s') == Some(plain);
        if is_encrypted && !self.has_tls {
            return Err(wrong(format!("`{plain}s://` needs TLS, which this build does not have"))
                .remedy(format!("enable the feature `{plain}-tls` of lock-runtime")));
        }
        let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
        if query.contains('@') {
            // The text is not shown: it may be a part of the password.
            return Err(wrong("there is an `@` after the first `?` of the URL")
                .remedy("percent-encode a `?` in a password as `%3F`, and an `@` as `%40`"));
        }
        let (authority, path) = match address.find('/') {
            Some(at) => address.split_at(at),
            None => (address, ""),
        };
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let port = if is_encrypted { self.tls_port } else { self.port };
        let servers = hosts.split(',').map(|host| self.server(host, port));
        let servers = servers.collect::<Result<_, _>>()?;
        let path = self.decoded(path)?.trim_end_matches('/').to_owned();
        let login = login.map(|login| self.user_and_password(login)).transpose()?;
        let (mut files, mut connect_timeout) = (TlsFiles::default(), None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "connect_timeout" => {
                    let given = text::duration(value).filter(|limit| !limit.is_zero());
                    connect_timeout = Some(given.ok_or_else(|| {
                        wrong(format!("`connect_timeout={value}` is not a duration"))
                            .remedy("write for example `?connect_timeout=3s`")
                    })?);
                }
                "ca" => files.ca = Some(self.decoded(value)?),
                "cert" => files.cert = Some(self.decoded(value)?),
                "key" => files.key = Some(self.decoded(value)?),
                "insecure" if value.is_empty() => files.trust = Trust::Any,
                _ if own(name, value)? => {}
                _ => {
                    return Err(wrong(format!("the {store} URL has an unknown parameter, `{name}`"))
                        .remedy(format!(
                            "the known parameters are {parameters}`connect_timeout`, and for `{plain}s` also `ca`, `cert`, `key` and `insecure`"
                        )));
                }
            }
        }
        let encrypt = format!("write `{plain}s://`, {tls_servers}");
        let tls = files.checked(is_encrypted, encrypt, "")?;
        Ok(ClusterUrl { servers, path, login, tls, connect_timeout })
    }

    /// The remedy for a wrong address.
    pub(crate) fn example(&self) -> String {
        let Self { scheme, port, .. } = self;
        format!("write `{scheme}://host1:{port},host2:{port},host3:{port}/locks`")
    }

    fn user_and_password(&self, login: &str) -> Result<(String, String), LockError> {
        let Self { store, scheme, .. } = self;
        let Some((user, password)) = login.split_once(':') else {
            return Err(wrong(format!("the login in the {store} URL has no password"))
                .remedy(format!("write `{scheme}://user:password@host/locks`, or leave the login out when `.credentials(..)` is used")));
        };
        Ok((self.decoded(user)?, self.decoded(password)?))
    }

    fn server(&self, host: &str, default: u16) -> Result<(String, u16), LockError> {
        let Self { store, .. } = self;
        let is_address = |host: &str| host.starts_with('[') && host.ends_with(']');
        let (name, port) = match host.rsplit_once(':') {
            Some((name, port)) if !name.contains(':') || is_address(name) => {
                let port = port.parse().ok().filter(|port| *port != 0);
                let invalid = || wrong(format!("a port in the {store} URL is not a port"));
                (name, port.ok_or_else(|| invalid().remedy(self.example()))?)
            }
            _ => (host, default),
        };
        let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        if name.is_empty() {
            return Err(wrong(format!("the {store} URL names no host")).remedy(self.example()));
        }
        Ok((self.decoded(name)?, port))
    }

    fn decoded(&self, value: &str) -> Result<String, LockError> {
        let invalid = |_| wrong(format!("a value in the {} URL is not UTF-8", self.store));
        percent_decode_str(value).decode_utf8().map(Into::into).map_err(invalid)
    }
}

/// The error of a URL, before its remedy.
#[cold]
pub(crate) fn wrong(cause: impl Into<std::borrow::Cow<'static, str>>) -> LockError {
    LockError::new(ErrorKind::Config, cause)
}
