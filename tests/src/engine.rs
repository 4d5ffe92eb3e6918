//! The stores other than Redis behind one interface.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{EtcdServer, MysqlServer, PostgresServer, ZooKeeperServer, etcd, zookeeper};

/// Which store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// PostgreSQL.
    Postgres,
    /// MariaDB.
    Mysql,
    /// One etcd member.
    Etcd,
    /// One ZooKeeper server.
    ZooKeeper,
}

/// A server, and a part of it without locks of others: a database, or a path.
#[derive(Debug)]
pub struct Engine {
    server: EngineServer,
    space: String,
}

#[derive(Debug)]
enum EngineServer {
    Postgres(Hosted<PostgresServer>),
    Mysql(Hosted<MysqlServer>),
    Etcd(Hosted<EtcdServer>),
    ZooKeeper(Hosted<ZooKeeperServer>),
}

/// A server of this test alone, or that of all tests of the program.
#[derive(Debug)]
enum Hosted<T: 'static> {
    Own(Box<T>),
    Shared(&'static T),
}

impl<T> Deref for Hosted<T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Self::Own(server) => server,
            Self::Shared(server) => server,
        }
    }
}

impl<T> Hosted<T> {
    fn own(server: T) -> Self {
        Self::Own(Box::new(server))
    }
}

impl Engine {
    /// A part of the server of all tests of this program that do not disturb it.
    ///
    /// # Panics
    ///
    /// With the server's log, when it does not start.
    #[track_caller]
    pub fn shared(kind: EngineKind) -> Self {
        static SPACES: AtomicUsize = AtomicUsize::new(0);
        let space = format!("space_{}", SPACES.fetch_add(1, Ordering::Relaxed));
        match kind {
            EngineKind::Postgres => {
                let server = PostgresServer::shared();
                server.database(&space);
                Self { server: EngineServer::Postgres(Hosted::Shared(server)), space }
            }
            EngineKind::Mysql => {
                let server = MysqlServer::shared();
                server.database(&space);
                Self { server: EngineServer::Mysql(Hosted::Shared(server)), space }
            }
            EngineKind::Etcd => {
                let (server, space) = EtcdServer::shared();
                Self { server: EngineServer::Etcd(Hosted::Shared(server)), space }
            }
            EngineKind::ZooKeeper => {
                let (server, space) = ZooKeeperServer::shared();
                Self { server: EngineServer::ZooKeeper(Hosted::Shared(server)), space }
            }
        }
    }

    /// A server of its own.
    ///
    /// # Panics
    ///
    /// With the server's log, when it does not start.
    #[track_caller]
    pub fn start(kind: EngineKind) -> Self {
        let (server, space) = match kind {
            EngineKind::Postgres => {
                // Each statement has a line of the log, without its parameters.
                let server = PostgresServer::builder()
                    .setting("log_statement", "all")
                    .setting("log_parameter_max_length", "0");
                (EngineServer::Postgres(Hosted::own(server.start())), "locks")
            }
            EngineKind::Mysql => {
                let server = MysqlServer::builder().logged().start();
                (EngineServer::Mysql(Hosted::own(server)), "locks")
            }
            EngineKind::Etcd => (EngineServer::Etcd(Hosted::own(EtcdServer::start())), "/locks"),
            EngineKind::ZooKeeper => {
                (EngineServer::ZooKeeper(Hosted::own(ZooKeeperServer::start())), "/locks")
            }
        };
        Self { server, space: space.into() }
    }

    /// The URL of this part of the server.
    pub fn url(&self) -> String {
        self.url_at(self.port())
    }

    /// The URL with another port: that of a proxy.
    pub fn url_at(&self, port: u16) -> String {
        let space = &self.space;
        match &self.server {
            EngineServer::Postgres(_) => {
                format!("postgres://locks@127.0.0.1:{port}/{space}?create=on")
            }
            EngineServer::Mysql(_) => format!("mysql://locks@127.0.0.1:{port}/{space}?create=on"),
            EngineServer::Etcd(_) => etcd::url_at(port, space),
            EngineServer::ZooKeeper(_) => zookeeper::url_at(port, space),
        }
    }

    /// The port.
    pub fn port(&self) -> u16 {
        match &self.server {
            EngineServer::Postgres(server) => server.port(),
            EngineServer::Mysql(server) => server.port(),
            EngineServer::Etcd(server) => server.port(),
            EngineServer::ZooKeeper(server) => server.port(),
        }
    }

