//! Users and passwords that change while the program runs.

use std::error::Error;
use std::fmt;

#[cfg(any(feature = "etcd", feature = "zookeeper"))]
use crate::backend::{BackendError, FailureKind};
#[cfg(feature = "_remote")]
use crate::base::error::{ErrorKind, LockError};

/// User and password of a connection. The `Debug` output does not contain the password.
///
/// ```
/// use lock_runtime::Credentials;
/// let credentials = Credentials::new("locks", "s3cret");
/// assert!(!format!("{credentials:?}").contains("s3cret"));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    user: Option<String>,
    password: String,
}

impl Credentials {
    /// A user and its password, or a token in place of the password.
    #[must_use]
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self { user: Some(user.into()), password: password.into() }
    }

    /// A password for the user of the URL, or for the default user if the URL names none. Not for etcd and ZooKeeper, where
    /// the provider names the user.
    #[must_use]
    pub fn password(password: impl Into<String>) -> Self {
        Self { user: None, password: password.into() }
    }
}

#[cfg(any(feature = "_sql", feature = "etcd", feature = "zookeeper"))]
impl Credentials {
    #[cfg(feature = "_sql")]
    pub(crate) fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// The user, for a store without a default user.
    #[cfg(any(feature = "etcd", feature = "zookeeper"))]
    pub(crate) fn named_user(&self) -> Result<&str, BackendError> {
        self.user.as_deref().ok_or_else(|| {
            let message = "the provider of credentials has named no user";
            BackendError::new(FailureKind::Rejected, message)
                .remedy("return `Credentials::new(user, password)`")
        })
    }

