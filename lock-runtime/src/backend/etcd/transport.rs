//! What connections to the members of a cluster are opened with.

use crate::backend::BackendError;
use crate::backend::Limits;
use crate::backend::coordination::addresses::ServerAddresses;
use crate::backend::credentials::Provider;
use crate::backend::etcd::url::{EtcdCluster, EtcdLogin};
use crate::base::error::LockError;

/// Opens connections to the members of one cluster.
pub(crate) struct MemberDialer {
    pub(crate) cluster: EtcdCluster,
    pub(crate) members: ServerAddresses,
    pub(crate) limits: Limits,
    credentials: Option<Provider>,
}

impl MemberDialer {
    /// Reads the certificate files.
    pub(crate) async fn new(
        cluster: EtcdCluster,
        credentials: Option<Provider>,
        limits: Limits,
    ) -> Result<Self, LockError> {
        let (members, tls) = (cluster.members.clone(), cluster.tls.clone());
        // The server speaks its API by HTTP/2 only with a client that asks for it.
        let members = ServerAddresses::new(members, tls, Some(b"h2".as_slice())).await?;
        Ok(Self { cluster, members, limits, credentials })
    }

    /// How many keys a lease may have. Since 3.4.44, 3.5.30 and 3.6.11, a put under a lease is checked against the rights on all of its
    /// keys, which takes time, and one refusal concerns all.
    pub(crate) fn most_keys_of_lease(&self) -> usize {
        const CHECKED: usize = 256;
        let EtcdCluster { login, tls, .. } = &self.cluster;
        let is_user = login.is_some()
            || self.credentials.is_some()
            || tls.as_ref().is_some_and(|files| files.cert.is_some());
        if is_user { CHECKED } else { usize::MAX }
    }

    /// The login of the next connection.
    pub(crate) async fn login(&self) -> Result<Option<EtcdLogin>, BackendError> {
        let Some(provider) = &self.credentials else { return Ok(self.cluster.login.clone()) };
        let given = provider.credentials().await?;
        let user = given.named_user()?.to_owned();
        Ok(Some(EtcdLogin { user, password: given.secret().to_owned() }))
    }
}