    /// What the store keeps of the owner of `key`. `None` if it is free.
    ///
    /// # Panics
    ///
    /// When the server does not answer.
    #[track_caller]
    pub fn holder(&self, key: &str) -> Option<String> {
        let space = &self.space;
        let first = |rows: Vec<Vec<String>>| rows.into_iter().flatten().next();
        match &self.server {
            EngineServer::Postgres(server) => first(server.query_in(
                space,
                &format!(
                    "SELECT encode(owner, 'hex') FROM lock_lease \
                     WHERE key = '{key}' AND owner <> '' AND until > now()"
                ),
            )),
            EngineServer::Mysql(server) => first(server.query(&format!(
                "SELECT HEX(owner) FROM {space}.lock_lease \
                 WHERE `key` = '{key}' AND owner <> '' AND until > UNIX_TIMESTAMP(NOW(6)) * 1000000"
            ))),
            EngineServer::Etcd(server) => {
                server.queue(space, key).into_iter().next().map(|key| key.name)
            }
            EngineServer::ZooKeeper(server) => server.queue(space, key).into_iter().next(),
        }
    }

    /// How many keys of owners it has, held or waited for.
    ///
    /// # Panics
    ///
    /// When the server does not answer.
    #[track_caller]
    pub fn owners(&self) -> usize {
        let space = &self.space;
        let count = |rows: Vec<Vec<String>>| rows[0][0].parse().expect("a count is a number");
        match &self.server {
            EngineServer::Postgres(server) => count(server.query_in(
                space,
                "SELECT (SELECT count(*) FROM lock_lease WHERE owner <> '' AND until > now()) \
                 + (SELECT count(*) FROM lock_queue)",
            )),
            EngineServer::Mysql(server) => count(server.query(&format!(
                "SELECT (SELECT COUNT(*) FROM {space}.lock_lease \
                     WHERE owner <> '' AND until > UNIX_TIMESTAMP(NOW(6)) * 1000000) \
                 + (SELECT COUNT(*) FROM {space}.lock_queue)"
            ))),
            EngineServer::Etcd(server) => {
                let own = format!("{space}/%");
                let keys = server.keys(&format!("{space}/"));
                keys.iter().filter(|key| !key.name.starts_with(&own)).count()
            }
            EngineServer::ZooKeeper(server) => {
                let mut client = server.client();
                let keys = client.children(space).unwrap_or_default();
                let nodes = keys.iter().map(|key| client.children(&format!("{space}/{key}")));
                nodes.map(|nodes| nodes.unwrap_or_default().len()).sum()
            }
        }
    }

    /// How many deadlocks the server has ended. Zero of a store without transactions that wait.
    ///
    /// # Panics
    ///
    /// When the server does not answer.
    #[track_caller]
    pub fn deadlocks(&self) -> usize {
        match &self.server {
            EngineServer::Postgres(server) => server.log().matches("deadlock detected").count(),
            EngineServer::Mysql(server) => {
                usize::try_from(server.deadlocks()).expect("a small number")
            }
            EngineServer::Etcd(_) | EngineServer::ZooKeeper(_) => 0,
        }
    }

    /// How many statements or messages a server of its own has received since its start. On MariaDB without looks for waiters
    /// and without checks of a connection.
    ///
    /// # Panics
    ///
    /// When the server does not answer.
    #[track_caller]
    pub fn requests(&self) -> usize {
        match &self.server {
            EngineServer::Postgres(server) => {
                let log = server.log();
                log.matches("LOG:  execute ").count() + log.matches("LOG:  statement: ").count()
            }
            EngineServer::Mysql(server) => {
                server.sent().iter().filter(|script| !is_upkeep(script)).count()
            }
            EngineServer::Etcd(server) => server.messages(),
            EngineServer::ZooKeeper(server) => server.packets(),
        }
    }

    /// What the server has logged.
    pub fn log(&self) -> String {
        match &self.server {
            EngineServer::Postgres(server) => server.log(),
            EngineServer::Mysql(server) => server.log(),
            EngineServer::Etcd(server) => server.log(),
            EngineServer::ZooKeeper(server) => server.log(),
        }
    }
}

/// A look for waiters or a sweep has the time of its transaction in a `SET`, other than renewals. A check of a connection reads
/// what names the server.
fn is_upkeep(script: &str) -> bool {
    script.starts_with("SET @now") || script.contains("@@hostname")
}
