-- Whether the leases have the column for a text about their owner, and this user may write it.
SELECT EXISTS (
    SELECT FROM pg_attribute
    WHERE attrelid = to_regclass('lock_lease') AND attname = 'info' AND NOT attisdropped
        AND has_column_privilege(attrelid, attnum, 'SELECT')
        AND has_column_privilege(attrelid, attnum, 'INSERT')
        AND has_column_privilege(attrelid, attnum, 'UPDATE')
)
