//! One connection to the database, from its log-in to its end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, OptsBuilder, Row, Value};
use tokio::time::timeout;

use crate::backend::address_race::log_in_by_name;
use crate::backend::credentials::Provider;
use crate::backend::mysql::encryption::MysqlEncryption;
use crate::backend::mysql::packet::SHORTEST_PACKET;
use crate::backend::mysql::schema::MysqlStatements;
use crate::backend::mysql::script::{Literal, SqlScript};
use crate::backend::mysql::server_error::{
    connect_failure, failure, is_about_tables, read_only, too_long,
};
use crate::backend::mysql::url::{MysqlHost, MysqlUrl};
use crate::backend::sql::first_opened::first_opened;
use crate::backend::sql::job::moved;
use crate::backend::sql::tables::InfoColumn;
use crate::backend::{BackendError, FailureKind, Limits, Owner};
use crate::base::clock::Clock;
use crate::base::mutex::Mutex;

/// Opens connections to one database.
pub(crate) struct MysqlConnector {
    pub(crate) database: MysqlUrl,
    pub(crate) statements: MysqlStatements,
    /// For leases without the column `info`.
    pub(super) without_info: MysqlStatements,
    pub(crate) credentials: Option<Provider>,
    pub(crate) encryption: MysqlEncryption,
    pub(crate) limits: Limits,
    /// The position of the server that was connected last.
    pub(crate) last: AtomicUsize,
    /// That server, as [`MysqlSessionIdentity::server`] names it: a name may lead to another server by now.
    pub(crate) last_server: Mutex<String>,
}

/// An open connection. Dropping it closes the connection after what the server still sends, in a task of its own. So a statement
/// may run on after the drop, until [`end_session`](Self::end_session) of the next connection.
pub(crate) struct MysqlSession {
    conn: Conn,
    pub(crate) identity: MysqlSessionIdentity,
    /// Whether statements name the column `info`. No longer, once the server has refused a statement because of it.
    pub(super) info: InfoColumn,
    /// The position of its server in the URL.
    host: usize,
    /// The longest packet that the server takes.
    longest: usize,
}

/// How another session finds this one.
#[derive(Clone, Debug, Default)]
pub(crate) struct MysqlSessionIdentity {
    /// A named lock of the server that the connection holds until it ends, or nothing if the server has none. By it,
    /// other sessions learn whether this one is alive. It starts with [`server`](Self::server).
    pub(crate) name: String,
    /// The start of such names on the same server.
    pub(crate) server: String,
    /// Unique since the server's start.
    number: i64,
    /// Where the connection comes from, as the server writes it, in hexadecimal digits. After a restart, another process may have a
    /// session with this number, and never from the same port. Nothing if there is a name, or the server does not tell.
    from: String,
}

/// A row of an answer.
#[derive(Debug)]
pub(crate) struct Fields(Vec<Value>);

/// The rows of each statement that returns rows.
pub(crate) type RowSets = Vec<Vec<Fields>>;

/// What the statements of a script have returned.
#[derive(Debug, Default)]
pub(crate) struct ScriptAnswer {
    pub(crate) sets: RowSets,
    /// How many statements were run.
    pub(crate) done: usize,
    /// How many rows the last statement has found to change.
    pub(crate) matched: u64,
}

impl MysqlConnector {
    /// Host and port of the server that was connected last, for error texts.
    pub(crate) fn server(&self) -> String {
        let hosts = &self.database.hosts;
        hosts.get(self.last.load(Ordering::Relaxed)).map_or_else(String::new, name_of)
    }

    /// Connects to the first server that accepts writes, and checks that the tables are there. Begins with the server that
    /// was connected last; each has the whole time limit.
    pub(crate) async fn open(&self) -> Result<MysqlSession, BackendError> {
        let servers: Vec<_> = self.database.hosts.iter().map(name_of).collect();
        let (last, limit) = (self.last.load(Ordering::Relaxed), self.limits.connect);
        let open_at = |at: usize| self.open_at(at, &servers[at]);
        let (at, session) = first_opened("MySQL", &servers, last, limit, open_at).await?;
        self.last.store(at, Ordering::Relaxed);
        self.last_server.lock().clone_from(&session.identity.server);
        Ok(session)
    }

    async fn open_at(&self, host: usize, server: &str) -> Result<MysqlSession, BackendError> {
        let refused = |error| connect_failure(server, error);
        let conn = self.log_in(&self.database.hosts[host], server).await?;
        let identity = MysqlSessionIdentity::default();
        // For the first statements.
        let longest = SHORTEST_PACKET;
        let info = InfoColumn::Named;
        let mut session = MysqlSession { conn, identity, info, host, longest };
        let script =
            SqlScript::of(&self.statements.session, &[]).then(&self.statements.introduction, &[]);
        let answer = session.run(&script).await.map_err(|(error, _)| refused(error))?;
        session.introduce(&answer, server)?;
        session.take_name().await?;
        self.prepare_tables(&mut session).await.map_err(refused)?;
        let limit = self.limits.request.max(Duration::from_millis(40));
        let seconds = format!("{:.3}", limit.as_secs_f64());
        let millis = i64::try_from(limit.as_millis()).unwrap_or(i64::MAX);
        let limits = [("seconds", Literal::Text(&seconds)), ("millis", Literal::Number(millis))];
        let script = SqlScript::of(&self.statements.limits, &limits);
        session.run(&script).await.map_err(|(error, _)| refused(error))?;
        Ok(session)
    }

