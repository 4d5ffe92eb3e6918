//! One connection to the database, from its log-in to its end.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio_postgres::config::Host;
use tokio_postgres::error::SqlState;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::types::Type;
use tokio_postgres::{
    AsyncMessage, Client, Config, Connection, Error, NoTls, Row, Socket, Statement,
};

use crate::backend::address_race::log_in_by_name;
use crate::backend::credentials::Provider;
use crate::backend::postgres::schema::{Parameter, STATEMENTS, Sql, Statements};
use crate::backend::postgres::server_error::{
    connect_failure, failure, is_about_tables, refuses_startup_options,
};
use crate::backend::postgres::url::Database;
use crate::backend::sql::first_opened::first_opened;
use crate::backend::sql::locked_rows::LockedRows;
use crate::backend::tls_files::TlsFiles;
use crate::backend::{BackendError, FailureKind, Limits};
use crate::base::clock::Clock;
use crate::base::error::LockError;
use crate::base::mutex::{Mutex, MutexGuard};

/// Receives the payloads of notifications.
pub(crate) type OnPayload = Arc<dyn Fn(&str) + Send + Sync>;

/// Each statement is planned once, by the indexes: a table that was small then may be large later.
const PLANS: &str = "-c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c enable_mergejoin=off \
                     -c jit=off";

/// When the server's system ends a connection to a host that is gone, in seconds: as on this side.
const KEEPALIVES: &str =
    "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3";

/// Opens connections to one database.
pub(crate) struct Connector {
    pub(crate) database: Database,
    pub(crate) statements: Statements,
    pub(crate) credentials: Option<Provider>,
    pub(crate) tls: Encryption,
    pub(crate) limits: Limits,
    /// The position of the server that was connected last.
    pub(crate) last: AtomicUsize,
    /// When that server was started, in microseconds since 1970: a name may lead to another server by now.
    pub(crate) last_start: AtomicI64,
}

/// The server process of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServerProcess {
    pub(crate) id: i32,
    /// Distinguishes processes with the same id: microseconds since 1970. `None` if this user may not read it.
    started: Option<i64>,
}

/// An open connection. Dropping it closes the connection.
pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) process: ServerProcess,
    /// When the server was started, in microseconds since 1970.
    server_start: i64,
    /// Whether the server process belongs only to this connection, so that settings of the session stay in effect. Not behind a
    /// pooler.
    pub(crate) is_direct: bool,
    /// The first statements of a transaction.
    pub(crate) begin: String,
    /// Whether the server has refused statements for the column `info`.
    lacks_info: AtomicBool,
    locked_rows: Mutex<LockedRows>,
    /// By number. Each is prepared when it is first used.
    prepared: Mutex<[Option<Statement>; STATEMENTS]>,
    /// Resolves with the end of the connection.
    pub(crate) ended: oneshot::Receiver<BackendError>,
    /// Dropped with the session. The connection then has a moment to end cleanly.
    _closing: oneshot::Sender<()>,
}

