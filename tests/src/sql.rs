//! The databases behind one interface: what a program does in transactions of its own.

use mysql_async::prelude::Queryable;
use tokio::task::AbortHandle;
use tokio_postgres::{NoTls, SimpleQueryMessage};

use crate::{MysqlServer, PostgresServer, Skew};

/// A private server.
#[derive(Debug)]
pub enum SqlServer {
    /// PostgreSQL.
    Postgres(PostgresServer),
    /// MariaDB.
    Mysql(MysqlServer),
}

impl SqlServer {
    /// A PostgreSQL server.
    #[track_caller]
    pub fn postgres() -> Self {
        Self::Postgres(PostgresServer::start())
    }

    /// A MariaDB server.
    #[track_caller]
    pub fn mysql() -> Self {
        Self::Mysql(MysqlServer::start())
    }

    /// A PostgreSQL server with this clock.
    #[track_caller]
    pub fn postgres_with(clock: &Skew) -> Self {
        Self::Postgres(PostgresServer::builder().clock(clock).start())
    }

    /// A MariaDB server with this clock.
    #[track_caller]
    pub fn mysql_with(clock: &Skew) -> Self {
        Self::Mysql(MysqlServer::builder().clock(clock).start())
    }

    /// Of the database `locks`, with `?create=on`.
    pub fn url(&self) -> String {
        match self {
            Self::Postgres(server) => server.url(),
            Self::Mysql(server) => server.url(),
        }
    }

    /// A connection of a program of its own.
    ///
    /// # Panics
    ///
    /// When the server does not accept it.
    pub async fn session(&self) -> SqlSession {
        SqlSession::open(&match self {
            Self::Postgres(server) => {
                format!("postgres://locks@127.0.0.1:{}/locks", server.port())
            }
            Self::Mysql(server) => format!("mysql://locks@127.0.0.1:{}/locks", server.port()),
        })
        .await
    }
}

/// A connection. Dropping it ends it, and what is not committed.
#[derive(Debug)]
pub enum SqlSession {
    /// To PostgreSQL.
    Postgres(tokio_postgres::Client, AbortHandle),
    /// To MariaDB.
    Mysql(Box<mysql_async::Conn>),
}

impl SqlSession {
    /// A connection to the server and as the user of this URL.
    ///
    /// # Panics
    ///
    /// When the server does not accept it.
    pub async fn open(url: &str) -> Self {
        if url.starts_with("mysql:") {
            let options = mysql_async::Opts::from_url(url).unwrap();
            return Self::Mysql(Box::new(mysql_async::Conn::new(options).await.unwrap()));
        }
        let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
        Self::Postgres(client, tokio::spawn(connection).abort_handle())
    }

    /// Runs statements.
    ///
    /// # Errors
    ///
    /// The server's code and text.
    pub async fn try_run(&mut self, statements: &str) -> Result<(), String> {
        self.try_rows(statements).await.map(drop)
    }

    /// Runs statements.
    ///
    /// # Panics
    ///
    /// With the server's error.
    pub async fn run(&mut self, statements: &str) {
        self.rows(statements).await;
    }

    /// The first column of each row of one statement.
    ///
    /// # Panics
    ///
    /// With the server's error.
    pub async fn rows(&mut self, statement: &str) -> Vec<String> {
        self.try_rows(statement).await.unwrap_or_else(|error| panic!("{statement}: {error}"))
    }

    /// The first column of each row of one statement.
    ///
    /// # Errors
    ///
    /// The server's code and text.
    pub async fn try_rows(&mut self, statement: &str) -> Result<Vec<String>, String> {
        match self {
            Self::Postgres(client, _) => {
                let answer = client.simple_query(statement).await.map_err(|error| {
                    let Some(answer) = error.as_db_error() else { return error.to_string() };
                    format!("{}: {answer} {:?}", answer.code().code(), answer.hint())
                });
                let rows = answer?.into_iter().filter_map(|message| match message {
                    SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or_default().to_owned()),
                    _ => None,
                });
                Ok(rows.collect())
            }
            Self::Mysql(conn) => {
                let rows: mysql_async::Result<Vec<mysql_async::Row>> = conn.query(statement).await;
                let rows = rows.map_err(|error| error.to_string())?;
                let first = |row: mysql_async::Row| {
                    let value: Option<mysql_async::Value> = row.get(0);
                    value.map_or_else(String::new, |value| match value {
                        mysql_async::Value::Bytes(bytes) => {
                            String::from_utf8_lossy(&bytes).into_owned()
                        }
                        other => other.as_sql(false),
                    })
                };
                Ok(rows.into_iter().map(first).collect())
            }
        }
    }

    /// Begins a transaction with the default isolation level of the server.
    ///
    /// # Panics
    ///
    /// With the server's error.
    pub async fn begin(&mut self) {
        self.run("BEGIN").await;
    }
}

impl Drop for SqlSession {
    fn drop(&mut self) {
        if let Self::Postgres(_, connection) = self {
            connection.abort();
        }
    }
}
