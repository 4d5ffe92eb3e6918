//! Errors of a server, classified by what a caller can do about them.

use std::ops::RangeInclusive;

use mysql_async::{DriverError, Error, ServerError};

use crate::backend::mysql::schema;
use crate::backend::sql::error_text::root;
use crate::backend::sql::locked_rows::row_is_locked;
use crate::backend::{BackendError, FailureKind};

/// The failure for `error`, the answer to statements that were sent.
pub(crate) fn failure(error: Error) -> BackendError {
    let Error::Server(answer) = &error else {
        return BackendError::new(
            FailureKind::MaybeApplied,
            format!("the connection to MySQL has ended: {}", root(&error)),
        )
        .because(error);
    };
    let (kind, what, remedy) = refusal(answer);
    BackendError::new(kind, message(what, answer)).remedy(remedy).because(error)
}

/// The failure for `error`, from opening a connection.
pub(crate) fn connect_failure(server: &str, error: Error) -> BackendError {
    let Error::Server(answer) = &error else {
        let what = match &error {
            Error::Driver(DriverError::NoClientSslFlagFromServer) => "offers no TLS".to_owned(),
            Error::Driver(
                DriverError::UnknownAuthPlugin { .. }
                | DriverError::CleartextPluginDisabled
                | DriverError::MysqlOldPasswordDisabled,
            ) => format!("demands a log-in that is not supported: {}", root(&error)),
            _ => format!("is unreachable: {}", root(&error)),
        };
        return BackendError::new(FailureKind::NotApplied, format!("MySQL at {server} {what}"))
            .remedy("check host, port and network, and for `ssl-mode=required` the certificates")
            .because(error);
    };
    let (kind, what, remedy) = refusal(answer);
    BackendError::new(kind, message(&format!("at {server} {what}"), answer))
        .remedy(remedy)
        .because(error)
        .before_sending()
}

/// Whether a table may be missing, or is not of this version. Without rights on it a user does not learn which.
pub(crate) fn is_about_tables(error: &Error) -> bool {
    matches!(error, Error::Server(answer) if TABLES.contains(&answer.code) || answer.code == 1142)
}

/// The failure of a server that accepts no locks.
pub(crate) fn read_only(server: &str) -> BackendError {
    let message = format!("MySQL at {server} is read-only, as a replica is");
    BackendError::new(FailureKind::NotApplied, message).remedy(TO_THE_PRIMARY)
}

/// The failure of a request with more or longer keys than fit into a packet of `longest` bytes.
pub(crate) fn too_long(longest: usize) -> BackendError {
    let message =
        format!("the keys of the request do not fit into a packet of {longest} bytes for MySQL");
    BackendError::new(FailureKind::Rejected, message).remedy(LONGER_PACKETS)
}

/// Whether a row or table was locked elsewhere for too long, so that the statement had no effect.
pub(crate) fn is_lock_timeout(error: &BackendError) -> bool {
    // Also the server's limit for a statement: only a wait takes that long.
    code(error).is_some_and(|code| LOCK_TIMEOUTS.contains(&code))
}

/// The failure of a request for a locked row, after its script has failed with `error`.
pub(crate) fn of_locked_row(error: BackendError) -> BackendError {
    match error.kind() {
        // Such a limit may end a commit.
        FailureKind::MaybeApplied => error,
        _ => row_is_locked(LONG_TRANSACTIONS),
    }
}

/// Whether the server has rolled back a transaction that would pass if repeated: a deadlock, or a conflict of a cluster.
pub(crate) fn is_rolled_back(error: &BackendError) -> bool {
    code(error).is_some_and(|code| ROLLED_BACK.contains(&code))
}

/// What may be wrong with the column `info` where the message does not name it: its type, a check, a trigger.
const OF_A_COLUMN: [u16; 5] = [1416, 1644, 3144, 3819, 4025];

/// Whether the server refuses a statement for the column `info`, which its message usually names.
pub(crate) fn is_about_info(error: &BackendError) -> bool {
    let names_it = |answer: &ServerError| {
        OF_A_COLUMN.contains(&answer.code)
            || ["'info'", ".info'", ".info`", "`info`"].iter().any(|it| answer.message.contains(it))
    };
    error.kind() == FailureKind::Rejected
        && matches!(error.cause::<Error>(), Some(Error::Server(answer)) if names_it(answer))
}

