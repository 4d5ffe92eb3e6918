-- Frees each key that is its owner's and has no wait queue, or keeps it for a while, or grants it to the successor.
-- $1 keys, $2 owners, $3 microseconds until the keys are free, $4 successors or '', $5 microseconds of their leases
-- One row for each key for which this was done: the key, its former owner
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bigint[], $4::bytea[], $5::bigint[])
        AS asked (key, owner, free_after, successor, kept)
), held AS MATERIALIZED (
    SELECT asked.*
    FROM lock_lease AS lease JOIN asked ON asked.key = lease.key AND asked.owner = lease.owner
    WHERE lease.until > statement_timestamp() AND (free_after > 0 OR NOT lease.contended)
    ORDER BY lease.key
    -- What is locked here is left for hand_off.sql.
    FOR UPDATE OF lease SKIP LOCKED
)
UPDATE lock_lease AS lease SET
    owner = CASE WHEN free_after > 0 THEN lease.owner ELSE successor END,
    until = statement_timestamp()
        + CASE WHEN free_after > 0 THEN free_after ELSE kept END * interval '1 microsecond',
    fence = CASE WHEN free_after = 0 AND successor <> '' THEN greatest(
        last_fence + 1, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
    ) ELSE fence END,
    last_fence = CASE WHEN free_after = 0 AND successor <> '' THEN greatest(
        last_fence + 1, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
    ) ELSE last_fence END
FROM held
WHERE lease.key = held.key
RETURNING lease.key, held.owner
