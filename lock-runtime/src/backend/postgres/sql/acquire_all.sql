-- Grants all keys to one owner, or none. Runs behind lock_rows.sql, and every key has a row.
-- $1 keys, $2 owner, $3 microseconds of the lease, $4 number of further fences, $5 channel of this process or '',
-- $6 a text about the owner
-- One row: first fence or NULL if refused; whether owners are queued; microseconds until the last lease of another
-- owner expires.
WITH found AS MATERIALIZED (
    SELECT key, until, fence, last_fence,
        until > statement_timestamp() AND owner = $2::bytea AS is_own,
        until > statement_timestamp() AND owner NOT IN ($2::bytea, '') AS is_held
    FROM lock_lease WHERE key = ANY ($1::bytea[])
    -- Also a row that was made behind lock_rows.sql.
    ORDER BY key
    FOR UPDATE
), /*pin unpinned AS MATERIALIZED (
    -- A fence row that is locked is pinned by an open transaction of a former holder.
    SELECT pin.key FROM lock_fence AS pin JOIN found ON found.key = pin.key
    WHERE NOT EXISTS (SELECT FROM found AS other WHERE other.is_held)
    ORDER BY pin.key
    FOR UPDATE OF pin SKIP LOCKED
), pin*/ number AS MATERIALIZED (
    -- A repeated request finds one fence on all keys. Keys that were taken one by one have different ones.
    -- A row that was swept meanwhile is refused too: the repeated request makes it again.
    SELECT bool_or(is_held) OR count(*) < cardinality($1::bytea[]) /*pin OR EXISTS (
            SELECT FROM lock_fence AS pin WHERE pin.key = ANY ($1::bytea[])
                AND NOT EXISTS (SELECT FROM unpinned WHERE unpinned.key = pin.key)
        ) pin*/ AS is_held,
        CASE WHEN bool_and(is_own) AND min(fence) = max(fence) THEN max(fence)
            ELSE greatest(
                max(last_fence) + 1, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
            ) END AS fence
    FROM found
), left_queue AS (
    DELETE FROM lock_queue AS queued USING number
    WHERE queued.key = ANY ($1::bytea[]) AND queued.owner = $2::bytea AND NOT number.is_held
), granted AS (
    UPDATE lock_lease AS lease SET
        owner = $2::bytea,
        channel = $5,
        /*info info = $6::bytea, info*/
        until = CASE WHEN is_own THEN greatest(lease.until, statement_timestamp() + $3 * interval '1 microsecond')
            ELSE statement_timestamp() + $3 * interval '1 microsecond' END,
        fence = number.fence,
        last_fence = greatest(lease.last_fence, number.fence + $4)
    FROM found, number
    WHERE lease.key = found.key AND NOT number.is_held
    RETURNING lease.key, lease.fence, lease.contended
) /*pin , raised AS (
    -- Fails the pins of former holders from here on.
    INSERT INTO lock_fence AS pin (key, fence) SELECT key, fence FROM granted ORDER BY key
    ON CONFLICT (key) DO UPDATE SET fence = excluded.fence WHERE pin.fence <> excluded.fence
) pin*/
SELECT (SELECT max(fence) FROM granted) AS fence, (SELECT bool_or(contended) FROM granted) AS contended,
    (SELECT (extract(epoch FROM max(until) - statement_timestamp()) * 1000000)::bigint FROM found WHERE is_held)
        AS expires_in