    pub(crate) fn secret(&self) -> &str {
        &self.password
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

/// `provider`, for a URL without a password.
#[cfg(feature = "_remote")]
pub(crate) fn beside_password(
    provider: Option<&Provider>,
    has_password: bool,
) -> Result<Option<Provider>, LockError> {
    if provider.is_some() && has_password {
        let cause = "the URL has a password, and the pool a provider of credentials";
        return Err(LockError::new(ErrorKind::Config, cause)
            .remedy("leave the password out of the URL; the provider's password is used"));
    }
    Ok(provider.cloned())
}

/// The error of a credential provider.
pub(crate) type ProviderError = Box<dyn Error + Send + Sync>;

#[cfg(not(feature = "_remote"))]
pub(crate) use without_login::Provider;

#[cfg(feature = "_remote")]
pub(crate) use self::provider::Provider;

#[cfg(not(feature = "_remote"))]
mod without_login {
    use std::future::Future;

    use super::{Credentials, ProviderError};

    /// Not used: no store of this build logs in.
    #[derive(Clone, Debug)]
    pub(crate) struct Provider;

    impl Provider {
        pub(crate) fn new<F, A, E>(_: F) -> Self
        where
            F: Fn() -> A,
            A: Future<Output = Result<Credentials, E>>,
            E: Into<ProviderError>,
        {
            Self
        }
    }
}

#[cfg(feature = "_remote")]
mod provider {
    use std::fmt;
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::Arc;

    #[cfg(feature = "redis")]
    use redis::RedisConnectionInfo;
    use tokio::runtime::Handle;
    use tokio::sync::watch;

    use super::{Credentials, ProviderError};
    use crate::backend::{BackendError, FailureKind};
    use crate::base::mutex::Mutex;

    type ProviderResult = Result<Credentials, BackendError>;
    type ProviderFuture = Pin<Box<dyn Future<Output = Result<Credentials, ProviderError>> + Send>>;

    /// Provides the credentials of each new connection. Clones share one provider.
    ///
    /// At most one call runs at a time, and connections that are opened meanwhile share its result. If a connection
    /// attempt times out, the next one takes the result, so even a slow provider succeeds in the end.
    #[derive(Clone)]
    pub(crate) struct Provider(Arc<ProviderState>);

    struct ProviderState {
        ask: Box<dyn Fn() -> ProviderFuture + Send + Sync>,
        /// The running call, or a finished one with a result that was not taken.
        call: Mutex<Option<watch::Receiver<Option<ProviderResult>>>>,
    }

    impl Provider {
        pub(crate) fn new<F, A, E>(ask: F) -> Self
        where
            F: Fn() -> A + Send + Sync + 'static,
            A: Future<Output = Result<Credentials, E>> + Send + 'static,
            E: Into<ProviderError>,
        {
            let ask = move || -> ProviderFuture {
                let asking = ask();
                Box::pin(async move { asking.await.map_err(Into::into) })
            };
            Self(Arc::new(ProviderState { ask: Box::new(ask), call: Mutex::default() }))
        }

        /// `login` with the credentials of the provider.
        #[cfg(feature = "redis")]
        pub(crate) async fn log_in(
            &self,
            login: &RedisConnectionInfo,
        ) -> Result<RedisConnectionInfo, BackendError> {
            let Credentials { user, password } = self.credentials().await?;
            let login = login.clone().set_password(password);
            Ok(match user {
                Some(user) => login.set_username(user),
                None => login,
            })
        }

        /// The credentials for one connection.
        pub(crate) async fn credentials(&self) -> Result<Credentials, BackendError> {
            let mut answer = self.call()?;
            let given = answer.wait_for(Option::is_some).await.ok().and_then(|given| given.clone());
            let mut call = self.0.call.lock();
            // The next connection starts a new call.
            if call.as_ref().is_some_and(|call| call.same_channel(&answer)) {
                *call = None;
            }
            given.unwrap_or_else(|| Err(failed("it panicked")))
        }

        fn call(&self) -> Result<watch::Receiver<Option<ProviderResult>>, BackendError> {
            let mut call = self.0.call.lock();
            if let Some(answer) = &*call {
                return Ok(answer.clone());
            }
            let (sender, result) = watch::channel(None);
            let (shared, runtime) = (self.0.clone(), Handle::current());
            // On a separate thread: a provider that blocks would delay all renewals, and a panic would end them.
            let asking = move || {
                let given = runtime.block_on((shared.ask)());
                sender.send_replace(Some(given.map_err(|error| failed(&error.to_string()))));
            };
            let thread = std::thread::Builder::new().name("lock-credentials".to_owned());
            thread.spawn(asking).map_err(|error| failed(&error.to_string()))?;
            *call = Some(result.clone());
            Ok(result)
        }
    }

    impl fmt::Debug for Provider {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Provider(..)")
        }
    }

    #[cold]
    fn failed(why: &str) -> BackendError {
        let message = format!("the provider of credentials failed: {why}");
        BackendError::new(FailureKind::NotApplied, message).remedy(
            "check the provider given to `.credentials(..)` of the pool's builder; it is called again for each new connection",
        )
    }

    #[cfg(test)]
    mod tests {
        use std::sync::atomic::{AtomicUsize, Ordering};

        use tokio::sync::Notify;
        use tokio::time::{Duration, timeout};

        use super::*;

        #[tokio::test]
        async fn concurrent_connections_share_a_call() {
            let (calls, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
            let provider = Provider::new({
                let (calls, go) = (calls.clone(), go.clone());
                move || {
                    let (call, go) = (calls.fetch_add(1, Ordering::SeqCst), go.clone());
                    async move {
                        go.notified().await;
                        Ok::<_, ProviderError>(Credentials::password(call.to_string()))
                    }
                }
            });
            // This attempt times out; the next one takes the result.
            assert!(timeout(Duration::from_millis(10), provider.credentials()).await.is_err());
            // Both wait before there is a result: the first one to take it ends the sharing.
            let (one, other, ()) = tokio::join!(
                biased;
                provider.credentials(),
                provider.credentials(),
                async { go.notify_one() },
            );
            assert_eq!(one.unwrap(), Credentials::password("0"));
            assert_eq!(other.unwrap(), Credentials::password("0"));
            go.notify_one();
            assert_eq!(provider.credentials().await.unwrap(), Credentials::password("1"));
            assert_eq!(calls.load(Ordering::SeqCst), 2);
        }

        #[tokio::test]
        async fn a_failure_or_a_panic_is_returned_and_the_next_call_is_a_new_one() {
            let calls = AtomicUsize::new(0);
            let provider = Provider::new(move || {
                let call = calls.fetch_add(1, Ordering::SeqCst);
                async move {
                    match call {
                        0 => Err("no token"),
                        1 => panic!("oops"),
                        _ => Ok(Credentials::new("worker", "pw")),
                    }
                }
            });
            let error = provider.credentials().await.unwrap_err();
            assert!(error.to_string().contains("no token"), "{error}");
            assert_eq!(error.kind(), FailureKind::NotApplied);
            let error = provider.credentials().await.unwrap_err();
            assert!(error.to_string().contains("panicked"), "{error}");
            let given = provider.credentials().await.unwrap();
            assert_eq!(given, Credentials::new("worker", "pw"));
        }

        #[cfg(feature = "redis")]
        #[tokio::test]
        async fn what_is_provided_replaces_the_login_of_a_url_and_not_its_database() {
            let ask = || async { Ok::<_, ProviderError>(Credentials::new("worker", "pw")) };
            let url_has = RedisConnectionInfo::default().set_username("url").set_db(3);
            let login = Provider::new(ask).log_in(&url_has).await.unwrap();
            assert_eq!(
                (login.username(), login.password(), login.db()),
                (Some("worker"), Some("pw"), 3)
            );
        }
    }
}
