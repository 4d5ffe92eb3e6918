//! Where a connection goes: always to the same address, or to the current master of a sentinel service.

use std::fmt;
use std::sync::Arc;

use crate::backend::redis::discovery::sentinel::Sentinels;
use crate::backend::redis::net::role::RoleCheck;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::url::Endpoint;
use crate::backend::{BackendError, Warning};

#[derive(Clone)]
pub(crate) enum Target {
    Fixed(Box<Dialer>),
    Sentinels(Arc<Sentinels>),
}

impl Target {
    /// The dialer of the next connection. `last` is the server of the previous one.
    pub(crate) async fn resolve(&self, last: Option<&Endpoint>) -> Result<Dialer, BackendError> {
        match self {
            Self::Fixed(dialer) => Ok(Dialer::clone(dialer)),
            Self::Sentinels(sentinels) => sentinels.master(last).await,
        }
    }

    /// Returns when `from` is no longer the server to connect to.
    pub(crate) async fn moved(&self, from: &Endpoint) {
        match self {
            Self::Fixed(_) => std::future::pending().await,
            Self::Sentinels(sentinels) => sentinels.moved(from).await,
        }
    }

    /// The check of a new connection. `replica` is the error by which the last server has shown that it is a replica,
    /// until a master is found.
    pub(crate) fn role_check(&self, replica: Option<BackendError>) -> RoleCheck {
        match (self, replica) {
            (Self::Sentinels(_), _) => RoleCheck::Master,
            (Self::Fixed(_), Some(failure)) => RoleCheck::NotReplica(failure),
            (Self::Fixed(_), None) => RoleCheck::Skip,
        }
    }

    /// How many replicas have to confirm a grant before it counts.
    pub(crate) fn replicas(&self) -> u16 {
        self.endpoint().replicas
    }

    /// A weakness of connections that work.
    pub(crate) fn warning(&self) -> Option<Warning> {
        self.endpoint().warning()
    }

    /// The settings of each connection. Host and port may be those of a sentinel.
    fn endpoint(&self) -> &Endpoint {
        match self {
            Self::Fixed(dialer) => dialer.endpoint(),
            Self::Sentinels(sentinels) => sentinels.endpoint(),
        }
    }

    /// Closes the connections to sentinels.
    pub(crate) fn close(&self) {
        if let Self::Sentinels(sentinels) = self {
            sentinels.close();
        }
    }
}

impl From<Dialer> for Target {
    fn from(dialer: Dialer) -> Self {
        Self::Fixed(Box::new(dialer))
    }
}

impl From<Sentinels> for Target {
    fn from(sentinels: Sentinels) -> Self {
        Self::Sentinels(Arc::new(sentinels))
    }
}

/// The address of the server, or the name of the service.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(dialer) => dialer.endpoint().fmt(f),
            Self::Sentinels(sentinels) => sentinels.fmt(f),
        }
    }
}
