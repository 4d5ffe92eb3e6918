-- Deletes rows of locks that have been free for a long time, and entries of processes that have ended. Reads a
-- bounded number of rows behind a key.
-- $1 the key, $2 seconds since the end of the lease, $3 number of rows
-- One row: the last key that was read. None at the end of the table
WITH read AS MATERIALIZED (
    SELECT key, until FROM lock_lease WHERE key > $1::bytea ORDER BY key LIMIT $3
), swept AS (
    DELETE FROM lock_lease AS lease USING (
        SELECT old.key FROM lock_lease AS old JOIN read ON read.key = old.key
        WHERE old.until < statement_timestamp() - $2 * interval '1 second'
        ORDER BY old.key
        FOR UPDATE OF old SKIP LOCKED
    ) AS old
    WHERE lease.key = old.key
    RETURNING lease.key
), /*pin unpinned AS (
    DELETE FROM lock_fence AS pin USING (
        SELECT fence.key FROM lock_fence AS fence JOIN swept ON swept.key = fence.key
        ORDER BY fence.key
        FOR UPDATE OF fence SKIP LOCKED
    ) AS old
    WHERE pin.key = old.key
), pin*/ abandoned AS (
    DELETE FROM lock_queue AS queued USING (
        SELECT key, position FROM lock_queue WHERE seen < statement_timestamp() - interval '1 minute'
        LIMIT $3 FOR UPDATE SKIP LOCKED
    ) AS old
    WHERE queued.key = old.key AND queued.position = old.position
)
SELECT key AS last FROM read ORDER BY key DESC LIMIT 1
