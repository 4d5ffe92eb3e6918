-- Extends each lease of which the owner has all keys. In the statement `renew`, a row that is locked counts as not the
-- owner's; `renew_rest` waits for it.
-- $1 numbers of the leases, $2 keys, $3 owners, $4 microseconds of the leases, $5 how many keys each lease has,
-- $6 channel of this process or ''; one element for each key
-- One row for each key that was extended: the number of its lease, the key, whether owners are queued
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::bytea[], $4::bigint[], $5::bigint[])
        AS asked (number, key, owner, kept, keys)
), held AS MATERIALIZED (
    SELECT asked.*
    FROM lock_lease AS lease JOIN asked ON asked.key = lease.key AND asked.owner = lease.owner
    WHERE lease.until > statement_timestamp()
    ORDER BY lease.key
    FOR UPDATE OF lease SKIP LOCKED
), counted AS MATERIALIZED (
    -- Not by a join: the planner expects one row, and would compare each key with each lease.
    SELECT *, count(*) OVER (PARTITION BY number) AS held_keys FROM held
)
UPDATE lock_lease AS lease SET
    until = greatest(lease.until, statement_timestamp() + counted.kept * interval '1 microsecond'),
    channel = $6
FROM counted
WHERE lease.key = counted.key AND counted.held_keys = counted.keys
RETURNING counted.number, lease.key, lease.contended