    /// Logs in. Where the host name has several addresses, one without an answer does not delay the others.
    async fn log_in(&self, host: &MysqlHost, server: &str) -> Result<Conn, BackendError> {
        let options = self.options(host).await?;
        let connected =
            log_in_by_name((&host.name, host.port), self.limits.connect / 4, |address| {
                Conn::new(options.clone().resolved_ips(address.map(|address| vec![address])))
            });
        connected.await.map_err(|error| connect_failure(server, error))
    }

    async fn options(&self, host: &MysqlHost) -> Result<OptsBuilder, BackendError> {
        /// How long a connection is idle before the system checks it.
        const KEEPALIVE: Duration = Duration::from_secs(10);
        let database = &self.database;
        let (mut user, mut password) = (database.user.clone(), database.password.clone());
        if let Some(provider) = &self.credentials {
            let credentials = provider.credentials().await?;
            user = credentials.user().map(str::to_owned).or(user);
            password = Some(credentials.secret().to_owned());
        }
        let options = OptsBuilder::default()
            .ip_or_hostname(host.name.clone())
            .tcp_port(host.port)
            .user(user)
            .pass(password)
            .db_name(database.database.clone())
            .prefer_socket(false)
            .tcp_keepalive(Some(KEEPALIVE))
            .client_found_rows(true)
            .stmt_cache_size(0);
        Ok(self.encryption.applied(options))
    }

    pub(super) fn statements_for(&self, session: &MysqlSession) -> &MysqlStatements {
        match session.info {
            InfoColumn::Named => &self.statements,
            InfoColumn::LeftOut => &self.without_info,
        }
    }

    async fn prepare_tables(&self, session: &mut MysqlSession) -> Result<(), Error> {
        let run = async |session: &mut MysqlSession, script: SqlScript| {
            session.run(&script).await.map(drop).map_err(|(error, _)| error)
        };
        let check = || SqlScript::of(&self.statements.check, &[]);
        match run(session, check()).await {
            Err(error) if self.database.params.creates && is_about_tables(&error) => {
                run(session, SqlScript::of(&self.statements.tables, &[])).await?;
                run(session, check()).await
            }
            checked => checked,
        }
    }
}

impl MysqlSession {
    /// Takes over what the answer to `introduction.sql` says. An error if the server is read-only.
    fn introduce(&mut self, answer: &ScriptAnswer, server: &str) -> Result<(), BackendError> {
        let row = answer.sets.first().and_then(|rows| rows.first()).ok_or_else(unexpected)?;
        let (Some(node), Some(is_read_only), Some(longest), Some(number)) =
            (row.text(0), row.number(1), row.number(2), row.number(3))
        else {
            return Err(unexpected());
        };
        if is_read_only != 0 {
            return Err(read_only(server));
        }
        self.identity.server = format!("lock_runtime_{node}_");
        self.identity.number = number;
        self.longest = usize::try_from(longest).unwrap_or(SHORTEST_PACKET);
        Ok(())
    }

    /// Checks that the server answers, still accepts writes, and is the one that was connected last. A user with all rights may
    /// write to a replica too, and both connections of a pool belong on one server.
    pub(crate) async fn check(&mut self, connector: &MysqlConnector) -> Result<(), BackendError> {
        let script = SqlScript::of(&connector.statements.introduction, &[]);
        let answer = self.run(&script).await.map_err(|(error, _)| failure(error))?;
        self.introduce(&answer, &name_of(&connector.database.hosts[self.host]))?;
        let is_last = self.host == connector.last.load(Ordering::Relaxed);
        if is_last && self.identity.server == *connector.last_server.lock() {
            return Ok(());
        }
        Err(moved())
    }

    /// How many of at most `most` parts of a script fit into a packet, if each has at most `bytes`.
    pub(crate) fn parts(&self, most: usize, bytes: usize) -> usize {
        (self.longest / bytes).clamp(1, most)
    }

    /// The error of a script that is too long to be sent. Sending it would end the connection.
    pub(crate) fn refuses(&self, script: &SqlScript) -> Option<BackendError> {
        // A byte in front names the command.
        (script.text().len() >= self.longest).then(|| too_long(self.longest))
    }

    /// Runs all statements of `script`. An error comes with the number of statements that were run before it.
    pub(crate) async fn run(&mut self, script: &SqlScript) -> Result<ScriptAnswer, (Error, usize)> {
        let mut answer = ScriptAnswer::default();
        let mut result = self.conn.query_iter(script.text()).await.map_err(|error| (error, 0))?;
        while let Some(columns) = result.columns() {
            if columns.is_empty() {
                answer.matched = result.affected_rows();
            }
            let rows = result.collect::<Row>().await.map_err(|error| (error, answer.done))?;
            answer.done += 1;
            if !columns.is_empty() {
                answer.sets.push(rows.into_iter().map(|row| Fields(row.unwrap())).collect());
            }
        }
        // The error of a statement after the first.
        result.drop_result().await.map_err(|error| (error, answer.done))?;
        Ok(answer)
    }

