//! The tables of the locks, and the statements on them.

use crate::backend::mysql::script::Template;
use crate::backend::sql::tables::{InfoColumn, Pins, TableNames};

/// What to do where the tables are missing.
pub(crate) const REMEDY: &str = "run the statements in `docs/mysql.md`, or add `?create=on` to the URL of a user that may create tables";

/// What to do where the table of the fences is missing.
pub(crate) const FENCE_REMEDY: &str = "`?pin=on` needs one more table: run ``CREATE TABLE lock_fence (`key` varbinary(512) NOT NULL PRIMARY KEY, fence bigint NOT NULL) ENGINE = InnoDB``, with the prefix of `?table=`, or add `?create=on` to the URL of a user that may create tables";

/// The statements of the store, with the names of its tables.
#[derive(Debug)]
pub(crate) struct MysqlStatements {
    pub(crate) tables: Template,
    pub(crate) check: Template,
    pub(crate) session: Template,
    pub(crate) limits: Template,
    pub(crate) introduction: Template,
    pub(crate) begin: Template,
    pub(crate) commit: Template,
    pub(crate) roll_back: Template,
    pub(crate) clock: Template,
    pub(crate) acquire: Template,
    pub(crate) leases: Template,
    pub(crate) enqueue: Template,
    pub(crate) leave_queue: Template,
    pub(crate) add_rows: Template,
    pub(crate) acquire_all: Template,
    pub(crate) lock_rows: Template,
    pub(crate) free_rows: Template,
    pub(crate) unlocked: Template,
    pub(crate) renew: Template,
    pub(crate) held: Template,
    pub(crate) inspect: Template,
    pub(crate) list: Template,
    pub(crate) release: Template,
    pub(crate) hand_off: Template,
    pub(crate) look: Template,
    pub(crate) contended: Template,
    pub(crate) sweep: Template,
    pub(crate) sweep_rows: Template,
    pub(crate) abandoned: Template,
    pub(crate) sweep_queue: Template,
    pub(crate) settings: Template,
    /// Whether a grant raises the fence in its table.
    pub(crate) pins: Pins,
    /// Whether the statements name the column for a text about the owner.
    pub(crate) info: InfoColumn,
}

impl MysqlStatements {
    pub(crate) fn new(names: TableNames<'_>) -> Self {
        let sql = |text: &str| Template::parse(names.apply(text).trim_end());
        Self {
            tables: sql(include_str!("sql/schema.sql").trim_end().trim_end_matches(';')),
            check: sql(include_str!("sql/check.sql")),
            session: sql(include_str!("sql/session.sql")),
            limits: sql(include_str!("sql/limits.sql")),
            introduction: sql(include_str!("sql/introduction.sql")),
            begin: sql("START TRANSACTION"),
            commit: sql("COMMIT"),
            roll_back: sql("ROLLBACK"),
            clock: sql(include_str!("sql/clock.sql")),
            acquire: sql(include_str!("sql/acquire.sql")),
            leases: sql(include_str!("sql/leases.sql")),
            enqueue: sql(include_str!("sql/enqueue.sql")),
            leave_queue: sql(include_str!("sql/leave_queue.sql")),
            add_rows: sql(include_str!("sql/add_rows.sql")),
            acquire_all: sql(include_str!("sql/acquire_all.sql")),
            lock_rows: sql(include_str!("sql/lock_rows.sql")),
            free_rows: sql(include_str!("sql/free_rows.sql")),
            unlocked: sql(include_str!("sql/unlocked.sql")),
            renew: sql(include_str!("sql/renew.sql")),
            held: sql(include_str!("sql/held.sql")),
            inspect: sql(include_str!("sql/inspect.sql")),
            list: sql(include_str!("sql/list.sql")),
            release: sql(include_str!("sql/release.sql")),
            hand_off: sql(include_str!("sql/hand_off.sql")),
            look: sql(include_str!("sql/look.sql")),
            contended: sql(include_str!("sql/contended.sql")),
            sweep: sql(include_str!("sql/sweep.sql")),
            sweep_rows: sql(include_str!("sql/sweep_rows.sql")),
            abandoned: sql(include_str!("sql/abandoned.sql")),
            sweep_queue: sql(include_str!("sql/sweep_queue.sql")),
            settings: sql(include_str!("sql/settings.sql")),
            pins: names.pins,
            info: names.info,
        }
    }
}
