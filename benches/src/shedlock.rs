//! The statements of ShedLock on PostgreSQL and MariaDB, with the server's time. ShedLock itself does not wait.

use std::time::Duration;

use mysql_async::prelude::Queryable;
use tokio::sync::{Mutex, Semaphore};
use tokio_postgres::{NoTls, SimpleQueryMessage};

/// As many as in the connection pool of a Spring service.
const CONNECTIONS: usize = 10;

/// Connections, and the name of this process.
pub(crate) struct ShedLock {
    free: Mutex<Vec<Session>>,
    permits: Semaphore,
    name: String,
}

enum Session {
    Postgres(tokio_postgres::Client),
    Mysql(Box<mysql_async::Conn>),
}

/// The table of ShedLock's documentation.
const TABLE: &str = "CREATE TABLE IF NOT EXISTS shedlock (name varchar(64) NOT NULL PRIMARY KEY, \
    lock_until timestamp(3) NOT NULL, locked_at timestamp(3) NOT NULL, locked_by varchar(255) NOT NULL)";

impl ShedLock {
    pub(crate) async fn connect(url: &str) -> Self {
        let url = url.split('?').next().unwrap_or(url);
        let mut free = Vec::new();
        for _ in 0..CONNECTIONS {
            free.push(Session::connect(url).await);
        }
        // Two processes may make it at the same time.
        let _ = free[0].run(TABLE).await;
        let name = format!("bench-{:016x}", fastrand::u64(..));
        Self { free: Mutex::new(free), permits: Semaphore::new(CONNECTIONS), name }
    }

    /// Whether the lock is taken. A row is inserted where there is none.
    pub(crate) async fn lock(&self, key: &str, ttl: Duration) -> bool {
        let (name, seconds) = (&self.name, ttl.as_secs());
        self.run(|session| match session {
            Session::Postgres(_) => vec![format!(
                "INSERT INTO shedlock (name, lock_until, locked_at, locked_by) VALUES \
                 ('{key}', now() + interval '{seconds} s', now(), '{name}') \
                 ON CONFLICT (name) DO UPDATE SET lock_until = now() + interval '{seconds} s', \
                 locked_at = now(), locked_by = '{name}' WHERE shedlock.lock_until <= now()"
            )],
            Session::Mysql(_) => {
                let until = format!("timestampadd(SECOND, {seconds}, utc_timestamp(3))");
                vec![
                    format!(
                        "UPDATE shedlock SET lock_until = {until}, locked_at = utc_timestamp(3), \
                         locked_by = '{name}' WHERE name = '{key}' AND lock_until <= utc_timestamp(3)"
                    ),
                    format!(
                        "INSERT IGNORE INTO shedlock (name, lock_until, locked_at, locked_by) \
                         VALUES ('{key}', {until}, utc_timestamp(3), '{name}')"
                    ),
                ]
            }
        })
        .await
    }

    pub(crate) async fn unlock(&self, key: &str) {
        let name = &self.name;
        self.run(|session| {
            let now = match session {
                Session::Postgres(_) => "now()",
                Session::Mysql(_) => "utc_timestamp(3)",
            };
            vec![format!(
                "UPDATE shedlock SET lock_until = {now} WHERE name = '{key}' AND locked_by = '{name}'"
            )]
        })
        .await;
    }

    /// Runs the statements until one of them changes a row.
    async fn run(&self, statements: impl FnOnce(&Session) -> Vec<String>) -> bool {
        let _permit = self.permits.acquire().await.expect("it stays open");
        let mut session = self.free.lock().await.pop().expect("as many as permits");
        let mut changed = false;
        for statement in statements(&session) {
            changed = session.run(&statement).await > 0;
            if changed {
                break;
            }
        }
        self.free.lock().await.push(session);
        changed
    }
}

impl Session {
    async fn connect(url: &str) -> Self {
        if url.starts_with("mysql:") {
            let options = mysql_async::Opts::from_url(url).expect("the URL is right");
            let connection = mysql_async::Conn::new(options).await;
            return Self::Mysql(Box::new(connection.expect("the server takes connections")));
        }
        let (client, connection) =
            tokio_postgres::connect(url, NoTls).await.expect("the server takes connections");
        tokio::spawn(connection);
        Self::Postgres(client)
    }

    /// How many rows have changed. Zero where the server refuses.
    async fn run(&mut self, statement: &str) -> u64 {
        match self {
            Self::Postgres(client) => {
                let answer = client.simple_query(statement).await.unwrap_or_default();
                let changed = answer.iter().find_map(|message| match message {
                    SimpleQueryMessage::CommandComplete(rows) => Some(*rows),
                    _ => None,
                });
                changed.unwrap_or(0)
            }
            Self::Mysql(connection) => match connection.query_drop(statement).await {
                Ok(()) => connection.affected_rows(),
                Err(_) => 0,
            },
        }
    }
}
