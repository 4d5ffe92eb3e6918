//! The statement by which a transaction depends on a grant.

use std::fmt::Write;

use crate::backend::sql::tables::{Pins, TableNames};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::sql_dialect::SqlDialect;

/// The table of the fences, as its statements name it.
#[derive(Clone, Debug)]
pub(crate) struct FenceTable {
    dialect: SqlDialect,
    name: String,
}

impl FenceTable {
    /// `None` without pins.
    pub(crate) fn of(dialect: SqlDialect, names: TableNames<'_>) -> Option<Self> {
        (names.pins == Pins::On).then(|| Self { dialect, name: names.quoted("_fence") })
    }

    /// A statement that fails unless `fence` is the last one of all `keys`. That fence then stays the last one until
    /// the end of the transaction. Every value is a number or hexadecimal digits.
    pub(crate) fn pin(&self, keys: &[Key], fence: Fence) -> String {
        let (before, behind) = match self.dialect {
            SqlDialect::Postgres => ("decode('", "', 'hex')"),
            SqlDialect::MySql => ("x'", "'"),
        };
        let mut list = String::new();
        for key in keys {
            list.push_str(if list.is_empty() { "" } else { ", " });
            list.push_str(before);
            for byte in key.as_str().bytes() {
                let _ = write!(list, "{byte:02x}");
            }
            list.push_str(behind);
        }
        let (name, count) = (&self.name, keys.len());
        match self.dialect {
            // A failed statement ends the transaction: it can only be rolled back.
            SqlDialect::Postgres => format!(
                "DO $pin$ BEGIN
    IF (SELECT count(*) FROM (
        SELECT 1 FROM {name} WHERE key IN ({list}) AND fence = {fence} ORDER BY key FOR SHARE
    ) AS pinned) <> {count} THEN
        RAISE EXCEPTION USING ERRCODE = 'LK001',
            MESSAGE = 'the lock of this transaction is lost: fence {fence} is not the last one',
            HINT = 'Roll the transaction back. Another holder may have written since.';
    END IF;
END $pin$"
            ),
            // A sum beyond the greatest number is an error in every mode, and its text names the column.
            SqlDialect::MySql => format!(
                "SELECT ~0 + the_lock_is_lost FROM (
    SELECT COUNT(*) <> {count} AS the_lock_is_lost FROM (
        SELECT 1 FROM {name} FORCE INDEX (PRIMARY) WHERE `key` IN ({list}) AND fence = {fence} ORDER BY `key` LOCK IN SHARE MODE
    ) AS pinned
) AS pin"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::sql::tables::InfoColumn;

    #[test]
    fn a_pin_has_no_text_of_a_key() {
        let keys = ["it's; $pin$ \\ `\"", "b"].map(Key::from);
        for (dialect, quote, table) in [
            (SqlDialect::Postgres, '"', "\"app\".\"lock_fence\""),
            (SqlDialect::MySql, '`', "`app`.`lock_fence`"),
        ] {
            let info = InfoColumn::Named;
            let names = TableNames { prefix: "app.lock", quote, pins: Pins::On, info };
            let pin = FenceTable::of(dialect, names).unwrap().pin(&keys, Fence::new(34));
            assert!(
                pin.contains(table) && pin.contains("fence = 34") && pin.contains("<> 2"),
                "{pin}"
            );
            assert!(pin.contains("'6974277320") || pin.contains("'697427733b20"), "{pin}");
            assert!(pin.contains("'62'") && !pin.contains("it's"), "{pin}");
        }
    }
}
