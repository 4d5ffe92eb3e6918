//! Errors of a server, classified by what a caller can do about them.

use tokio_postgres::Error;
use tokio_postgres::error::{DbError, Severity, SqlState};

use crate::backend::postgres::schema;
use crate::backend::sql::error_text::root;
use crate::backend::{BackendError, FailureKind};

/// The failure for `error`, the answer to a statement that was sent.
pub(crate) fn failure(error: Error) -> BackendError {
    let Some(answer) = error.as_db_error() else {
        return BackendError::new(
            FailureKind::MaybeApplied,
            format!("the connection to PostgreSQL has ended: {}", root(&error)),
        )
        .because(error);
    };
    let (kind, what, remedy) = refusal(answer);
    BackendError::new(kind, message(what, answer)).remedy(remedy).because(error)
}

/// The failure for `error`, from opening a connection.
pub(crate) fn connect_failure(server: &str, error: Error) -> BackendError {
    let Some(answer) = error.as_db_error() else {
        // The client library asks each server whether it accepts writes.
        if root(&error).contains("does not allow writes") {
            return read_only(server).because(error);
        }
        return BackendError::new(
            FailureKind::NotApplied,
            format!("PostgreSQL at {server} is unreachable: {}", root(&error)),
        )
        .remedy("check host, port and network, and for `sslmode=require` the certificates")
        .because(error);
    };
    let (kind, what, remedy) = refusal(answer);
    BackendError::new(kind, message(&format!("at {server} {what}"), answer))
        .remedy(remedy)
        .because(error)
        .before_sending()
}

/// Whether the server, or a pooler in front of it, refuses the settings that a session starts with.
pub(crate) fn refuses_startup_options(error: &Error) -> bool {
    let Some(answer) = error.as_db_error() else { return false };
    // PgBouncer, and the proxy of Amazon RDS.
    let codes = [SqlState::PROTOCOL_VIOLATION, SqlState::FEATURE_NOT_SUPPORTED];
    codes.contains(answer.code()) && answer.message().contains("options")
}

/// Whether a table does not exist, or is not of this version.
pub(crate) fn is_about_tables(error: &Error) -> bool {
    error.code().is_some_and(|code| {
        *code == SqlState::UNDEFINED_TABLE || *code == SqlState::UNDEFINED_COLUMN
    })
}

/// The failure of a server that accepts no locks.
pub(crate) fn read_only(server: &str) -> BackendError {
    let message = format!("PostgreSQL at {server} is read-only, as a standby is");
    BackendError::new(FailureKind::NotApplied, message).remedy(TO_THE_PRIMARY)
}

const TO_THE_PRIMARY: &str =
    "point the URL at the primary, or name all servers: `postgres://host1,host2/database`";

/// Whether a row was locked elsewhere for too long, so that the statement had no effect.
pub(crate) fn is_lock_timeout(error: &BackendError) -> bool {
    let code = error.cause::<Error>().and_then(Error::code);
    code == Some(&SqlState::LOCK_NOT_AVAILABLE)
}

/// The failure of a commit that has waited too long for a lock. It is the lock of no row: a transaction that notifies takes one
/// lock of all databases of the server when it commits.
pub(crate) fn blocked_commit(error: &Error) -> Option<BackendError> {
    let answer = error.as_db_error().filter(|it| *it.code() == SqlState::LOCK_NOT_AVAILABLE)?;
    // The cause is left out: by it, `is_lock_timeout` would find a locked row.
    let text = message("has cancelled a commit that waited for the lock of all `NOTIFY`", answer);
    Some(BackendError::new(FailureKind::NotApplied, text).remedy(
        "look for commits that take long after a `NOTIFY`, in any database of the server, in `pg_stat_activity`",
    ))
}

/// Where to look for a session that keeps rows locked.
pub(crate) const LONG_TRANSACTIONS: &str =
    "look for long transactions on the tables of the locks in `pg_stat_activity`";