/// How long a connection may take to end.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// What a session learns about itself. Also sets the time limit for idle sessions, where the server has one: longer than the
/// time between two checks, and short enough for sessions that nothing uses any longer.
const INTRODUCTION: &str = "WITH session AS (
        SELECT coalesce(current_setting('lock_runtime.session', true), '') = 'direct' AS is_direct
    )
    SELECT pg_backend_pid(),
        (SELECT (extract(epoch FROM backend_start) * 1000000)::bigint
            FROM pg_stat_get_activity(pg_backend_pid())),
        is_direct,
        CASE WHEN is_direct AND current_setting('server_version_num')::integer >= 140000
            THEN set_config('idle_session_timeout', '20s', false) END,
        (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint
    FROM session";

impl Connector {
    /// Host and port of the server that was connected last, for error texts.
    pub(crate) fn server(&self) -> String {
        let servers = &self.database.servers;
        servers.get(self.last.load(Ordering::Relaxed)).map_or_else(String::new, Self::name)
    }

    fn name(config: &Config) -> String {
        let port = config.get_ports().first().copied().unwrap_or(5432);
        match config.get_hosts().first() {
            Some(Host::Tcp(host)) => format!("{host}:{port}"),
            #[cfg(unix)]
            Some(Host::Unix(path)) => path.display().to_string(),
            None => config.get_hostaddrs().first().map_or(String::new(), ToString::to_string),
        }
    }

    /// Connects to the first server that accepts writes, and checks that the tables are there. Begins with the server that
    /// was connected last; each has the whole time limit.
    pub(crate) async fn open(&self, on_payload: OnPayload) -> Result<Session, BackendError> {
        let configs = &self.database.servers;
        let servers: Vec<_> = configs.iter().map(Self::name).collect();
        let (last, limit) = (self.last.load(Ordering::Relaxed), self.limits.connect);
        let open_at = |at: usize| self.open_at(&configs[at], &servers[at], on_payload.clone());
        let (at, session) = first_opened("PostgreSQL", &servers, last, limit, open_at).await?;
        self.last.store(at, Ordering::Relaxed);
        self.last_start.store(session.server_start, Ordering::Relaxed);
        Ok(session)
    }

    /// Whether the server of `session` is the one that was connected last, in the same start. Both connections of a pool belong on
    /// one server.
    pub(crate) fn is_last_server(&self, session: &Session) -> bool {
        session.server_start == self.last_start.load(Ordering::Relaxed)
    }

    async fn open_at(
        &self,
        config: &Config,
        server: &str,
        on_payload: OnPayload,
    ) -> Result<Session, BackendError> {
        let mut config = config.clone();
        if let Some(provider) = &self.credentials {
            let credentials = provider.credentials().await?;
            if let Some(user) = credentials.user() {
                config.user(user);
            }
            config.password(credentials.secret());
        }
        let refused = |error| connect_failure(server, error);
        let connected = self.log_in(&config, &on_payload).await;
        let (client, ended, closing) = connected.map_err(refused)?;
        let row = client.query_typed_one(INTRODUCTION, &[]).await.map_err(refused)?;
        let process = ServerProcess { id: get(&row, 0)?, started: get(&row, 1)? };
        let is_direct = get(&row, 2)?;
        let session = Session {
            client,
            process,
            server_start: get(&row, 4)?,
            is_direct,
            begin: self.begin(is_direct),
            lacks_info: AtomicBool::default(),
            locked_rows: Mutex::default(),
            prepared: Mutex::default(),
            ended,
            _closing: closing,
        };
        self.prepare_tables(&session).await.map_err(refused)?;
        Ok(session)
    }

    /// Logs in. Where the host name has several addresses, one without an answer does not delay the others.
    async fn log_in(&self, config: &Config, on_payload: &OnPayload) -> Result<Connected, Error> {
        let port = config.get_ports().first().copied().unwrap_or(5432);
        match config.get_hosts().first() {
            Some(Host::Tcp(host)) if config.get_hostaddrs().is_empty() => {
                log_in_by_name((host, port), self.limits.connect / 4, async |address| {
                    let mut config = config.clone();
                    if let Some(address) = address {
                        config.hostaddr(address);
                    }
                    self.log_in_at(config, on_payload).await
                })
                .await
            }
            _ => self.log_in_at(config.clone(), on_payload).await,
        }
    }

    async fn log_in_at(&self, config: Config, on_payload: &OnPayload) -> Result<Connected, Error> {
        match self.tls.connect(self.direct(&config), on_payload.clone()).await {
            // A pooler shares server processes, and takes no settings for one of them.
            Err(error) if refuses_startup_options(&error) => {
                self.tls.connect(config, on_payload.clone()).await
            }
            connected => connected,
        }
    }

    /// `config` with settings that fix the plans, and that bound every statement on the server too. A statement that this
    /// process has given up may still wait for a row there.
    fn direct(&self, config: &Config) -> Config {
        let mut config = config.clone();
        let (limit, lock_limit) = self.statement_limits();
        let settings = format!(
            "{} -c lock_runtime.session=direct -c statement_timeout={limit} -c lock_timeout={lock_limit} \
             -c idle_in_transaction_session_timeout=1000 -c default_transaction_isolation=read\\ committed \
             {KEEPALIVES} {PLANS}",
            config.get_options().unwrap_or_default(),
        );
        config.options(settings.trim());
        config
    }

    /// The first statements of a transaction. Behind a pooler the settings of the session are not those of this store, and a
    /// statement that this process has given up keeps waiting.
    fn begin(&self, is_direct: bool) -> String {
        const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; \
                             SET LOCAL idle_in_transaction_session_timeout = 1000";
        if is_direct {
            return BEGIN.to_owned();
        }
        let (limit, lock_limit) = self.statement_limits();
        format!(
            "{BEGIN}; SET LOCAL statement_timeout = {limit}; SET LOCAL lock_timeout = {lock_limit}"
        )
    }

    /// The time limits of a statement, and of its wait for a row, in milliseconds.
    fn statement_limits(&self) -> (u128, u128) {
        let limit = self.limits.request.max(Duration::from_millis(40)).as_millis();
        // A row that is locked for longer delays only the requests for it.
        (limit, limit / 4)
    }

    async fn prepare_tables(&self, session: &Session) -> Result<(), Error> {
        match self.statements.check_tables(&session.client).await {
            Err(error) if self.database.params.creates && is_about_tables(&error) => {
                self.statements.create_tables(&session.client).await?;
                self.statements.check_tables(&session.client).await
            }
            checked => checked,
        }
    }
}

impl Session {
    /// The statement in its prepared form. `None` behind a pooler, which may run each statement in another session.
    pub(crate) async fn prepared(
        &self,
        statement: &Sql,
        parameters: &[Parameter<'_>],
    ) -> Result<Option<Statement>, Error> {
        if !self.is_direct {
            return Ok(None);
        }
        let known = self.prepared.lock()[statement.number].clone();
        if known.is_some() {
            return Ok(known);
        }
        let types: Vec<Type> = parameters.iter().map(|(_, of_type)| of_type.clone()).collect();
        let prepared = self.client.prepare_typed(&statement.text, &types).await?;
        self.prepared.lock()[statement.number] = Some(prepared.clone());
        Ok(Some(prepared))
    }

    /// Runs a statement. Its first poll sends it.
    pub(crate) async fn run(
        &self,
        statement: &Sql,
        prepared: Option<&Statement>,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, Error> {
        match prepared {
            Some(prepared) => {
                let values: Vec<_> = parameters.iter().map(|(value, _)| *value).collect();
                self.client.query(prepared, &values).await
            }
            None => self.client.query_typed(&statement.text, parameters).await,
        }
    }

    /// Whether statements name the column `info`.
    pub(crate) fn has_info(&self) -> bool {
        !self.lacks_info.load(Ordering::Relaxed)
    }

    /// From now on no statement names the column `info`.
    pub(crate) fn go_on_without_info(&self) {
        self.lacks_info.store(true, Ordering::Relaxed);
    }

    /// The rows for which statements of this session have waited in vain.
    pub(crate) fn locked_rows(&self) -> MutexGuard<'_, LockedRows> {
        self.locked_rows.lock()
    }

    /// Ends the server process of a lost connection, if it still runs. A statement that was sent there can then no longer
    /// grant anything after a release that is sent here. A process of another user cannot be ended, and may be a later one with
    /// the same id. It has `patience` to end on its own: the server bounds its statements.
    ///
    /// # Errors
    /// The process of this user still runs after `limit`.
    pub(crate) async fn end_process(
        &self,
        lost: ServerProcess,
        clock: Clock,
        (patience, limit): (Duration, Duration),
    ) -> Result<(), BackendError> {
        const LONGEST_PAUSE: Duration = Duration::from_millis(160);
        let ServerProcess { id, started: Some(started) } = lost else { return Ok(()) };
        // Other users may not see when a process was started.
        let sql = "SELECT CASE WHEN backend_start IS NOT NULL THEN pg_terminate_backend(pid) END \
                   FROM pg_stat_get_activity($1) WHERE backend_start IS NULL \
                   OR (extract(epoch FROM backend_start) * 1000000)::bigint = $2";
        let (began, mut pause) = (clock.now(), Duration::from_millis(5));
        loop {
            let rows =
                self.client.query_typed(sql, &[(&id, Type::INT4), (&started, Type::INT8)]).await;
            let is_signalled = match rows {
                Ok(rows) => match rows.first() {
                    Some(row) => get::<Option<bool>>(row, 0)?.is_some(),
                    None => return Ok(()),
                },
                Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => false,
                Err(error) => return Err(failure(error)),
            };
            let waited = clock.now().since(began);
            if is_signalled && waited >= limit {
                return Err(not_ended(id));
            }
            if !is_signalled && waited >= patience {
                return Ok(());
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}

/// A statement that waits in the process could still grant a lock.
#[cold]
fn not_ended(id: i32) -> BackendError {
    let text = format!("the PostgreSQL process {id} of the last connection has not ended");
    BackendError::new(FailureKind::NotApplied, text)
        .remedy("find out on the server why `pg_terminate_backend` has no effect on it; the locks are available again once it has ended")
}

/// The column of a row of this store's own statements.
pub(crate) fn get<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    column: usize,
) -> Result<T, BackendError> {
    row.try_get(column).map_err(|error| {
        BackendError::new(
            FailureKind::MaybeApplied,
            format!("PostgreSQL has answered in an unexpected form: {error}"),
        )
    })
}

type Connected = (Client, oneshot::Receiver<BackendError>, oneshot::Sender<()>);

/// Whether connections are encrypted.
pub(crate) enum Encryption {
    Off,
    #[cfg(feature = "postgres-tls")]
    Tls(tokio_postgres_rustls::MakeRustlsConnect),
}

impl Encryption {
    pub(crate) async fn new(files: Option<TlsFiles>) -> Result<Self, LockError> {
        match files {
            #[cfg(feature = "postgres-tls")]
            Some(files) => {
                let config = crate::backend::tls::client_config(files).await?;
                Ok(Self::Tls(tokio_postgres_rustls::MakeRustlsConnect::new(config)))
            }
            _ => Ok(Self::Off),
        }
    }

    async fn connect(&self, config: Config, on_payload: OnPayload) -> Result<Connected, Error> {
        match self {
            Self::Off => connect(config, NoTls, on_payload).await,
            #[cfg(feature = "postgres-tls")]
            Self::Tls(settings) => connect(config, settings.clone(), on_payload).await,
        }
    }
}

async fn connect<T>(config: Config, tls: T, on_payload: OnPayload) -> Result<Connected, Error>
where
    T: MakeTlsConnect<Socket>,
    T::Stream: Send + 'static,
{
    let (client, connection) = config.connect(tls).await?;
    let (on_end, ended) = oneshot::channel();
    let (closing, closed) = oneshot::channel();
    tokio::spawn(async move {
        let too_long = async {
            let _ = closed.await;
            tokio::time::sleep(CLOSE_TIMEOUT).await;
        };
        tokio::select! {
            error = drive(connection, on_payload) => drop(on_end.send(error)),
            () = too_long => {}
        }
    });
    Ok((client, ended, closing))
}

/// Reads and writes until the connection ends.
async fn drive<S, T>(mut connection: Connection<S, T>, on_payload: OnPayload) -> BackendError
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        match poll_fn(|context| connection.poll_message(context)).await {
            Some(Ok(AsyncMessage::Notification(notification))) => {
                on_payload(notification.payload());
            }
            Some(Ok(_)) => {}
            Some(Err(error)) => return failure(error),
            None => {
                let message = "the connection to PostgreSQL was closed";
                return BackendError::new(FailureKind::MaybeApplied, message);
            }
        }
    }
}