/// Whether the connection is no longer usable, or the next one makes the tables that this one lacks.
pub(crate) fn ends_connection(error: &BackendError) -> bool {
    match code(error) {
        Some(NO_TABLE) => error.kind() == FailureKind::NotApplied,
        Some(code) => {
            let is_left = READ_ONLY.contains(&code) || UNREACHED.contains(&code);
            code == LONG_PACKET || is_ended(code) || is_left
        }
        // What is rejected here was not sent.
        None => error.kind() != FailureKind::Rejected,
    }
}

/// Whether a table does not exist.
pub(crate) fn lacks_table(error: &Error) -> bool {
    matches!(error, Error::Server(answer) if answer.code == NO_TABLE)
}

fn code(error: &BackendError) -> Option<u16> {
    match error.cause::<Error>() {
        Some(Error::Server(answer)) => Some(answer.code),
        _ => None,
    }
}

const TO_THE_PRIMARY: &str =
    "point the URL at the primary, or name all servers: `mysql://host1,host2/database`";
const LONGER_PACKETS: &str =
    "raise `max_allowed_packet` to 4 MiB or more, or lock fewer keys at once";
/// Where to look for a session that keeps rows locked.
pub(crate) const LONG_TRANSACTIONS: &str =
    "look for long transactions on the tables of the locks in `information_schema.INNODB_TRX`";

/// A deadlock, a conflict with another node, a row that changed since it was read.
const ROLLED_BACK: [u16; 3] = [1213, 3101, 1020];
/// A lock, a limit of MariaDB, a limit of MySQL, an interrupt.
const LOCK_TIMEOUTS: [u16; 4] = [1205, 1969, 3024, 1317];
/// A primary that has become a replica: another server of the URL may be the primary by now.
const READ_ONLY: [u16; 5] = [1047, 1290, 1792, 1836, 1874];
/// A global read lock, a lock table that is full, a table that was altered, a server that starts, a commit that its group
/// refuses.
const PASSING: [u16; 6] = [1206, 1223, 1412, 1615, 3100, 3168];
/// The server also ends the connection.
const LONG_PACKET: u16 = 1153;
const NO_TABLE: u16 = 1146;
const TABLES: [u16; 2] = [NO_TABLE, 1054];
/// Shut down, killed, idle for too long, or cut. In ProxySQL the time limit of a query, and a server that is offline.
const ENDED: [u16; 11] = [1053, 1927, 3169, 4031, 1152, 1158, 1159, 1160, 1161, 1907, 9004];
/// Errors of clients. A proxy is the client of the server, and passes them on.
const OF_CLIENTS: RangeInclusive<u16> = 2000..=2999;
/// A server in offline mode. In ProxySQL no connection to a server, or another server than that of the session.
const UNREACHED: [u16; 4] = [3032, 9001, 9002, 9006];

fn is_ended(code: u16) -> bool {
    ENDED.contains(&code) || OF_CLIENTS.contains(&code)
}

fn message(what: &str, answer: &ServerError) -> String {
    format!("MySQL {what}: {} (error {})", answer.message, answer.code)
}

