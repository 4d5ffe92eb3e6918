//! One connection to the database, from its log-in to its end.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::config::Host;
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Error, NoTls};

use crate::backend::credentials::Provider;
use crate::backend::postgres::schema::Statements;
use crate::backend::postgres::server_error::{
    connect_failure, failure, is_about_tables, refuses_startup_options,
};
use crate::backend::postgres::url::Database;
use crate::backend::{BackendError, FailureKind, Limits};

/// Receives the payloads of notifications.
pub(crate) type OnPayload = Arc<dyn Fn(&str) + Send + Sync>;

/// Opens connections to one database.
#[derive(Clone)]
pub(crate) struct Dialer {
    pub(crate) database: Arc<Database>,
    pub(crate) statements: Arc<Statements>,
    pub(crate) credentials: Option<Provider>,
    pub(crate) limits: Limits,
}

/// The server process of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServerProcess {
    pub(crate) id: i32,
    /// Distinguishes processes with the same id: microseconds since 1970.
    started: i64,
}

/// An open connection. Dropping it closes the connection.
pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) process: ServerProcess,
    /// Whether the server process belongs to this connection alone, so that settings of the session stay in effect. Not behind a
    /// pooler.
    pub(crate) is_direct: bool,
    /// Resolves with the end of the connection.
    pub(crate) ended: oneshot::Receiver<BackendError>,
    driving: AbortHandle,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.driving.abort();
    }
}

impl Dialer {
    /// The first host and port, for error texts.
    pub(crate) fn server(&self) -> String {
        let config = &self.database.config;
        let port = config.get_ports().first().copied().unwrap_or(5432);
        match config.get_hosts().first() {
            Some(Host::Tcp(host)) => format!("{host}:{port}"),
            #[cfg(unix)]
            Some(Host::Unix(path)) => path.display().to_string(),
            None => config.get_hostaddrs().first().map_or(String::new(), ToString::to_string),
        }
    }

    /// Connects, and checks that the tables are there.
    pub(crate) async fn open(&self, on_payload: OnPayload) -> Result<Session, BackendError> {
        let limit = self.limits.connect;
        let opened = timeout(limit, self.open_unbounded(on_payload)).await;
        opened.unwrap_or_else(|_| {
            let server = self.server();
            Err(BackendError::new(
                FailureKind::NotApplied,
                format!("PostgreSQL at {server} has not accepted a connection within {limit:?}"),
            )
            .remedy("check host, port and network, or raise `connect_timeout` of the pool"))
        })
    }

    async fn open_unbounded(&self, on_payload: OnPayload) -> Result<Session, BackendError> {
        let mut config = self.database.config.clone();
        if let Some(provider) = &self.credentials {
            let credentials = provider.credentials().await?;
            if let Some(user) = credentials.user() {
                config.user(user);
            }
            config.password(credentials.secret());
        }
        let refused = |error| connect_failure(&self.server(), error);
        let (client, ended, driving) = match connect(self.direct(&config), on_payload.clone()).await
        {
            // A pooler shares server processes, and takes no settings for one of them.
            Err(error) if refuses_startup_options(&error) => {
                connect(config, on_payload).await.map_err(refused)?
            }
            connected => connected.map_err(refused)?,
        };
        let row = client
            .query_typed_one(
                "SELECT pg_backend_pid(), \
                    (SELECT (extract(epoch FROM backend_start) * 1000000)::bigint \
                        FROM pg_stat_get_activity(pg_backend_pid())), \
                    current_setting('lock_runtime.session', true) = 'direct'",
                &[],
            )
            .await
            .map_err(refused)?;
        let process = ServerProcess { id: get(&row, 0)?, started: get(&row, 1)? };
        let is_direct: Option<bool> = get(&row, 2)?;
        let is_direct = is_direct == Some(true);
        let session = Session { client, process, is_direct, ended, driving };
        self.prepare_tables(&session).await.map_err(refused)?;
        Ok(session)
    }

    /// `config` with settings that bound every statement on the server too. A statement that this process has given up
    /// may still wait for a row there.
    fn direct(&self, config: &Config) -> Config {
        let mut config = config.clone();
        let limit = self.limits.request.max(Duration::from_millis(10)).as_millis();
        let settings = format!(
            "{} -c lock_runtime.session=direct -c statement_timeout={limit} -c lock_timeout={limit} \
             -c idle_in_transaction_session_timeout=10000 -c default_transaction_isolation=read\\ committed",
            config.get_options().unwrap_or_default(),
        );
        config.options(settings.trim());
        config
    }

    async fn prepare_tables(&self, session: &Session) -> Result<(), Error> {
        match self.statements.check_tables(&session.client).await {
            Err(error) if self.database.creates && is_about_tables(&error) => {
                self.statements.create_tables(&session.client).await?;
                self.statements.check_tables(&session.client).await
            }
            checked => checked,
        }
    }
}

impl Session {
    /// Ends the server process of a lost connection, if it still runs. A statement that was sent there can then no longer
    /// grant anything behind a release that is sent here.
    pub(crate) async fn end_process(&self, lost: ServerProcess) -> Result<(), BackendError> {
        let ServerProcess { id, started } = lost;
        let sql = "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_get_activity($1) \
                   WHERE (extract(epoch FROM backend_start) * 1000000)::bigint = $2";
        let ended =
            self.client.query_typed(sql, &[(&id, Type::INT4), (&started, Type::INT8)]).await;
        ended.map(drop).map_err(failure)
    }
}

/// The column of a row of this store's own statements.
pub(crate) fn get<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a tokio_postgres::Row,
    column: usize,
) -> Result<T, BackendError> {
    row.try_get(column).map_err(|error| {
        BackendError::new(
            FailureKind::MaybeApplied,
            format!("PostgreSQL has answered in an unexpected form: {error}"),
        )
    })
}

type Connected = (Client, oneshot::Receiver<BackendError>, AbortHandle);

async fn connect(config: Config, on_payload: OnPayload) -> Result<Connected, Error> {
    let (client, connection) = config.connect(NoTls).await?;
    let (on_end, ended) = oneshot::channel();
    let driving = tokio::spawn(async move {
        let error = drive(connection, on_payload).await;
        let _ = on_end.send(error);
    });
    Ok((client, ended, driving.abort_handle()))
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
