-- The keys with a row that another transaction has locked. Waits for none.
-- $1 keys
WITH free AS MATERIALIZED (
    SELECT key FROM lock_lease WHERE key = ANY ($1::bytea[]) ORDER BY key FOR UPDATE SKIP LOCKED
)
SELECT key FROM lock_lease WHERE key = ANY ($1::bytea[]) AND key NOT IN (SELECT key FROM free)