fn refusal(answer: &ServerError) -> (FailureKind, &'static str, &'static str) {
    use FailureKind::{MaybeApplied, NotApplied, Rejected};
    match answer.code {
        code if ROLLED_BACK.contains(&code) => {
            (NotApplied, "has rolled the statement back", "it passes on its own")
        }
        // Such a limit may end a commit.
        1969 | 1317 => (MaybeApplied, "has cancelled a statement", LONG_TRANSACTIONS),
        code if LOCK_TIMEOUTS.contains(&code) => {
            (NotApplied, "has cancelled a statement that took too long", LONG_TRANSACTIONS)
        }
        code if is_ended(code) => {
            (MaybeApplied, "has ended the connection", "it is reopened automatically")
        }
        code if UNREACHED.contains(&code) => (
            NotApplied,
            "is offline or not reached by its proxy",
            "check `offline_mode` of the server, and the servers and rules of the proxy",
        ),
        1135 => (
            NotApplied,
            "cannot start a thread for the connection",
            "raise the limits of threads and memory of the server",
        ),
        1040 | 1203 | 1226 => (
            NotApplied,
            "accepts no connection now",
            "a pool of locks uses two connections; raise `max_connections` if this lasts",
        ),
        1047 => (NotApplied, "is not ready", "wait until the node has joined its cluster"),
        code if READ_ONLY.contains(&code) => (NotApplied, "is read-only", TO_THE_PRIMARY),
        1021 | 1037 | 1038 | 1041 | 1114 => {
            (NotApplied, "has no room left", "make room on the server")
        }
        1142 | 1143 if answer.message.starts_with("CREATE") => {
            (Rejected, "refuses to make the tables for lack of rights", schema::REMEDY)
        }
        1142 | 1143 => (
            Rejected,
            "refuses the statement for lack of rights",
            "grant the rights: `GRANT SELECT, INSERT, UPDATE, DELETE ON lock_lease TO the_user`, and the same for `lock_queue`; `docs/mysql.md` has the tables",
        ),
        1146 if answer.message.contains("_fence'") => {
            (Rejected, "does not have the table of the fences", schema::FENCE_REMEDY)
        }
        code if TABLES.contains(&code) => {
            (Rejected, "does not have the tables of the locks", schema::REMEDY)
        }
        1044 => (
            Rejected,
            "refuses the database",
            "check the name after the last `/` of the URL, and grant the user rights on its tables",
        ),
        1049 => (
            Rejected,
            "does not have the database",
            "make it: `CREATE DATABASE ..`, or check the name after the last `/` of the URL",
        ),
        1045 | 1698 | 1524 | 1820 | 1862 | 3118 | 4151 => (
            Rejected,
            "refuses the user or the password",
            "check user and password in the URL, and the host of the account on the server",
        ),
        1129 | 1130 => {
            (Rejected, "refuses this host", "allow the host of this process for the account")
        }
        LONG_PACKET => (Rejected, "refuses a long statement", LONGER_PACKETS),
        code if PASSING.contains(&code) => {
            (NotApplied, "cannot run the statement now", "it passes on its own")
        }
        1286 => (Rejected, "does not have the engine InnoDB", "enable InnoDB on the server"),
        1665 => (
            Rejected,
            "cannot log the statement",
            "set `binlog_format` to ROW or MIXED: locks need the isolation level READ COMMITTED",
        ),
        // The statement may have been committed before the error.
        1030 | 1180 | 1105 => {
            (MaybeApplied, "has failed", "see the server's log for the statement")
        }
        _ => (Rejected, "refuses the statement", "see the server's log for the statement"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: u16) -> BackendError {
        failure(Error::Server(ServerError {
            code,
            message: "message".to_owned(),
            state: "HY000".to_owned(),
        }))
    }

    #[test]
    fn an_error_says_what_was_applied_and_whether_the_connection_is_of_use() {
        use FailureKind::{MaybeApplied, NotApplied, Rejected};
        for (codes, kind, ends) in [
            // Locks, conflicts, and states that pass.
            (&[1205, 3024, 1213, 3101, 1020][..], NotApplied, false),
            (&[3168, 3100, 1223, 1206, 1412, 1615, 1135], NotApplied, false),
            // Another server may be the primary by now.
            (&[1290, 1792, 1836, 1874, 1047, 3032], NotApplied, true),
            (&[1969, 1317, 1180], MaybeApplied, false),
            (&[1053, 1927, 4031], MaybeApplied, true),
            // Of a proxy: the server is lost in the middle of a statement, or is not reached.
            (&[2000, 2006, 2013, 2999, 1907, 9004], MaybeApplied, true),
            (&[9001, 9002, 9006], NotApplied, true),
            (&[1142, 1146, 9999], Rejected, false),
            (&[1153], Rejected, true),
        ] {
            for code in codes {
                let error = answer(*code);
                assert_eq!((error.kind(), ends_connection(&error)), (kind, ends), "{code}");
            }
        }
        assert!(ends_connection(&failure(Error::Driver(DriverError::ConnectionClosed))));
        assert_eq!(too_long(1_024).kind(), Rejected);
        assert!(!ends_connection(&too_long(1_024)));
    }

    #[test]
    fn the_failure_for_a_locked_row_says_that_a_script_may_have_been_applied() {
        for (code, kind) in [
            (1205, FailureKind::NotApplied),
            (3024, FailureKind::NotApplied),
            (1969, FailureKind::MaybeApplied),
            (1317, FailureKind::MaybeApplied),
        ] {
            let error = answer(code);
            assert!(is_lock_timeout(&error), "{code}");
            assert_eq!(of_locked_row(error).kind(), kind, "{code}");
        }
    }
}