    /// Closes the connection cleanly. For a frozen server there is a time limit.
    pub(crate) async fn close(self) {
        const LIMIT: Duration = Duration::from_millis(500);
        let _ = timeout(LIMIT, self.conn.disconnect()).await;
    }

    /// Takes a new name. A server may refuse named locks: then the session has none.
    async fn take_name(&mut self) -> Result<(), BackendError> {
        let random = Owner::random()
            .map_err(|error| BackendError::new(FailureKind::NotApplied, error.to_string()))?;
        let digits = std::str::from_utf8(&random.as_bytes()[..24]).unwrap_or_default();
        let name = format!("{}{digits}", self.identity.server);
        match self.number(&format!("SELECT GET_LOCK('{name}', 0)")).await {
            Ok(Some(1)) => self.identity.name = name,
            Ok(_) | Err(Error::Server(_)) => self.identity.from = self.origin().await?,
            Err(error) => return Err(failure(error).before_sending()),
        }
        Ok(())
    }

    /// From where the server sees this connection.
    async fn origin(&mut self) -> Result<String, BackendError> {
        let statement =
            "SELECT HEX(HOST) FROM information_schema.PROCESSLIST WHERE ID = CONNECTION_ID()";
        match self.conn.query_first::<Option<String>, _>(statement).await {
            Ok(host) => Ok(host.flatten().unwrap_or_default()),
            Err(Error::Server(_)) => Ok(String::new()),
            Err(error) => Err(failure(error).before_sending()),
        }
    }

    /// Ends the session `lost`, if it still runs. A statement that was sent there can then no longer grant anything after a
    /// release that is sent here. A server that refuses this has `patience` to end the session on its own: the statements of a
    /// script are bounded there.
    pub(crate) async fn end_session(
        &mut self,
        lost: &MysqlSessionIdentity,
        clock: &Clock,
        patience: Duration,
    ) -> Result<(), BackendError> {
        const BETWEEN: Duration = Duration::from_millis(5);
        let began = clock.now();
        while let Some(number) = self.running(lost).await.map_err(failure)? {
            match self.conn.query_drop(format!("KILL {number}")).await {
                Ok(()) => {}
                // It has ended meanwhile, or belongs to the user of other credentials.
                Err(Error::Server(_)) if clock.now().since(began) < patience => {}
                Err(Error::Server(_)) => return Ok(()),
                Err(error) => return Err(failure(error)),
            }
            tokio::time::sleep(BETWEEN).await;
        }
        Ok(())
    }

    /// The number of the session `lost`, if it still runs on this server.
    async fn running(&mut self, lost: &MysqlSessionIdentity) -> Result<Option<i64>, Error> {
        if !lost.name.is_empty() {
            return self.number(&format!("SELECT IS_USED_LOCK('{}')", lost.name)).await;
        }
        // Numbers start over with the server, and users without rights see only their own sessions.
        if lost.server != self.identity.server || lost.number >= self.identity.number {
            return Ok(None);
        }
        let own = "SELECT ID FROM information_schema.PROCESSLIST \
            WHERE USER = SUBSTRING_INDEX(USER(), '@', 1) AND DB <=> DATABASE()";
        let from = if lost.from.is_empty() {
            String::new()
        } else {
            format!(" AND HEX(HOST) = '{}'", lost.from)
        };
        self.number(&format!("{own} AND ID = {}{from}", lost.number)).await
    }

    async fn number(&mut self, statement: &str) -> Result<Option<i64>, Error> {
        let row: Option<Row> = self.conn.query_first(statement).await?;
        Ok(row.and_then(|row| Fields(row.unwrap()).number(0)))
    }
}

impl Fields {
    /// A column of this store's own statements, unless it is `NULL`.
    pub(crate) fn bytes(&self, column: usize) -> Option<&[u8]> {
        match self.0.get(column) {
            Some(Value::Bytes(bytes)) => Some(bytes),
            _ => None,
        }
    }

    pub(crate) fn text(&self, column: usize) -> Option<&str> {
        std::str::from_utf8(self.bytes(column)?).ok()
    }

    pub(crate) fn number(&self, column: usize) -> Option<i64> {
        match self.0.get(column) {
            Some(Value::Int(number)) => Some(*number),
            Some(Value::UInt(number)) => i64::try_from(*number).ok(),
            _ => self.text(column)?.parse().ok(),
        }
    }

    pub(crate) fn owner(&self, column: usize) -> Option<Owner> {
        Some(Owner::from_text(self.bytes(column)?.try_into().ok()?))
    }

    pub(crate) fn is_true(&self, column: usize) -> bool {
        self.number(column).is_some_and(|number| number != 0)
    }
}

fn name_of(host: &MysqlHost) -> String {
    format!("{}:{}", host.name, host.port)
}

/// The failure of a request with an answer that does not match this store's statements.
#[cold]
pub(crate) fn unexpected() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "MySQL has answered in an unexpected form")
}
