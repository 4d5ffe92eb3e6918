//! Opens a connection to one member: connects, logs in if the cluster wants it, and takes over the leases of the pool.
//!
//! A login costs a member tens of milliseconds of a processor, also if nothing waits for its answer any longer. After a restart of the
//! cluster, all pools log in at the same time. So:
//!
//! 1. The token of a login is kept for the next connection. All members know it, for five minutes after its last use at each of them by
//!    default.
//! 2. A login is sent only after a read to which a majority has answered. Then it has time, as long as the member answers further reads.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{sleep, timeout};

use crate::backend::coordination::first_server::OpenFailure;
use crate::backend::etcd::grpc::{CallFailure, GrpcClient, GrpcDriver};
use crate::backend::etcd::leases::Leases;
use crate::backend::etcd::member::{Member, MemberLogin};
use crate::backend::etcd::protocol::cluster;
use crate::backend::etcd::server_error::{CallStatus, malformed, too_slow, unreachable};
use crate::backend::etcd::transport::MemberDialer;
use crate::backend::etcd::url::EtcdLogin;
use crate::backend::{BackendError, FailureKind, Limits};
use crate::base::clock::Clock;
use crate::base::mutex::Mutex;

/// The shortest time that a new connection has for its first requests.
pub(crate) const SHORTEST_TAKE_OVER: Duration = Duration::from_secs(1);

/// How long a login may take. A thousand logins at the same time take two processors half a minute.
const LONGEST_LOGIN: Duration = Duration::from_secs(60);

/// How long the steps of an attempt may take.
#[derive(Clone, Copy)]
pub(crate) struct AttemptLimits {
    /// All of it. The time of a login counts as far as it exceeds `login`.
    attempt: Duration,
    login: Duration,
}

impl AttemptLimits {
    /// For the first connection of a pool, within the time that the pool has for it.
    pub(crate) const fn first(left: Duration) -> Self {
        Self { attempt: left, login: Duration::ZERO }
    }

    /// For a connection that replaces another one. Locks are lost if it takes long, and also if a login is given up and begins anew.
    pub(crate) const fn next(attempt: Duration) -> Self {
        Self { attempt, login: LONGEST_LOGIN }
    }
}

/// Opens connections.
pub(crate) struct MemberOpener {
    pub(crate) dialer: Arc<MemberDialer>,
    pub(crate) clock: Clock,
    leases: Arc<Leases>,
    token: Mutex<Option<KnownToken>>,
}

/// The token of the last login.
#[derive(Clone)]
struct KnownToken {
    login: EtcdLogin,
    token: String,
}

/// A connection that moves bytes while this value is polled.
pub(crate) type PolledDriver = Pin<Box<dyn Future<Output = String> + Send>>;

/// A connection in service.
pub(crate) struct ServingMember {
    pub(crate) member: Arc<Member>,
    pub(crate) driver: PolledDriver,
    /// How long it took to open it, without a login.
    pub(crate) took: Duration,
}

/// A connection, and the login for it.
struct DialedMember {
    login: Option<EtcdLogin>,
    grpc: GrpcClient,
    driver: PolledDriver,
}

impl MemberOpener {
    pub(crate) fn new(dialer: Arc<MemberDialer>, clock: Clock, leases: Arc<Leases>) -> Self {
        Self { dialer, clock, leases, token: Mutex::default() }
    }

    /// Opens the connection with this number.
    pub(crate) async fn open(
        &self,
        limits: AttemptLimits,
        member: usize,
        number: u64,
    ) -> Result<ServingMember, OpenFailure> {
        let began = self.clock.now();
        let left_of = |limit: Duration| limit.saturating_sub(self.clock.now().since(began));
        let name = self.dialer.members.name(member);
        let slow = |_| OpenFailure::from(too_slow(&name, limits.attempt));
        let connecting = timeout(limits.attempt, self.connect(member, &name));
        let DialedMember { login, mut grpc, mut driver } = connecting.await.map_err(slow)??;
        let opening = async {
            let (mut state, mut logged_in) = (MemberLogin::Missing, Duration::ZERO);
            if let Some(login) = login {
                let trying = self.try_known_token(&name, &mut grpc, &login);
                state = timeout(left_of(limits.attempt), trying).await.map_err(slow)??;
                if state == MemberLogin::Missing {
                    let (asked, reads) = (self.clock.now(), grpc.clone());
                    let limit = left_of(limits.attempt).saturating_add(limits.login);
                    let logging_in = timeout(limit, self.log_in(&name, &mut grpc, login));
                    state = tokio::select! {
                        state = logging_in => state.map_err(slow)??,
                        () = self.until_silent(&reads) => {
                            return Err(unreachable(&name, "it does not answer").into());
                        }
                    };
                    logged_in = self.clock.now().since(asked);
                }
            }
            let member = Member::new(number, name.clone(), grpc, state, self.clock);
            let allowed = limits.attempt.saturating_add(logged_in.min(limits.login));
            let limit = left_of(allowed).min(self.limit_of_take_over());
            let taken_over = timeout(limit, self.leases.take_over(&member)).await;
            let taken_over = taken_over.unwrap_or_else(|_| Err(too_slow(&name, limit)));
            taken_over.map_err(|error| of_member(at_member(&name, error)))?;
            Ok((member, self.clock.now().since(began).saturating_sub(logged_in)))
        };
        let lost = |why: String| OpenFailure::from(unreachable(&name, &why));
        let (member, took) = until_ended(opening, &mut driver, lost).await?;
        Ok(ServingMember { member, driver, took })
    }