fn message(what: &str, answer: &DbError) -> String {
    format!("PostgreSQL {what}: {} (SQLSTATE {})", answer.message(), answer.code().code())
}

fn refusal(answer: &DbError) -> (FailureKind, &'static str, &'static str) {
    use FailureKind::{MaybeApplied, NotApplied, Rejected};
    let code = answer.code();
    let is_any = |codes: &[&SqlState]| codes.contains(&code);
    if is_any(&[&SqlState::T_R_SERIALIZATION_FAILURE, &SqlState::T_R_DEADLOCK_DETECTED]) {
        return (NotApplied, "has rolled the statement back", "it passes on its own");
    }
    if is_any(&[&SqlState::LOCK_NOT_AVAILABLE, &SqlState::QUERY_CANCELED]) {
        return (NotApplied, "has cancelled a statement that took too long", LONG_TRANSACTIONS);
    }
    if is_any(&[&SqlState::CANNOT_CONNECT_NOW, &SqlState::TOO_MANY_CONNECTIONS]) {
        return (
            NotApplied,
            "accepts no connection now",
            "a pool of locks uses two connections; raise `max_connections` if this lasts",
        );
    }
    if is_any(&[&SqlState::READ_ONLY_SQL_TRANSACTION]) {
        return (NotApplied, "is read-only", TO_THE_PRIMARY);
    }
    if is_any(&[&SqlState::DISK_FULL, &SqlState::OUT_OF_MEMORY]) {
        return (NotApplied, "has no room left", "make room on the server");
    }
    if is_any(&[&SqlState::INSUFFICIENT_PRIVILEGE]) && answer.message().contains("schema") {
        return (Rejected, "refuses to make the tables for lack of rights", schema::REMEDY);
    }
    if is_any(&[&SqlState::INSUFFICIENT_PRIVILEGE]) && answer.message().contains("_fence") {
        return (
            Rejected,
            "refuses the statement for lack of rights",
            "grant the rights: `GRANT SELECT, INSERT, UPDATE, DELETE ON lock_fence TO the_user`",
        );
    }
    if is_any(&[&SqlState::INSUFFICIENT_PRIVILEGE]) {
        return (
            Rejected,
            "refuses the statement for lack of rights",
            "grant the rights: `GRANT SELECT, INSERT, UPDATE, DELETE ON lock_lease, lock_queue TO the_user`",
        );
    }
    if is_any(&[&SqlState::UNDEFINED_TABLE]) && answer.message().contains("_fence\"") {
        return (Rejected, "does not have the table of the fences", schema::FENCE_REMEDY);
    }
    if is_any(&[&SqlState::UNDEFINED_TABLE, &SqlState::UNDEFINED_COLUMN]) {
        return (Rejected, "does not have the tables of the locks", schema::REMEDY);
    }
    if is_any(&[&SqlState::INVALID_PASSWORD, &SqlState::INVALID_AUTHORIZATION_SPECIFICATION]) {
        return (
            Rejected,
            "refuses the user or the password",
            "check user and password in the URL, and `pg_hba.conf` on the server",
        );
    }
    if is_any(&[&SqlState::INVALID_SCHEMA_NAME]) {
        return (Rejected, "does not have the schema", "make it: `CREATE SCHEMA ..`");
    }
    if is_any(&[&SqlState::UNDEFINED_DATABASE]) {
        return (
            Rejected,
            "does not have the database",
            "check the name after the last `/` of the URL",
        );
    }
    // The session has ended, or the server or a pooler is in trouble: the statement may have been committed before.
    let is_fatal = matches!(answer.parsed_severity(), Some(Severity::Fatal | Severity::Panic));
    let class = &code.code()[..2];
    if is_fatal || ["08", "57", "58", "XX"].contains(&class) {
        return (MaybeApplied, "has ended the connection", "it is reopened automatically");
    }
    (Rejected, "refuses the statement", "see the server's log for the statement")
}