    async fn connect(&self, member: usize, name: &str) -> Result<DialedMember, OpenFailure> {
        let login = self.dialer.login().await?;
        let stream = self.dialer.members.connect(member).await;
        let stream = stream.map_err(|error| unreachable(name, &error.to_string()))?;
        let is_encrypted = self.dialer.cluster.tls.is_some();
        let opened = GrpcClient::open(stream, name, is_encrypted).await;
        let (grpc, driver) = opened.map_err(|error| unreachable(name, &why(&error)))?;
        Ok(DialedMember { login, grpc, driver: Box::pin(drive(driver)) })
    }

    /// Reads with the token of an earlier connection, or without one if there is none. `Missing` if a login has to follow. The member
    /// has a majority when it answers, whatever it answers.
    async fn try_known_token(
        &self,
        name: &str,
        grpc: &mut GrpcClient,
        login: &EtcdLogin,
    ) -> Result<MemberLogin, OpenFailure> {
        let known = self.token.lock().clone().filter(|known| known.login == *login);
        // A login with the header of a token that is no longer valid fails.
        let mut known_grpc = grpc.clone();
        let has_token = known.is_some_and(|known| known_grpc.set_token(&known.token));
        match self.read(&known_grpc).await {
            Ok(_) if has_token => {
                *grpc = known_grpc;
                Ok(MemberLogin::Token)
            }
            // Perhaps by the certificate of the client, which need not have the rights of the login.
            Ok(_) => Ok(MemberLogin::Missing),
            Err(CallFailure::Refused(status)) if !has_token && status.is_denied() => {
                Ok(MemberLogin::Missing)
            }
            Err(CallFailure::Refused(status))
                if status.is_without_token() || status.is_without_login() =>
            {
                Ok(MemberLogin::Missing)
            }
            Err(failure) => Err(of_member(before_service(name, failure))),
        }
    }

    async fn log_in(
        &self,
        name: &str,
        grpc: &mut GrpcClient,
        login: EtcdLogin,
    ) -> Result<MemberLogin, OpenFailure> {
        *self.token.lock() = None;
        let message = cluster::log_in(&login.user, &login.password);
        match grpc.call("/etcdserverpb.Auth/Authenticate", &message).await {
            Ok(answer) => {
                let token = cluster::token(&answer).map_err(BackendError::from)?;
                if !grpc.set_token(&token) {
                    return Err(malformed().before_sending().into());
                }
                *self.token.lock() = Some(KnownToken { login, token });
                Ok(MemberLogin::Token)
            }
            // Logins were switched off meanwhile.
            Err(CallFailure::Refused(status)) if CallStatus::is_without_auth(&status) => {
                Ok(MemberLogin::Unwanted)
            }
            Err(failure) => Err(of_member(before_service(name, failure))),
        }
    }

    /// Ends when a read has no answer for a while. Meanwhile a login may take the processors of the member.
    async fn until_silent(&self, grpc: &GrpcClient) {
        const EVERY: Duration = Duration::from_secs(1);
        const LONGEST: Duration = Duration::from_secs(5);
        loop {
            sleep(EVERY).await;
            // A refusal is an answer.
            if timeout(LONGEST, self.read(grpc)).await.is_err() {
                return;
            }
        }
    }

    /// A read that a majority confirms, or a refusal for want of rights after that.
    async fn read(&self, grpc: &GrpcClient) -> Result<Bytes, CallFailure> {
        grpc.call("/etcdserverpb.KV/Txn", &self.leases.own_read().encoded()).await
    }

    /// How long the first requests to a member may take. Without its leader, a member takes requests that get no answer, and
    /// another member may know the next leader.
    fn limit_of_take_over(&self) -> Duration {
        let Limits { connect, request } = self.dialer.limits;
        if self.dialer.members.count() > 1 { request.max(SHORTEST_TAKE_OVER) } else { connect }
    }
}

/// Runs `work` while the connection moves bytes.
pub(crate) async fn until_ended<T, E>(
    work: impl Future<Output = Result<T, E>>,
    driver: &mut PolledDriver,
    lost: impl FnOnce(String) -> E,
) -> Result<T, E> {
    let mut work = pin!(work);
    tokio::select! {
        biased;
        done = &mut work => done,
        why = driver => Err(lost(why)),
    }
}

/// Why a connection has ended.
async fn drive(mut driver: GrpcDriver) -> String {
    let ended = poll_fn(|cx| Pin::new(&mut driver).poll(cx)).await;
    ended.map_or_else(|error| why(&error), |()| "the member has closed it".to_owned())
}

fn why(error: &h2::Error) -> String {
    error.get_io().map_or_else(|| error.to_string(), ToString::to_string)
}

/// The failure of a request to a member that is reachable.
#[cold]
fn of_member(error: BackendError) -> OpenFailure {
    OpenFailure { may_serve_soon: error.kind() != FailureKind::Rejected, error }
}

/// A failure before the member is in service.
#[cold]
fn before_service(name: &str, failure: CallFailure) -> BackendError {
    match failure {
        CallFailure::Refused(status) => status.into_error().before_sending(),
        CallFailure::Unsent(why) | CallFailure::Broken(why) => unreachable(name, &why),
        CallFailure::Malformed => malformed().before_sending(),
    }
}

/// An error of the first requests to a member. An error without an answer names the member.
#[cold]
fn at_member(name: &str, error: BackendError) -> BackendError {
    match error.kind() {
        FailureKind::MaybeApplied => unreachable(name, error.message()),
        _ => error,
    }
}
